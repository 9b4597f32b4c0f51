// PortablePass: a pass in the CPU's order of sums, with activations in fp32: the same logits as
// `CpuModelOptions::portable`, bit for bit. Takes the place of CudaDecoder's products and attention
// where CudaModelOptions::portable asks for it. Owns no memory. One thread.
#pragma once

#include <memory>

#include "arch/spec.h"
#include "backend/kv_plan.h"
#include "cuda/device_weights.h"
#include "cuda/pass_plan.h"
#include "cuda/portable/portable_attention.h"
#include "oscar/status.h"

namespace oscar::cuda {

class PortablePass {
 public:
  static Result<std::unique_ptr<PortablePass>> Create(const ModelSpec& spec, const KvPlan& plan,
                                                      const AttentionShape& shape, Stream stream);
  // Takes memory for `rows` rows of a pass and `logit_rows` of logits. `qkv` and `gate_up`
  // [gate_up_rows, 2 intermediate] are the caller's.
  void Carve(DeviceCarver& carver, size_t rows, size_t logit_rows);
  void Use(float* qkv, float* gate_up, int gate_up_rows) {
    qkv_ = qkv;
    gate_up_ = gate_up;
    gate_up_rows_ = gate_up_rows;
  }

  // The first half of a layer: q, k and v of the rows of x, after norm and RoPE.
  Status Project(const DeviceLayer& layer, const float* cos_sin, const Pass& pass, const float* x);
  // The rest: keys and values to their pages, attention, feed-forward; adds to x.
  Status Finish(const DeviceLayer& layer, const CacheView& view, int index, const Pass& pass,
                float* x);
  // Of rows `sources` of x (null: the first `rows`).
  Status Logits(const DeviceWeights& weights, const float* x, const int32_t* sources, int rows,
                float* logits);

 private:
  PortablePass(const ModelSpec& spec, const KvPlan& plan, const PortableAttention& attention,
               Stream stream)
      : spec_(spec), plan_(plan), attention_(attention), stream_(stream) {}
  int q_width() const { return spec_.num_heads * spec_.head_dim; }
  int qkv_width() const { return (spec_.num_heads + 2 * spec_.num_kv_heads) * spec_.head_dim; }
  Status Product(const DeviceMatrix& matrix, const float* x, const float* bias, float* out,
                 int rows, bool add = false);

  const ModelSpec& spec_;
  const KvPlan& plan_;
  PortableAttention attention_;
  Stream stream_;
  float* normed_ = nullptr;    // [rows, hidden]
  float* attended_ = nullptr;  // [rows, q]
  float* product_ = nullptr;   // [rows, intermediate]
  float* qkv_ = nullptr;       // [rows, qkv]
  float* gate_up_ = nullptr;
  int gate_up_rows_ = 0;
};

}  // namespace oscar::cuda
