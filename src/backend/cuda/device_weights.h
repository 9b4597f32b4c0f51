// A decoder's weights in device memory: BF16 or FP8 matrices, fp32 norms and biases, RoPE angles
// and rotations, in one allocation. Immutable after loading.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "arch/tensor_table.h"
#include "backend/kv_plan.h"
#include "base/half.h"
#include "cuda/attention/cache_view.h"
#include "cuda/gemm/gemm_arguments.h"
#include "cuda/kv/kv_write.h"
#include "weights/source.h"

namespace oscar::cuda {

// Of one expert, as portable passes take it: BF16, MXFP4, or FP8 codes with a scale for each output
// and `scale_inputs` inputs.
struct PortableMatrix {
  Bf16* weights = nullptr;          // [outputs, inputs]; or
  uint8_t* mxfp4_codes = nullptr;   // [outputs, inputs / 2], base/mxfp4.h, with
  uint8_t* mxfp4_scales = nullptr;  // [outputs, inputs / 32]; or
  uint8_t* codes = nullptr;         // [outputs, inputs], with
  float* scales = nullptr;          // [outputs, inputs / scale_inputs, rounded up]
  int scale_inputs = 0;
};

// The routed experts of a layer.
struct DeviceExperts {
  float* router = nullptr;       // [experts, hidden], times the norm's weights; portable: without
  float* choice_bias = nullptr;  // [experts], or null
  // [experts], [experts, 2 intermediate], [experts, hidden], in the order of their matrices, or
  // null.
  float *logit_bias = nullptr, *gate_up_bias = nullptr, *down_bias = nullptr;
  // Rows of all experts, one expert after another, inputs padded (PaddedInputs): gates, then ups of
  // each; or, where passes are portable, each by itself, rows as they are stored, and the same in
  // device memory.
  DeviceMatrix gate_up, down;
  std::vector<PortableMatrix> portable_gate_up, portable_down;
  PortableMatrix *gate_up_table = nullptr, *down_table = nullptr;
  uint64_t bytes_each = 0;  // of an expert's matrices
};

// Of a layer with a recurrent state (LinearAttentionSpec).
struct DeviceStateLayer {
  // [input_width, hidden]; where its first rows are FP8, the last ones (b and a) are `gates`.
  DeviceMatrix in, gates;
  DeviceMatrix out;             // [hidden, value_width]
  float* conv = nullptr;        // [conv_kernel, conv_channels]
  float* decay_rate = nullptr;  // [value_heads], exp(A_log)
  float* step_bias = nullptr;   // [value_heads]
  float* norm = nullptr;        // [value_dim]
};

struct DeviceLayer {
  // q, k, v and gate rows [qkv_width, hidden], v where it is stored as q and k are; else `v`
  // [kv_heads D, hidden] and, where there are gates, `gates` [heads D, hidden] have outputs.
  DeviceMatrix qkv, v, gates;
  DeviceMatrix o;        // [hidden, heads D]
  DeviceMatrix gate_up;  // [2 intermediate, hidden]; of the shared part, where a layer has experts
  DeviceMatrix down;     // [hidden, intermediate], likewise
  DeviceExperts experts;
  DeviceStateLayer state;
  float *attention_norm = nullptr, *feed_forward_norm = nullptr;
  float *q_norm = nullptr, *k_norm = nullptr, *qkv_bias = nullptr, *o_bias = nullptr;  // or null
  float* sinks = nullptr;  // [heads], times log2(e) but where passes are portable; or null
  RotationKind rotation = RotationKind::kNone;
  uint32_t* rotation_fragments = nullptr;
  float* rotation_matrices = nullptr;  // [rotations, D, D], where passes are portable
  int rotations = 1;
  // What undoes V's rotation before gates, where it is not a Hadamard: [value_turns, D, D], turned
  // rows are x M; where passes are portable the rotation itself.
  float* value_turn = nullptr;
  int value_turns = 1;
  float* shared_share = nullptr;  // [hidden], times the norm's weights; portable: without; or null
};

struct DeviceWeights {
  DeviceMatrix embedding;  // [vocab, hidden]
  DeviceMatrix head;       // [vocab, hidden]; the embedding where tied
  float* final_norm = nullptr;
  float* cos_sin = nullptr;  // [positions, rotary dims / 2, 2]
  std::vector<DeviceLayer> layers;
  uint64_t matrix_bytes = 0;    // of all matrices, embedding and head included
  uint64_t bytes_per_step = 0;  // of the matrices that one token reads
  uint64_t unrouted_bytes = 0;  // of the experts that one token does not go to
  uint64_t largest_fp8 = 0;     // weights of the largest FP8 matrix that is multiplied out
  uint64_t largest_expert = 0;  // weights of an expert's largest matrix
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

// Lays out the weights; the same call with a null carver gives the bytes needed. Matrices that are
// FP8 in the source stay so, except where V's rotation is absorbed, where scales lie otherwise than
// kernels take them, or where parts of one matrix are stored differently: those are BF16. For
// portable passes all are BF16, as on the CPU.
Result<DeviceWeights> CarveWeights(const ModelSpec& spec, const KvPlan& plan,
                                   const WeightSource& source, int64_t positions, bool portable,
                                   DeviceCarver& carver);
// Fills what CarveWeights laid out: one tensor at a time, V's rotation absorbed. Random weights are
// sampled on the device, in the model's own basis (they mean nothing in any); `scratch` holds
// largest_fp8 weights in BF16 meanwhile.
Status LoadWeights(const ModelSpec& spec, const KvPlan& plan, const WeightSource& source,
                   int64_t positions, bool portable, Bf16* scratch, Stream stream,
                   DeviceWeights& weights);

}  // namespace oscar::cuda
