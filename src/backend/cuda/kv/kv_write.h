// KvWrite: norm, RoPE, rotation and rounding of new tokens, K and V to their window pages and
// rotated queries to the attention kernel's input; one launch a layer, at prefill and at decode.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cuda/attention/cache_view.h"
#include "oscar/status.h"
#include "quant/rotation_kind.h"

namespace oscar::cuda {

// Kernels have a Hadamard of the whole head; other rotations are matrices to them.
constexpr bool IsMatrix(RotationKind rotation) {
  return rotation == RotationKind::kBlockHadamard || rotation == RotationKind::kCalibrated;
}

struct WriteArguments {
  const float* qkv =
      nullptr;             // [tokens, qkv_stride], device: q heads, k heads, v heads; V absorbed
  int64_t qkv_stride = 0;  // elements, a multiple of 8
  const int32_t* positions = nullptr;   // [tokens], device; negative: a padded row
  const int32_t* table_rows = nullptr;  // [tokens], device
  const float* cos_sin = nullptr;  // [max position + 1, rotary_dims / 2, 2], device; null: no RoPE
  int rotary_dims = 0;             // leading dims of a head that RoPE turns; 0: all
  const float* q_norm = nullptr;   // [D], device; null: no norm
  const float* k_norm = nullptr;   // [D], device
  // [tokens, 2], device, LaunchHeadFactors's: the norm is over all heads of q and of k, whose
  // weights are [q_heads, D] and [kv_heads, D]. Null: head by head.
  const float* factors = nullptr;
  float norm_epsilon = 1e-6f;
  float q_scale = 1.0f;  // multiplies q before its one rounding
  RotationKind rotation = RotationKind::kNone;
  const uint32_t* rotation_fragments = nullptr;  // PackRotation's words, device
  int rotations = 1;                             // matrices: 1 or one per KV head
  Bf16* q_out = nullptr;                         // [tokens, q_heads, D], device
  std::byte* window_pool = nullptr;
  CacheView cache;  // for the window table; its pools are not used
  int tokens = 0;
};

// A rotation [D, D] (x R, row-major, fp32) as two BF16 halves in tensor-core B fragments; D * D
// words. Concatenate one per KV head for per-head rotations.
std::vector<uint32_t> PackRotation(std::span<const float> rotation, int head_dim);

// Asynchronous; may be captured in a graph.
Status WriteTokens(const AttentionShape& shape, const WriteArguments& args, Stream stream);

}  // namespace oscar::cuda
