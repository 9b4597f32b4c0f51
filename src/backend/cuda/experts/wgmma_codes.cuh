// FP8 and MXFP4 weights are A of wgmma, unpacked in registers; rows of x are B: a thread's sums are
// of few outputs and many rows. Device only.
#pragma once

#include "cuda/experts/lane_order.h"
#include "cuda/experts/wgmma_ring.cuh"

namespace oscar::cuda {

// What a consumer warp's lanes have of an item. Block b's sums are of m16 slab rows h * 8 + group:
// a gate (h 0) and its up (h 1), or weight rows one after another.
template <WeightFormat kFormat, GemmOutput kOut>
struct CodeLane {
  using L = Layout<kFormat>;
  static constexpr bool kPair = kOut == GemmOutput::kSiluMul;
  static constexpr int kBlocks = L::kBlocks;
  int consumer, warp, group, quad;
  bool lane_order;  // of what is written

  // kPair: a warp has kBlocks eights of outputs. Where this lane's of eight `x` goes among an
  // item's, and which one that is.
  __device__ __forceinline__ int Place(int x) const {
    return (consumer * 4 + warp) * (kBlocks * 8) + x * 8 + group;
  }
  __device__ __forceinline__ int OutputOf(int x) const {
    const int place = Place(x);
    return lane_order ? InputAtPlace(place) : place;
  }
  // Of block b and h.
  __device__ __forceinline__ int Output(int b, int h) const {
    if constexpr (kPair) return OutputOf(b);
    return (consumer * kBlocks + b) * 64 + warp * 16 + h * 8 + group;
  }
  // The item's weight row in shared memory.
  __device__ __forceinline__ int SharedRow(int b, int h) const {
    return (kPair ? h * (L::kRows / 2) : 0) + Output(b, h);
  }
  // Its row of an expert's matrix, the last one beyond the outputs.
  __device__ __forceinline__ int MatrixRow(const GroupedParams& p, int first, int b, int h) const {
    return (kPair ? h * p.outputs : 0) + min(first + Output(b, h), p.outputs - 1);
  }
};

__device__ __forceinline__ uint4 LoadShared16(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at));
  return v;
}
__device__ __forceinline__ uint2 LoadShared8(uint32_t at) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
  return v;
}
__device__ __forceinline__ uint32_t LoadShared1(uint32_t at) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}

// A of a stage's steps for the m16 slab whose rows lie at `lo` and `hi`, this lane's pieces of
// them.
template <WeightFormat kFormat>
__device__ __forceinline__ void Unpack(uint32_t lo, uint32_t hi, uint32_t lo_scale,
                                       uint32_t hi_scale, uint32_t (&a)[kSteps][4]) {
  if constexpr (kFormat == WeightFormat::kMxfp4) {
    const uint2 top = LoadShared8(lo), bottom = LoadShared8(hi);
    const Mxfp4Scale top_scale(LoadShared1(lo_scale)), bottom_scale(LoadShared1(hi_scale));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t t[4], b[4];
      UnpackMxfp4(i == 0 ? top.x : top.y, top_scale, t);
      UnpackMxfp4(i == 0 ? bottom.x : bottom.y, bottom_scale, b);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        a[2 * i + j][0] = t[2 * j];
        a[2 * i + j][1] = b[2 * j];
        a[2 * i + j][2] = t[2 * j + 1];
        a[2 * i + j][3] = b[2 * j + 1];
      }
    }
  } else {
    const uint4 top = LoadShared16(lo), bottom = LoadShared16(hi);
    const uint32_t t[4] = {top.x, top.y, top.z, top.w};
    const uint32_t b[4] = {bottom.x, bottom.y, bottom.z, bottom.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i][0] = FirstPair(t[i]);
      a[i][1] = FirstPair(b[i]);
      a[i][2] = SecondPair(t[i]);
      a[i][3] = SecondPair(b[i]);
    }
  }
}

// All of A is there before the first MMA, not unpacked between two of them.
__device__ __forceinline__ void Pin(uint32_t (&a)[kSteps][4]) {
#pragma unroll
  for (auto& step : a) {
    asm volatile("" : "+r"(step[0]), "+r"(step[1]), "+r"(step[2]), "+r"(step[3]));
  }
}

// The sums of kN rows of x, beside each other in the front of a block's registers.
template <int kN>
using Sums = float[kN / 2];
template <int kN>
__device__ __forceinline__ Sums<kN>& Front(float (&sums)[kTileRows / 2]) {
  return reinterpret_cast<Sums<kN>&>(sums);
}

// All steps of an item, for its first kN rows.
template <int kN, WeightFormat kFormat, GemmOutput kOut>
__device__ __forceinline__ void MultiplyCodes(
    const GroupedParams& p, Ring<kFormat>& ring, const CodeLane<kFormat, kOut>& c,
    const ExpertTile& tile, int first, float (&sums)[Layout<kFormat>::kBlocks][kTileRows / 2]) {
  using L = Layout<kFormat>;
  using Mma = Wgmma<kN, true>;
  const uint64_t x_tile = SwizzledTile(ring.base, 16, 1024);
  const int steps = p.inputs / kDepth;
  int last = -1;  // the stage whose MMAs may still run
  // Of this lane, in a stage and in a run's scales.
  constexpr int kPiece = L::kRowBytes / 4;
  uint32_t codes_at[L::kBlocks][2], scale_at[L::kBlocks][2];
#pragma unroll
  for (int b = 0; b < L::kBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = c.SharedRow(b, h);
      codes_at[b][h] = ring.base + kXBytes + row * L::kRowBytes + c.quad * kPiece;
      scale_at[b][h] = row * 16 + c.quad / 2;
    }
  }
  const auto unpack = [&](int b, int step, uint32_t(&a)[kSteps][4]) {
    const uint32_t at = ring.stage * L::kStageBytes;
    const uint32_t scales = ring.scales(ring.run % 2) + step % kRunSteps * 2;
    Unpack<kFormat>(codes_at[b][0] + at, codes_at[b][1] + at, scales + scale_at[b][0],
                    scales + scale_at[b][1], a);
  };
  const auto multiply = [&](uint32_t(&a)[kSteps][4], Sums<kN>& to) {
    Pin(a);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      Mma::template Registers<0>(to, a[k], Advance(x_tile, ring.stage * L::kStageBytes + k * 32));
    }
    WgmmaCommit();
  };
  if constexpr (!L::kScaledBlocks) {
    // While one block's MMAs run, the other's codes are unpacked.
    uint32_t a[L::kBlocks][kSteps][4];
    for (int step = 0; step < steps; ++step, ring.Next()) {
      BarrierWait(ring.full(ring.stage), ring.phase);
#pragma unroll
      for (int b = 0; b < L::kBlocks; ++b) {
        WgmmaWait<1>();  // nobody reads a[b]
        unpack(b, step, a[b]);
        multiply(a[b], Front<kN>(sums[b]));
        if (b > 0 && last >= 0) Release(ring, last);
      }
      if (L::kMxfp4 && (step % kRunSteps == kRunSteps - 1 || step == steps - 1)) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) BarrierArrive(ring.scales_empty(ring.run % 2));
        ++ring.run;
      }
      last = ring.stage;
    }
  } else {
    // While a stage's MMAs run, the next one's codes are unpacked; a block of 128 inputs is two.
    uint32_t a[2][kSteps][4];
    float parts[kTileRows / 2];
    float block_scales[2] = {}, next_scales[2];
    const float* scales_of[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = tile.expert * p.matrix_rows + c.MatrixRow(p, first, 0, h);
      scales_of[h] = p.scales + int64_t{row / p.scale_rows} * p.scale_columns;
    }
#pragma unroll
    for (float& part : Front<kN>(parts)) part = 0.0f;
    const auto add_block = [&] {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) {
        sums[0][i] += block_scales[i / 2 % 2] * parts[i];
        parts[i] = 0.0f;
      }
    };
    for (int block = 0; block < steps / 2; ++block) {
#pragma unroll
      for (int h = 0; h < 2; ++h) next_scales[h] = __ldg(scales_of[h] + block);
#pragma unroll
      for (int half = 0; half < 2; ++half, ring.Next()) {
        BarrierWait(ring.full(ring.stage), ring.phase);
        unpack(0, 0, a[half]);
        if (half == 0) {
          WgmmaWait<0>();
          if (last >= 0) Release(ring, last);
          add_block();
        }
        multiply(a[half], Front<kN>(parts));
        if (half == 1) {
          WgmmaWait<1>();
          Release(ring, last);
        }
        last = ring.stage;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) block_scales[h] = next_scales[h];
    }
    WgmmaWait<0>();
    add_block();
  }
  WgmmaWait<0>();
  if (last >= 0) Release(ring, last);
}

template <WeightFormat kFormat, GemmOutput kOut, bool kBiased>
__device__ __forceinline__ void WriteCodes(const GroupedParams& p, const CodeLane<kFormat, kOut>& c,
                                           const ExpertTile& tile, int first,
                                           const float (&sums)[Layout<kFormat>::kBlocks][64]) {
  using L = Layout<kFormat>;
  constexpr bool kFp8 = !L::kMxfp4;
  // Of this lane's rows: factors of sums, and what is added.
  float factor[L::kBlocks][2], bias[L::kBlocks][2];
  const int base = tile.expert * p.matrix_rows;
#pragma unroll
  for (int b = 0; b < L::kBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = base + c.MatrixRow(p, first, b, h);
      factor[b][h] = kHalfOfFp8;
      if constexpr (kFormat == WeightFormat::kFp8Rows) factor[b][h] *= __ldg(p.scales + row);
      bias[b][h] = kBiased ? __ldg(p.bias + row) : 0.0f;
    }
  }
  const auto value = [&](int b, int j, int h, int e) {
    float sum = sums[b][j * 4 + h * 2 + e];
    if constexpr (kFp8) sum *= factor[b][h];
    if constexpr (kBiased) sum += bias[b][h];
    return sum;
  };
  if constexpr (kOut == GemmOutput::kSiluMul) {
    constexpr int kHalves = L::kBlocks, kTiles = 4 / kHalves;
    auto* const out = static_cast<uint16_t*>(p.out) + int64_t{tile.first} * p.out_stride;
    const uint32_t raise = PackBf16(p.factor, p.factor);
    const int to = first + c.Place(0) - c.group + c.quad % kHalves * 8;
    bool inside[kHalves];
#pragma unroll
    for (int x = 0; x < kHalves; ++x) inside[x] = first + c.OutputOf(x) < p.outputs;
#pragma unroll
    for (int j = 0; j < 16; j += kTiles) {
      if (j * 8 >= tile.rows) break;
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int x = i % kHalves, t = j + i / kHalves;
        float v[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float gate = value(x, t, 0, e), up = value(x, t, 1, e);
          v[e] = kBiased ? ClampedGateMul(p, gate, up) : SiluMul(gate, up);
          if (!inside[x]) v[e] = 0.0f;
        }
        // Two rows of an output to two outputs of a row.
        pairs[i] = Transpose8x8(MultiplyPair(PackBf16(v[0], v[1]), raise));
      }
      TransposeQuad(pairs, c.quad);
      const int n = (j + c.quad / kHalves) * 8 + c.group;
      if (n < tile.rows && to < p.out_stride) {
        *reinterpret_cast<uint4*>(out + int64_t{n} * p.out_stride + to) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
  } else {
    auto* const out = static_cast<float*>(p.out) + int64_t{tile.first} * p.out_stride;
    const bool odd = c.group % 2 != 0;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if (j * 8 >= tile.rows) break;
      const int n = j * 8 + c.quad * 2 + (odd ? 1 : 0);
      float* const row = out + int64_t{n} * p.out_stride;
#pragma unroll
      for (int b = 0; b < L::kBlocks; ++b) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          // Lanes of two outputs exchange two rows: each has two outputs of a row.
          const float low = value(b, j, h, 0), high = value(b, j, h, 1);
          const float got = __shfl_xor_sync(~0u, odd ? low : high, 4);
          const int m = first + c.Output(b, h) - (odd ? 1 : 0);
          if (n >= tile.rows) continue;
          if (m + 1 < p.outputs) {
            *reinterpret_cast<float2*>(row + m) =
                odd ? make_float2(got, high) : make_float2(low, got);
          } else if (m < p.outputs) {
            row[m] = odd ? got : low;
          }
        }
      }
    }
  }
}

}  // namespace oscar::cuda
