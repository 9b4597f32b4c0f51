// The query of an item as DecodeConsumerInt2 reads it: B fragments in lane order, made once an item
// by the scheduler warp rather than by every consumer. Device only.
//
//   [4][32 lanes] 16 B   k-steps 2i and 2i + 1. Column 2h is head h, the odd columns are zero.
//   [32 lanes] 8 B       of pages: {raw logit of all codes 1, raw logit -> log2 units}, head lane %
//   4
// Against pages fp16, times 2^(4 - exponent of the k-step) and a power of two a head; against the
// windows BF16 as it is.
#pragma once

#include "cuda/kernels/decode_traits.cuh"

namespace oscar::cuda {

template <typename T>
class DecodeQueryInt2 {
 public:
  static constexpr int kFragmentBytes = T::kSteps / 2 * 512;
  static constexpr int kBytes = kFragmentBytes + 256;

  __device__ static const float2* Factors(const uint8_t* query) {
    return reinterpret_cast<const float2*>(query + kFragmentBytes);
  }

  // q: the item's first query row, in global memory.
  __device__ static void Prepare(const uint16_t* q, int heads, bool pages, float scale_log2,
                                 uint8_t* query, int lane) {
    const int row = lane >> 2, quad = lane & 3;
    const bool valid = (row & 1) == 0 && row / 2 < heads;
    q += row / 2 * T::kDim + quad * 2;
    uint32_t b[T::kSteps][2];
#pragma unroll
    for (int i = 0; i < 2 * T::kSteps; ++i) {
      b[i / 2][i % 2] = valid ? __ldg(reinterpret_cast<const uint32_t*>(q + i * 8)) : 0u;
    }
    if (pages) Scale(b, scale_log2, query, lane, quad);
#pragma unroll
    for (int i = 0; i < T::kSteps / 2; ++i) {
      reinterpret_cast<uint4*>(query)[i * 32 + lane] = {b[2 * i][0], b[2 * i][1], b[2 * i + 1][0],
                                                        b[2 * i + 1][1]};
    }
  }

 private:
  __device__ static __forceinline__ void Scale(uint32_t (&b)[T::kSteps][2], float scale_log2,
                                               uint8_t* query, int lane, int quad) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 2 * T::kSteps; ++i) {
      const uint32_t pair = b[i / 2][i % 2];
      most = max(most, max(pair << 16 & 0x7fff0000u, pair & 0x7fff0000u));
    }
    most = max(most, __shfl_xor_sync(~0u, most, 1));
    most = max(most, __shfl_xor_sync(~0u, most, 2));
    const int exponent = most > 0 ? static_cast<int>(most >> 23) - 127 - 10 : 0;
    float ones[4] = {};
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      const float f = Power2(4 - T::Exponent(s) - exponent);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        b[s][j] = PackHalf(Bf16Low(b[s][j]) * f, Bf16High(b[s][j]) * f);
      }
      const uint32_t one = 0x00010001u << T::Exponent(s);
      MmaFp16(ones, one, one, one, one, b[s][0], b[s][1]);
    }
    const float factor = scale_log2 * Power2(20) * Power2(exponent);  // of column lane / 4
    reinterpret_cast<float2*>(query + kFragmentBytes)[lane] = {ones[0],
                                                               __shfl_sync(~0u, factor, quad * 8)};
  }
};

}  // namespace oscar::cuda
