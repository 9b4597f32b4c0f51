// A decoder's weights in device memory: BF16 matrices, fp32 norms and biases, RoPE angles and
// rotations, in one allocation. Immutable after loading.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/half.h"
#include "cuda/cache_view.h"
#include "cuda/kv_write.h"
#include "model/kv_plan.h"
#include "model/spec.h"
#include "model/weights.h"

namespace oscar::gpu {

struct DeviceLayer {
  Bf16* qkv = nullptr;      // [(heads + 2 kv_heads) D, hidden]
  Bf16* o = nullptr;        // [hidden, heads D]
  Bf16* gate_up = nullptr;  // [2 intermediate, hidden]
  Bf16* down = nullptr;     // [hidden, intermediate]
  float *attention_norm = nullptr, *feed_forward_norm = nullptr;
  float *q_norm = nullptr, *k_norm = nullptr, *qkv_bias = nullptr, *o_bias = nullptr;  // or null
  cuda::Rotation rotation = cuda::Rotation::kNone;
  uint32_t* rotation_fragments = nullptr;
  int rotations = 1;
};

struct DeviceWeights {
  Bf16* embedding = nullptr;  // [vocab, hidden]
  Bf16* head = nullptr;       // [vocab, hidden]; the embedding where tied
  float* final_norm = nullptr;
  float* cos_sin = nullptr;  // [positions, D / 2, 2]
  std::vector<DeviceLayer> layers;
  uint64_t matrix_bytes = 0;    // of all matrices, embedding and head included
  uint64_t bytes_per_step = 0;  // of the matrices that one token reads
};

// Hands out pieces of one block of memory; with a null base it only counts.
class DeviceCarver {
 public:
  explicit DeviceCarver(std::byte* base) : base_(base) {}
  template <typename T>
  T* Take(size_t count) {
    T* at = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (count * sizeof(T) + 255) / 256 * 256;
    return at;
  }
  uint64_t used() const { return used_; }

 private:
  std::byte* base_;
  uint64_t used_ = 0;
};

// Lays out the weights; the same calls with a null carver give the bytes needed.
DeviceWeights CarveWeights(const ModelSpec& spec, const KvPlan& plan, int64_t positions,
                           DeviceCarver& carver);
// Fills what CarveWeights laid out: one tensor at a time, V's rotation absorbed. Random weights are
// drawn on the device, in the model's own basis (they mean nothing in any).
Status LoadWeights(const ModelSpec& spec, const KvPlan& plan, const WeightSource& source,
                   int64_t positions, cuda::Stream stream, DeviceWeights& weights);

}  // namespace oscar::gpu
