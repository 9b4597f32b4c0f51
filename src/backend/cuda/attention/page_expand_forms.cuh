// Expands the keys of a page that are not rows to fp16 in shared memory, in the places where
// ExpandPage (page_expand.cuh) has keys. Device only; 128 threads, thread = (16-token tile, lane)
// of the page's fragment order.
//
// A key is (code * scale + min) * norm or level * factor, in fp32; one fp16 of it would be off by
// 2^-12. Part 0 is the key rounded to fp16, part 1 what that rounding took: two products.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/attention/cache_view.h"
#include "cuda/attention/page_expand.cuh"
#include "quant/turboquant.h"

namespace oscar::cuda {

// `block`: as FormBlocks has it; `page`: its index in history. `target`: a shared-memory address, a
// multiple of 1024.
template <int kDim>
__device__ __forceinline__ void ExpandFormKeys(const FormBlocks& form, const uint8_t* block,
                                               int page, int part, uint32_t target, int thread) {
  constexpr int kSubDims = kDim < 128 ? kDim : 128, kSubSteps = kSubDims / 16;
  const BlockLayout& layout = form.layout;
  const int lane = thread % 32, quad = lane & 3, row = lane >> 2, tile = thread / 32;
  const int bits = layout.k_bits(), low_bits = bits == 3 ? 2 : bits;
  const int per_word_log2 = low_bits == 2 ? 3 : 2;
  const int sub_bytes = kPageTokens * kSubDims * low_bits / 8;
  const bool is_codebook = layout.k_form() == SideForm::kCodebook;
  const bool is_mixed = layout.k_form() == SideForm::kMixed;
  // Of tokens 16 tile + row and that + 8: what their keys are multiplied by.
  float factor[2] = {1.0f, 1.0f};
  if (is_codebook) {
    const auto* norms = reinterpret_cast<const __half*>(block + layout.KRowNorm(tile * 16 + row));
    factor[0] = CodebookFactor(bits, kDim, __half2float(norms[0]));
    factor[1] = CodebookFactor(bits, kDim, __half2float(norms[8]));
  } else if (const uint8_t* norms = form.Norms(block)) {
    factor[0] = *reinterpret_cast<const float*>(norms + (tile * 16 + row) * 4);
    factor[1] = *reinterpret_cast<const float*>(norms + (tile * 16 + row + 8) * 4);
  }
  const int group = layout.group_tokens() == 32 ? tile / 2 : 0;
#pragma unroll 1
  for (int step = 0; step < kDim / 16; ++step) {
    const int sub = step / kSubSteps, at = tile * kSubSteps + step % kSubSteps;
    const uint8_t* codes = block + sub * sub_bytes +
                           (at >> per_word_log2) * BlockLayout::kFragmentPlaneBytes + lane * 16;
    const uint4 w = *reinterpret_cast<const uint4*>(codes);
    const int shift = (at & ((1 << per_word_log2) - 1)) * low_bits;
    uint4 h{};
    if (bits == 3) {
      h = *reinterpret_cast<const uint4*>(block + layout.k_high_offset() + sub * (sub_bytes / 2) +
                                          at / 16 * BlockLayout::kFragmentPlaneBytes + lane * 16);
    }
    const int half = step < kDim / 32 ? 0 : 1;
#pragma unroll 1  // beside the registers of queries and outputs there are few
    for (int column = 0; column < 2; ++column) {
      const uint32_t words[2] = {column == 0 ? w.x : w.y, column == 0 ? w.z : w.w};
      const uint32_t highs[2] = {column == 0 ? h.x : h.y, column == 0 ? h.z : h.w};
      // Dims step * 16 + column * 8 + 2 quad + {0, 1}, of the half: `first`.
      const int first = step % (kDim / 32) * 16 + column * 8 + quad * 2;
      float2 meta[2] = {};
      uchar2 index = {255, 255};
      if (!is_codebook) {
        const uint2 pairs = *reinterpret_cast<const uint2*>(form.ChannelMeta(block, page, half) +
                                                            (group * kDim + first) * 4);
        meta[0] = __half22float2(BitsAsHalf2(pairs.x));
        meta[1] = __half22float2(BitsAsHalf2(pairs.y));
      }
      if (is_mixed) {
        index = *reinterpret_cast<const uchar2*>(form.ChannelIndex(block, page, half) + first);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int token = tile * 16 + row + r * 8;
        float key[2];
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const uint32_t word = words[r], high = highs[r];
          uint32_t code = word >> (shift + 16 * odd) & ((1u << low_bits) - 1u);
          if (bits == 3) code |= (high >> (at % 16 + 16 * odd) & 1u) << 2;
          const int plane = odd == 0 ? index.x : index.y;
          if (is_mixed && plane < layout.boosted_dims()) {
            code |= (uint32_t{block[layout.KBoost(plane) + static_cast<uint32_t>(token / 4)]} >>
                         (token % 4 * 2) &
                     3u)
                    << 2;
          }
          const float x = is_codebook ? static_cast<float>(ByteLevel(bits, static_cast<int>(code)))
                                      : fmaf(static_cast<float>(code), meta[odd].x, meta[odd].y);
          key[odd] = x * factor[r];
          // Beyond fp16's range the second part takes what the first cannot.
          const float rounded =
              __half2float(__float2half_rn(fminf(fmaxf(key[odd], -kFp16Max), kFp16Max)));
          key[odd] = part == 0 ? rounded : key[odd] - rounded;
        }
        const __half2 pair = __floats2half2_rn(key[0], key[1]);
        const uint32_t to = target + static_cast<uint32_t>(
                                         step / 4 * BlockLayout::kBf16PlaneBytes +
                                         token * BlockLayout::kBf16RowBytes +
                                         (((step % 4 * 2 + column) ^ (token & 7)) << 4) + quad * 4);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to),
                     "r"(*reinterpret_cast<const uint32_t*>(&pair))
                     : "memory");
      }
    }
  }
}

}  // namespace oscar::cuda
