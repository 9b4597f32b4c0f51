// BF16 weights are B of wgmma, rows of x are A, both in shared memory: a consumer has 64 rows and
// all of an item's weight rows. Device only.
#pragma once

#include "cuda/experts/wgmma_ring.cuh"

namespace oscar::cuda {

using Bf16Ring = Ring<WeightFormat::kBf16>;
using Bf16Sums = float[Layout<WeightFormat::kBf16>::kRows / 2];

// All steps of an item, for 64 rows from consumer * 64 on.
__device__ __forceinline__ void MultiplyBf16(const GroupedParams& p, Bf16Ring& ring, int consumer,
                                             const ExpertTile& tile, Bf16Sums& sums) {
  using L = Layout<WeightFormat::kBf16>;
  const uint64_t x_tile = SwizzledTile(ring.base + consumer * (kXBytes / kConsumers), 16, 1024);
  const uint64_t w_tile = SwizzledTile(ring.base + kXBytes, 16, 1024);
  const int steps = p.inputs / kDepth;
  if (consumer * 64 >= tile.rows) {
    // The tensor cores are the other consumer's.
    for (int step = 0; step < steps; ++step, ring.Next()) {
      BarrierWait(ring.full(ring.stage), ring.phase);
      Release(ring, ring.stage);
    }
    return;
  }
  int last = -1;  // the stage whose MMAs may still run
  for (int step = 0; step < steps; ++step, ring.Next()) {
    BarrierWait(ring.full(ring.stage), ring.phase);
    const int at = ring.stage * L::kStageBytes;
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      Wgmma<L::kRows, true>::Shared(sums, Advance(x_tile, at + k * 32),
                                    Advance(w_tile, at + k * 32));
    }
    WgmmaCommit();
    WgmmaWait<1>();
    if (last >= 0) Release(ring, last);
    last = ring.stage;
  }
  WgmmaWait<0>();
  if (last >= 0) Release(ring, last);
}

// Rows of this lane: `row` and `row` + 8 of the tile.
template <GemmOutput kOut, bool kBiased>
__device__ __forceinline__ void WriteBf16(const GroupedParams& p, const ExpertTile& tile, int first,
                                          int row, int quad, const Bf16Sums& sums) {
  const float* const bias = kBiased ? p.bias + int64_t{tile.expert} * p.matrix_rows : nullptr;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool inside = row + h * 8 < tile.rows;
    const int64_t at = int64_t{tile.first + row + h * 8} * p.out_stride;
    if constexpr (kOut == GemmOutput::kSiluMul) {
      constexpr int kUp = 64;
      const uint32_t raise = PackBf16(p.factor, p.factor);
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = (b * 4 + i) * 4 + h * 2, m = first + (b * 4 + i) * 8 + quad * 2;
          float v[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (m + e >= p.outputs) {
              v[e] = 0.0f;
            } else if constexpr (kBiased) {
              v[e] = ClampedGateMul(p, sums[j + e] + __ldg(bias + m + e),
                                    sums[kUp + j + e] + __ldg(bias + p.outputs + m + e));
            } else {
              v[e] = SiluMul(sums[j + e], sums[kUp + j + e]);
            }
          }
          pairs[i] = MultiplyPair(PackBf16(v[0], v[1]), raise);
        }
        TransposeQuad(pairs, quad);  // all lanes, also of rows that are not there
        const int m = first + (b * 4 + quad) * 8;
        if (inside && m < p.out_stride) {
          *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + at + m) =
              make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
      }
    } else {
      if (!inside) return;
      auto* const out = static_cast<float*>(p.out) + at;
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        const int m = first + j * 8 + quad * 2;
        if (m >= p.outputs) break;
        float a = sums[j * 4 + h * 2], b = sums[j * 4 + h * 2 + 1];
        if constexpr (kBiased) a += __ldg(bias + m);
        if (m + 1 < p.outputs) {
          if constexpr (kBiased) b += __ldg(bias + m + 1);
          *reinterpret_cast<float2*>(out + m) = make_float2(a, b);
        } else {
          out[m] = a;
        }
      }
    }
  }
}

}  // namespace oscar::cuda
