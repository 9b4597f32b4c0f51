// Expands one side of a quantised page to fp16 in shared memory, where tensor cores read it with
// 128-byte swizzle. Device only; 128 threads, thread = (16-token tile, lane) of the page's fragment
// order, so every 4-byte store of a warp falls into 32 different banks.
//
//   K  [D / 64 planes][64 tokens][128 B]   planes `plane_stride` bytes apart
//   V  [D dims][64 tokens = 128 B]         transposed, as its fragments lie
//
// V is code * scale + min, rounded once. K so rounded costs 2^-12 of a key, which is 5e-3 of the
// output where logits reach +-40; hence K is scale * (code - 1), which fp16 holds exactly for two
// bits, and more bits are two such products: 4 scale * (code / 4 - 1) and scale * (code % 4 - 1).
// What that leaves out of a logit is, for each group, m = min + scale (else + 5 scale) times the
// query's sum over the group: further k-steps of a product, with four slots a group,
//   K  m high, m high, m low, m low        Q  sum high, sum low, sum high, sum low
// where high is fp16 and low what that rounding took.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cache/block_layout.h"

namespace oscar::cuda {

__device__ __forceinline__ __half2 BitsAsHalf2(uint32_t x) {
  return *reinterpret_cast<const __half2*>(&x);
}

// The pair of codes at `bit` and 16 above it, minus `offset`: 1024 + code * 2^bit is exact, and so
// is what HFMA2 makes of it.
template <int kBits>
__device__ __forceinline__ __half2 CodePair(uint32_t word, int bit, float offset) {
  constexpr uint32_t kMask = ((1u << kBits) - 1u) * 0x00010001u;
  const float down = 1.0f / static_cast<float>(1 << bit);
  uint32_t biased;  // (word & mask) | 1024; left to itself the compiler takes two instructions
  asm("lop3.b32 %0, %1, %2, %3, 0xea;"
      : "=r"(biased)
      : "r"(word), "r"(kMask << bit), "r"(0x64006400u));
  return __hfma2(BitsAsHalf2(biased), __float2half2_rn(down),
                 __float2half2_rn(-1024.0f * down - offset));
}
// The same of three bits, the low two in `word`, the high one at bit `from` of `high`.
__device__ __forceinline__ __half2 CodePair3(uint32_t word, uint32_t high, int bit, int from) {
  const float down = 1.0f / static_cast<float>(1 << bit);
  const int up = bit + 2 - from;
  const uint32_t moved = up >= 0 ? high << up : high >> -up;
  const uint32_t biased =
      (word & (0x00030003u << bit)) | (moved & (0x00040004u << bit)) | 0x64006400u;
  return __hfma2(BitsAsHalf2(biased), __float2half2_rn(down), __float2half2_rn(-1024.0f * down));
}

// K: (one or two bits of a code - 1) * scale. V: code * scale + min.
template <int kBits, bool kIsK>
__device__ __forceinline__ uint32_t ScaledCodes(uint32_t word, uint32_t high, int bit, int step,
                                                __half2 scale, __half2 minimum) {
  __half2 value;
  if constexpr (kIsK) {
    value = __hmul2(CodePair < kBits == 1 ? 1 : 2 > (word, bit, 1.0f), scale);
  } else if constexpr (kBits == 3) {
    value = __hfma2(CodePair3(word, high, bit, step), scale, minimum);
  } else {
    value = __hfma2(CodePair<kBits>(word, bit, 0.0f), scale, minimum);
  }
  return *reinterpret_cast<const uint32_t*>(&value);
}

// Two words 1024 bytes apart, at (base ^ flip) + offset. One statement, so that the address lives
// no longer than the stores: the producer of prefill has few registers.
__device__ __forceinline__ void StorePair(uint32_t base, uint32_t flip, uint32_t offset,
                                          uint32_t low, uint32_t high) {
  asm volatile(
      "{ .reg .b32 a; xor.b32 a, %0, %1; add.u32 a, a, %2;\n"
      "st.shared.b32 [a], %3; st.shared.b32 [a + 1024], %4; }" ::"r"(base),
      "r"(flip), "r"(offset), "r"(low), "r"(high)
      : "memory");
}

// Words of 1-bit codes, shifted so that 16-dim step `first` of their sub-block is bit 0.
__device__ __forceinline__ uint4 OneBitWords(const uint8_t* codes, int first) {
  const uint4 w =
      *reinterpret_cast<const uint4*>(codes + first / 16 * BlockLayout::kFragmentPlaneBytes);
  const int shift = first % 16;
  return {w.x >> shift, w.y >> shift, w.z >> shift, w.w >> shift};
}

// `codes`, `meta`: of this side. `target`: a shared-memory address, a multiple of 1024.
// `group_steps_log2`: log2(group dims / 16). kOneGroup: the row is one group, which leaves no
// branch. kBits: 2, 3 or 4. K of three bits takes two calls, one with kBits = 1 and `codes` its
// high bits, then one with kBits = 2. `part`: of K's four bits, 0 for the high two of the codes, 1
// for the low ones.
template <int kBits, int kDim, bool kIsK, bool kOneGroup>
__device__ __forceinline__ void ExpandPage(const uint8_t* codes, const uint8_t* meta,
                                           int group_steps_log2, uint32_t target, int plane_stride,
                                           int thread, int part = 0) {
  static_assert(!(kIsK && kBits == 3) && (kIsK || kBits > 1));
  constexpr int kLowBits = kBits == 3 ? 2 : kBits;  // those that lie together
  constexpr int kSubDims = kDim < 128 ? kDim : 128, kSubSteps = kSubDims / 16;
  constexpr int kSubBytes = kPageTokens * kSubDims * kLowBits / 8;
  constexpr int kPerWord = 16 / kLowBits, kHalfWord = kPerWord / 2;
  const int lane = thread % 32, quad = lane & 3, row = lane >> 2, tile = thread / 32;
  codes += lane * 16;
  meta += tile * (2 * BlockLayout::kMetaPairBytes);
  // K: chunks 2 step, 2 step + 1 of the rows. V: the tokens of this tile are chunks 2 tile, + 1.
  const uint32_t at =
      target + static_cast<uint32_t>(quad * 4 + (kIsK ? tile * 16 + row : row) * 128 +
                                     ((kIsK ? row : (tile * 2) ^ row) << 4));
  const bool high = kIsK && (kBits == 1 || (kBits == 4 && part == 0));
  const int shift = high ? 2 : 0;
  uint4 w{}, h{};
  __half2 scale0{}, min0{}, scale1{}, min1{};
#pragma unroll 1
  for (int sub = 0; sub < kDim / (kSubSteps * 16); ++sub) {
    if constexpr (kBits == 1) {
      w = OneBitWords(codes + sub * kSubBytes, tile * kSubSteps);
    } else if constexpr (kBits == 3) {
      h = OneBitWords(codes + kDim / kSubDims * kSubBytes + sub * (kSubBytes / 2),
                      tile * kSubSteps);
    }
#pragma unroll
    for (int s = 0; s < kSubSteps; ++s) {
      if (kBits == 1) {
      } else if (s % kPerWord == 0) {
        w = *reinterpret_cast<const uint4*>(codes + sub * kSubBytes +
                                            (tile * kSubSteps + s) / kPerWord *
                                                BlockLayout::kFragmentPlaneBytes);
        if (kSubSteps < kPerWord && (tile & 1) != 0) {  // two tiles share a word at D 64
          w = {w.x >> 8, w.y >> 8, w.z >> 8, w.w >> 8};
        }
        if (kIsK && kBits == 4) w = {w.x >> shift, w.y >> shift, w.z >> shift, w.w >> shift};
      } else if (s % kHalfWord == 0) {
        w = {w.x >> 8, w.y >> 8, w.z >> 8, w.w >> 8};
      }
      const int step = sub * kSubSteps + s;
      if (kOneGroup ? step == 0 : (step & ((1 << group_steps_log2) - 1)) == 0) {  // a new group
        const uint8_t* plane = meta + (step >> group_steps_log2) * BlockLayout::kMetaPlaneBytes;
        if constexpr (kIsK) {  // words 0, 1: token row; 2, 3: token row + 8
          const uint2 m = *reinterpret_cast<const uint2*>(plane + row * BlockLayout::kMetaRowBytes);
          scale0 = __low2half2(BitsAsHalf2(m.x));
          scale1 = __low2half2(BitsAsHalf2(m.y));
          if (high) {
            const __half2 four = __float2half2_rn(4.0f);
            scale0 = __hmul2(scale0, four);
            scale1 = __hmul2(scale1, four);
          }
        } else {  // words 0, 1: tokens 2 quad + {0, 1}; 2, 3: the same + 8
          constexpr int kRow = BlockLayout::kMetaRowBytes;
          const uint2 even = *reinterpret_cast<const uint2*>(plane + quad * (2 * kRow)),
                      odd = *reinterpret_cast<const uint2*>(plane + quad * (2 * kRow) + kRow);
          scale0 = __lows2half2(BitsAsHalf2(even.x), BitsAsHalf2(odd.x));
          min0 = __highs2half2(BitsAsHalf2(even.x), BitsAsHalf2(odd.x));
          scale1 = __lows2half2(BitsAsHalf2(even.y), BitsAsHalf2(odd.y));
          min1 = __highs2half2(BitsAsHalf2(even.y), BitsAsHalf2(odd.y));
        }
      }
      const int bit = kLowBits * (s % kHalfWord);
      const uint32_t v0 = ScaledCodes<kBits, kIsK>(w.x, h.x, bit, s, scale0, min0);
      const uint32_t v1 = ScaledCodes<kBits, kIsK>(w.y, h.y, bit, s, scale0, min0);
      const uint32_t v2 = ScaledCodes<kBits, kIsK>(w.z, h.z, bit, s, scale1, min1);
      const uint32_t v3 = ScaledCodes<kBits, kIsK>(w.w, h.w, bit, s, scale1, min1);
      if constexpr (kIsK) {
        const auto flip = static_cast<uint32_t>(step % 4 * 32);
        const auto plane = static_cast<uint32_t>(step / 4 * plane_stride);
        StorePair(at, flip, plane, v0, v2);
        StorePair(at, flip ^ 16u, plane, v1, v3);
      } else {
        const auto dims = static_cast<uint32_t>(step * 16 * 128);
        StorePair(at, 0u, dims, v0, v1);
        StorePair(at, 16u, dims, v2, v3);
      }
    }
  }
}

// ---- the slots of the groups' minima ----

template <int kDim>
inline constexpr int kMinimumSteps =
    kDim > 128 ? 2 : 1;  // k-steps of 16 slots: 4 groups of 32 dims

// Byte offset of a row's four slots of a group: core matrices of 8 rows x 16 bytes, without
// swizzle, the two of a k-step 128 bytes apart, groups of 8 rows 256, k-steps `step_bytes`.
__device__ __forceinline__ int MinimumSlots(int row, int group, int step_bytes) {
  return group / 4 * step_bytes + row / 8 * 256 + group / 2 % 2 * 128 + row % 8 * 16 +
         group % 2 * 8;
}

struct HalfSum {
  uint32_t high, low;  // fp16 bits
};
// Beyond fp16's range the low part takes what the high one cannot.
__device__ __forceinline__ HalfSum SplitToHalf(float x) {
  const __half high = __float2half_rn(fminf(fmaxf(x, -65504.0f), 65504.0f));
  const __half low = __float2half_rn(x - __half2float(high));
  return {__half_as_ushort(high), __half_as_ushort(low)};
}

// What ExpandPage leaves out of a key, in scales.
__device__ constexpr float KeyOffset(BlockKind kind) {
  return kind == BlockKind::kInt2 ? 1.0f : 5.0f;
}
// Slots of one token's groups `group`, `group` + `step`, ... that are there. `meta`: of K.
// `offset`: KeyOffset(). `target`: of the page's first token.
template <int kDim>
__device__ __forceinline__ void ExpandMinima(const uint8_t* meta, float offset,
                                             int group_steps_log2, uint8_t* target, int step_bytes,
                                             int token, int group, int step) {
  meta += token % 8 * BlockLayout::kMetaRowBytes + token / 8 * BlockLayout::kMetaPairBytes;
#pragma unroll 1
  for (; group < (kDim / 16) >> group_steps_log2; group += step) {
    const float2 x = __half22float2(
        *reinterpret_cast<const __half2*>(meta + group * BlockLayout::kMetaPlaneBytes));
    const HalfSum m = SplitToHalf(fmaf(x.x, offset, x.y));
    *reinterpret_cast<uint2*>(target + MinimumSlots(token, group, step_bytes)) = {
        m.high * 0x00010001u, m.low * 0x00010001u};
  }
}

}  // namespace oscar::cuda
