// Expands one side of a quantised page to fp16 in shared memory, where tensor cores read it with
// 128-byte swizzle. Device only; 128 threads, thread = (16-token tile, lane) of the page's fragment
// order, so every 4-byte store of a warp falls into 32 different banks.
//
//   K  [D / 64 planes][64 tokens][128 B]   planes `plane_stride` bytes apart
//   V  [D dims][64 tokens = 128 B]         transposed, as its fragments lie
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cache/page_layout.h"

namespace oscar::cuda {

__device__ __forceinline__ __half2 BitsAsHalf2(uint32_t x) {
  return *reinterpret_cast<const __half2*>(&x);
}

// The pair of codes at `bit` and 16 above it, times scale, plus min: 1024 + code * 2^bit is exact,
// so is what HFMA2 makes of it, and only the last step rounds.
template <int kBits>
__device__ __forceinline__ uint32_t ScaledCodes(uint32_t word, int bit, __half2 scale,
                                                __half2 minimum) {
  constexpr uint32_t kMask = ((1u << kBits) - 1u) * 0x00010001u;
  const float down = 1.0f / static_cast<float>(1 << bit);
  const __half2 code = __hfma2(BitsAsHalf2((word & (kMask << bit)) | 0x64006400u),
                               __float2half2_rn(down), __float2half2_rn(-1024.0f * down));
  const __half2 value = __hfma2(code, scale, minimum);
  return *reinterpret_cast<const uint32_t*>(&value);
}

// `group_steps_log2`: log2(group dims / 16).
template <int kBits, int kDim, bool kIsK>
__device__ __forceinline__ void ExpandPage(const uint8_t* block, int block_bytes,
                                           int group_steps_log2, uint8_t* target, int plane_stride,
                                           int thread) {
  constexpr int kCodeBytes = kPageTokens * kDim * kBits / 8;
  constexpr int kSubSteps = kDim < 128 ? kDim / 16 : 8;
  constexpr int kSubBytes = kPageTokens * kSubSteps * 16 * kBits / 8;
  constexpr int kPerWord = 16 / kBits, kHalfWord = kPerWord / 2;
  const int lane = thread % 32, quad = lane & 3, row = lane >> 2, tile = thread / 32;
  const uint8_t* codes = block + (kIsK ? 0 : kCodeBytes);
  // K's planes of metadata, then as many of V's.
  const uint8_t* meta =
      block + (kIsK ? 2 * kCodeBytes : (block_bytes + 2 * kCodeBytes) / 2) + tile * 8;
  uint4 w{}, shifted{};
  __half2 scale0{}, min0{}, scale1{}, min1{};
#pragma unroll 1
  for (int sub = 0; sub < kDim / (kSubSteps * 16); ++sub) {
#pragma unroll
    for (int s = 0; s < kSubSteps; ++s) {
      if (s % kPerWord == 0) {
        w = *reinterpret_cast<const uint4*>(codes + sub * kSubBytes +
                                            (tile * kSubSteps + s) / kPerWord * 512 + lane * 16);
        if (kSubSteps < kPerWord && (tile & 1) != 0) {  // two tiles share a word at D 64
          w = {w.x >> 8, w.y >> 8, w.z >> 8, w.w >> 8};
        }
        shifted = {w.x >> 8, w.y >> 8, w.z >> 8, w.w >> 8};
      }
      const int step = sub * kSubSteps + s;
      if ((step & ((1 << group_steps_log2) - 1)) == 0) {  // a new group
        const uint8_t* plane = meta + (step >> group_steps_log2) * PageLayout::kMetaPlaneBytes;
        if constexpr (kIsK) {  // words 0, 1: token row; 2, 3: token row + 8
          const uint2 m = *reinterpret_cast<const uint2*>(plane + row * 32);
          scale0 = __low2half2(BitsAsHalf2(m.x));
          min0 = __high2half2(BitsAsHalf2(m.x));
          scale1 = __low2half2(BitsAsHalf2(m.y));
          min1 = __high2half2(BitsAsHalf2(m.y));
        } else {  // words 0, 1: tokens 2 quad + {0, 1}; 2, 3: the same + 8
          const uint2 even = *reinterpret_cast<const uint2*>(plane + quad * 64),
                      odd = *reinterpret_cast<const uint2*>(plane + quad * 64 + 32);
          scale0 = __lows2half2(BitsAsHalf2(even.x), BitsAsHalf2(odd.x));
          min0 = __highs2half2(BitsAsHalf2(even.x), BitsAsHalf2(odd.x));
          scale1 = __lows2half2(BitsAsHalf2(even.y), BitsAsHalf2(odd.y));
          min1 = __highs2half2(BitsAsHalf2(even.y), BitsAsHalf2(odd.y));
        }
      }
      const int position = s % kPerWord, bit = kBits * (position % kHalfWord);
      const uint4& from = position < kHalfWord ? w : shifted;
      const uint32_t v0 = ScaledCodes<kBits>(from.x, bit, scale0, min0);
      const uint32_t v1 = ScaledCodes<kBits>(from.y, bit, scale0, min0);
      const uint32_t v2 = ScaledCodes<kBits>(from.z, bit, scale1, min1);
      const uint32_t v3 = ScaledCodes<kBits>(from.w, bit, scale1, min1);
      if constexpr (kIsK) {  // chunks 2 step, 2 step + 1 of the rows
        uint8_t* at = target + step / 4 * plane_stride + (tile * 16 + row) * 128 + quad * 4;
        const int x = ((step % 4 * 2) ^ row) << 4;
        *reinterpret_cast<uint32_t*>(at + x) = v0;
        *reinterpret_cast<uint32_t*>(at + (x ^ 16)) = v1;
        *reinterpret_cast<uint32_t*>(at + 8 * 128 + x) = v2;
        *reinterpret_cast<uint32_t*>(at + 8 * 128 + (x ^ 16)) = v3;
      } else {  // tokens of this tile are chunks 2 tile, 2 tile + 1
        uint8_t* at = target + (step * 16 + row) * 128 + quad * 4;
        const int x = ((tile * 2) ^ row) << 4;
        *reinterpret_cast<uint32_t*>(at + x) = v0;
        *reinterpret_cast<uint32_t*>(at + 8 * 128 + x) = v1;
        *reinterpret_cast<uint32_t*>(at + (x ^ 16)) = v2;
        *reinterpret_cast<uint32_t*>(at + 8 * 128 + (x ^ 16)) = v3;
      }
    }
  }
}

}  // namespace oscar::cuda
