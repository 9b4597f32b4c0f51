// What launcher and write kernel agree on. Host and device.
#pragma once

#include <vector_types.h>

#include <cstdint>

#include "cuda/attention/cache_view.h"

namespace oscar::cuda {

struct WriteKernelParams {
  const float* qkv;           // [tokens, qkv_stride]: q heads, k heads, v heads
  int64_t qkv_stride;         // elements
  const int32_t* positions;   // [tokens]; negative: a padded row, nothing is read or written
  const int32_t* table_rows;  // [tokens]
  const float2* cos_sin;      // [positions, rotary_half]; null: no RoPE
  const float* q_norm;        // [D], or of all heads where there are factors; null: no norm
  const float* k_norm;        // likewise
  const float* factors;       // [tokens, 2], of a norm over all heads of q and of k; or null
  const uint4* rotation;      // [rotations, D / 16, D / 8, 32]: fragments, (b0, b1) high, then low
  uint16_t* q_out;            // [tokens, q_heads, D]
  std::byte* window_pool;
  CacheView cache;
  int32_t tokens, num_q_heads, num_kv_heads;
  int32_t rotations;    // 1 or num_kv_heads
  int32_t rotary_half;  // pairs that RoPE turns
  float norm_epsilon;
  float q_scale;
};

inline constexpr int kWriteWarps = 4;

}  // namespace oscar::cuda
