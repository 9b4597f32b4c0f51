// Many rows per expert by wgmma (sm_90a): out[place, m] = sum_k x[row, k] w[expert, m, k].
//
// Grid       a block an SM; items are (tile of up to 128 rows of one expert, 256 weight rows or 128
//            gates and their 128 ups; half of that for FP8 with scales of blocks), weight rows
//            inside: blocks that run together share rows of x and whole experts in the L2. How many
//            there are is read from the device.
// Pipeline   64 inputs a stage. The producer warpgroup gathers rows of x by 16-byte cp.async, into
//            128-byte swizzle; one of its threads has the tensor copy engine bring the weights as
//            they are stored. It runs ahead over items: stages are filled while one is written.
// Operands   weights are A, 64 rows a wgmma, rows of x are B: out comes transposed. Two consumer
//            warpgroups of 128 weight rows (64) x 128 sums each. BF16: A from shared memory. FP8
//            and MXFP4: A from registers, where a lane unpacks codes of consecutive inputs, once
//            for the 128 rows; x has its inputs in LaneOrder for that. Tiles of up to 64 rows take
//            half the MMAs.
// FP8        as in gemm_kernels.cuh, x already raised. Sums over a block's 128 inputs are apart
// from
//            those they are added to, scaled. MXFP4 as in grouped_skinny.cu; every eighth stage
//            brings the scales of eight.
// Order      k ascending in steps of 16, inside a step as the instruction has it: fixed.
// Bound      tensor cores, beside 48 KiB of shared memory filled from the L2 per 2 x 128 x 256 x 64
//            FLOP: 11.7 bytes per KFLOP, 5.3 TB/s at 450 TFLOP/s.
#include <algorithm>

#include "cuda/attention/wgmma.cuh"
#include "cuda/device/cuda_status.h"
#include "cuda/device/launch.h"
#include "cuda/device/tensor_copy.cuh"
#include "cuda/device/tensor_map.h"
#include "cuda/experts/grouped_gemm.cuh"
#include "cuda/experts/lane_order.h"

namespace oscar::cuda {
namespace {

constexpr int kTileRows = kWgmmaTileRows, kDepth = kSwizzledInputs, kSteps = kDepth / 16;
constexpr int kConsumers = 2, kThreads = (1 + kConsumers) * 128;
constexpr int kXRowBytes = kDepth * 2, kXBytes = kTileRows * kXRowBytes;
constexpr int kRunSteps = kMxfp4Run / kDepth;  // of MXFP4
// Stages whose rows may be on their way while the producer fills the next.
constexpr int kInFlight = 2;

template <WeightFormat kFormat>
struct Layout {
  static constexpr bool kBf16 = kFormat == WeightFormat::kBf16;
  static constexpr bool kMxfp4 = kFormat == WeightFormat::kMxfp4;
  static constexpr bool kScaledBlocks = kFormat == WeightFormat::kFp8Blocks;
  static constexpr int kBlocks = kScaledBlocks ? 1 : 2;  // of 64 weight rows, of a consumer
  static constexpr int kRows = kConsumers * kBlocks * 64;
  static constexpr int kRowBytes = kBf16 ? kDepth * 2 : kMxfp4 ? kDepth / 2 : kDepth;
  static constexpr int kStageBytes = kXBytes + kRows * kRowBytes;
  static constexpr int kStages = kBf16 ? 4 : kFormat == WeightFormat::kFp8Rows ? 6 : 8;
  // Registers of a thread: of the 504 that a launch of three warpgroups has. Two blocks of unpacked
  // codes want more.
  static constexpr bool kWide = !kBf16 && kBlocks == 2;
  static constexpr int kProducerRegisters = kWide ? 40 : 56;
  static constexpr int kConsumerRegisters = kWide ? 232 : 224;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 504);
  // Of a run of 512 inputs, twice, behind the stages.
  static constexpr int kScaleBytes = kMxfp4 ? kRows * 16 : 0;
  static constexpr int kBarriers = kStages * kStageBytes + 2 * kScaleBytes;
  static constexpr int kSharedBytes = kBarriers + (2 * kStages + 2) * 8 + 1024;  // to align by 1024
};

// The ring, and who has told whom: a stage is full when the weights and all rows of x have landed,
// empty when every consumer warp is done with it.
template <WeightFormat kFormat>
struct Ring {
  using L = Layout<kFormat>;
  uint32_t base;
  int stage = 0;
  uint32_t phase = 0;
  int run = 0;  // of MXFP4 scales

  __device__ __forceinline__ explicit Ring(uint32_t at) : base(at) {}
  __device__ __forceinline__ uint32_t full(int s) const { return base + L::kBarriers + s * 8; }
  __device__ __forceinline__ uint32_t empty(int s) const { return full(L::kStages + s); }
  __device__ __forceinline__ uint32_t scales_empty(int r) const { return full(2 * L::kStages + r); }
  __device__ __forceinline__ uint32_t scales(int r) const {
    return base + L::kStages * L::kStageBytes + r * L::kScaleBytes;
  }
  __device__ __forceinline__ void Init() const {
    for (int s = 0; s < L::kStages; ++s) {
      BarrierInit(full(s), 4 + 1);
      BarrierInit(empty(s), kConsumers * 4);
    }
    for (int r = 0; r < 2; ++r) BarrierInit(scales_empty(r), kConsumers * 4);
    BarrierInitFence();
  }
  __device__ __forceinline__ void Next() {
    if (++stage == L::kStages) stage = 0, phase ^= 1;
  }
};

template <WeightFormat kFormat, GemmOutput kOut>
__device__ __forceinline__ void Produce(const GroupedParams& p, const CUtensorMap* w_map,
                                        const CUtensorMap* scale_map, Ring<kFormat> ring,
                                        int across, int items) {
  using L = Layout<kFormat>;
  constexpr bool kPair = kOut == GemmOutput::kSiluMul;
  constexpr int kOutputs = kPair ? L::kRows / 2 : L::kRows;
  constexpr int kCopies = kTileRows / 16;  // 16 rows are eight chunks each for 128 threads
  const auto thread = static_cast<int>(threadIdx.x);
  const int chunk = thread % 8, row = thread / 8, steps = p.inputs / kDepth;
  const uint32_t to = static_cast<uint32_t>(row * kXRowBytes + ((chunk ^ (row % 8)) * 16));
  int pending = 0;  // stages whose rows nobody was told of
  const auto publish = [&](int back) {
    ProxyFence();  // wgmma reads them
    __syncwarp();
    const int s = ring.stage - back;
    if (thread % 32 == 0) BarrierArrive(ring.full(s < 0 ? s + L::kStages : s));
    --pending;
  };
  const auto publish_all = [&] {
    if (pending == 0) return;
    WaitForCopies<0>();
    while (pending > 0) publish(pending);
  };
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const ExpertTile tile = p.tiles[item / across];
    const int first = item % across * kOutputs;
    const int w_row = tile.expert * p.matrix_rows + first;
    uint32_t from[kCopies];  // in units of 16 bytes; rows beyond the tile's are its last one
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int place = tile.first + min(i * 16 + row, tile.rows - 1);
      const int source = p.x_rows == nullptr ? place : __ldg(p.x_rows + place);
      from[i] = static_cast<uint32_t>(source) * static_cast<uint32_t>(p.inputs / 8) +
                static_cast<uint32_t>(chunk);
    }
    for (int step = 0; step < steps; ++step, ring.Next()) {
      // Before waiting, what has been copied is handed over.
      if (!__all_sync(~0u, BarrierTest(ring.empty(ring.stage), ring.phase ^ 1))) {
        publish_all();
        BarrierWait(ring.empty(ring.stage), ring.phase ^ 1);
      }
      const uint32_t at = ring.base + ring.stage * L::kStageBytes;
      if (thread == 0) {
        const uint32_t bar = ring.full(ring.stage);
        const bool scales = L::kMxfp4 && step % kRunSteps == 0;
        if (scales) BarrierWait(ring.scales_empty(ring.run % 2), (ring.run / 2 % 2) ^ 1);
        ExpectBytes(bar, L::kRows * L::kRowBytes + (scales ? L::kScaleBytes : 0));
        const int run_at = step / kRunSteps * kMxfp4RunBytes;
        const int k = L::kMxfp4 ? run_at + 16 + step % kRunSteps * L::kRowBytes : step * kDepth;
#pragma unroll
        for (int half = 0; half < (kPair ? 2 : 1); ++half) {
          CopyBox<false>(at + kXBytes + half * (L::kRows / 2) * L::kRowBytes, w_map, k,
                         w_row + half * p.outputs, bar, 0);
          if (scales) {
            CopyBox<false>(ring.scales(ring.run % 2) + half * (L::kScaleBytes / 2), scale_map,
                           run_at, w_row + half * p.outputs, bar, 0);
          }
        }
        if (scales) ++ring.run;
      }
      const auto* x = reinterpret_cast<const uint4*>(p.x) + step * (kXRowBytes / 16);
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        if (i * 16 < tile.rows) CopyAsync(at + to + i * (16 * kXRowBytes), x + from[i]);
      }
      CommitCopies();
      if (++pending > kInFlight) {
        WaitForCopies<kInFlight>();
        publish(kInFlight);
      }
    }
  }
  publish_all();
}

// What a consumer warp's lanes have of an item. Block b's sums, of m16 slab rows h * 8 + group: a
// gate (BF16: of block 0; else of h 0) and its up (block 1; h 1), or rows one after another.
template <WeightFormat kFormat, GemmOutput kOut>
struct Consumer {
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
  // Of block b and h: its output, or in the first half of the item's weight rows and the second.
  __device__ __forceinline__ int Output(int b, int h) const {
    if constexpr (kPair) return OutputOf(L::kBf16 ? h : b);
    return (consumer * kBlocks + b) * 64 + warp * 16 + h * 8 + group;
  }
  static __device__ __forceinline__ int IsUp(int b, int h) {
    return kPair ? (L::kBf16 ? b : h) : 0;
  }
  // The item's weight row in shared memory.
  __device__ __forceinline__ int SharedRow(int b, int h) const {
    return IsUp(b, h) * (L::kRows / 2) + Output(b, h);
  }
  // Its row of an expert's matrix, the last one beyond the outputs.
  __device__ __forceinline__ int MatrixRow(const GroupedParams& p, int first, int b, int h) const {
    return IsUp(b, h) * p.outputs + min(first + Output(b, h), p.outputs - 1);
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

template <WeightFormat kFormat>
__device__ __forceinline__ void Release(const Ring<kFormat>& ring, int stage) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) BarrierArrive(ring.empty(stage));
}

// All steps of an item, for its first kN rows.
template <int kN, WeightFormat kFormat, GemmOutput kOut>
__device__ __forceinline__ void Multiply(const GroupedParams& p, Ring<kFormat>& ring,
                                         const Consumer<kFormat, kOut>& c, const ExpertTile& tile,
                                         int first,
                                         float (&sums)[Layout<kFormat>::kBlocks][kTileRows / 2]) {
  using L = Layout<kFormat>;
  using Mma = Wgmma<kN, true>;
  const uint64_t x_tile = SwizzledTile(ring.base, 16, 1024);
  const int steps = p.inputs / kDepth;
  int last = -1;  // the stage whose MMAs may still run
  if constexpr (L::kBf16) {
    uint64_t w_tile[L::kBlocks];
#pragma unroll
    for (int b = 0; b < L::kBlocks; ++b) {
      const int row = Consumer<kFormat, kOut>::kPair ? b * (L::kRows / 2) + c.consumer * 64
                                                     : c.consumer * 128 + b * 64;
      w_tile[b] = SwizzledTile(ring.base + kXBytes + row * L::kRowBytes, 16, 1024);
    }
    for (int step = 0; step < steps; ++step, ring.Next()) {
      BarrierWait(ring.full(ring.stage), ring.phase);
      const int at = ring.stage * L::kStageBytes;
      WgmmaFence();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int b = 0; b < L::kBlocks; ++b) {
          Mma::Shared(Front<kN>(sums[b]), Advance(w_tile[b], at + k * 32),
                      Advance(x_tile, at + k * 32));
        }
      }
      WgmmaCommit();
      WgmmaWait<1>();
      if (last >= 0) Release(ring, last);
      last = ring.stage;
    }
  } else {
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
  }
  WgmmaWait<0>();
  if (last >= 0) Release(ring, last);
}

template <WeightFormat kFormat, GemmOutput kOut, bool kBiased>
__device__ __forceinline__ void Write(const GroupedParams& p, const Consumer<kFormat, kOut>& c,
                                      const ExpertTile& tile, int first,
                                      const float (&sums)[Layout<kFormat>::kBlocks][64]) {
  using L = Layout<kFormat>;
  constexpr bool kFp8 = !L::kBf16 && !L::kMxfp4;
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
          const float gate = L::kBf16 ? value(0, t, x, e) : value(x, t, 0, e);
          const float up = L::kBf16 ? value(L::kBlocks - 1, t, x, e) : value(x, t, 1, e);
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

template <GemmOutput kOut, WeightFormat kFormat, bool kBiased>
__global__ void __launch_bounds__(kThreads, 1)
    GroupedWgmmaKernel(const __grid_constant__ CUtensorMap w_map,
                       const __grid_constant__ CUtensorMap scale_map, const GroupedParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using L = Layout<kFormat>;
  extern __shared__ uint8_t unaligned[];
  Ring<kFormat> ring((SharedAddress(unaligned) + 1023u) & ~1023u);
  // Known to be the same for a warp, so that what follows from it is computed once a warp.
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) ring.Init();
  __syncthreads();
  LetSuccessorStart();
  WaitForPredecessor();
  constexpr int kOutputs = kOut == GemmOutput::kSiluMul ? L::kRows / 2 : L::kRows;
  const int across = (WrittenOutputs<kOut>(p) + kOutputs - 1) / kOutputs;
  const int items = *p.num_tiles * across;
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(L::kProducerRegisters));
    Produce<kFormat, kOut>(p, &w_map, &scale_map, ring, across, items);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(L::kConsumerRegisters));
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const Consumer<kFormat, kOut> c{group - 1, static_cast<int>(threadIdx.x) / 32 % 4, lane / 4,
                                    lane % 4, p.lane_order};
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      const ExpertTile tile = p.tiles[item / across];
      const int first = item % across * kOutputs;
      float sums[L::kBlocks][kTileRows / 2];
#pragma unroll
      for (auto& block : sums) {
#pragma unroll
        for (float& sum : block) sum = 0.0f;
      }
      if (tile.rows <= kTileRows / 2) {
        Multiply<kTileRows / 2>(p, ring, c, tile, first, sums);
      } else {
        Multiply<kTileRows>(p, ring, c, tile, first, sums);
      }
      Write<kFormat, kOut, kBiased>(p, c, tile, first, sums);
    }
  }
#endif
}

struct Choice {
  const void* kernel;
  int shared_bytes, rows, row_bytes;
};

template <WeightFormat kFormat, bool kBiased = false>
Choice Make(GemmOutput output) {
  using L = Layout<kFormat>;
  const void* kernel = output == GemmOutput::kSiluMul
                           ? reinterpret_cast<const void*>(
                                 &GroupedWgmmaKernel<GemmOutput::kSiluMul, kFormat, kBiased>)
                           : reinterpret_cast<const void*>(
                                 &GroupedWgmmaKernel<GemmOutput::kFloat, kFormat, kBiased>);
  return {kernel, L::kSharedBytes, L::kRows, L::kRowBytes};
}

Choice Choose(WeightFormat format, bool biased, GemmOutput output) {
  switch (format) {
    case WeightFormat::kBf16:
      return biased ? Make<WeightFormat::kBf16, true>(output) : Make<WeightFormat::kBf16>(output);
    case WeightFormat::kFp8Rows:
      return biased ? Make<WeightFormat::kFp8Rows, true>(output)
                    : Make<WeightFormat::kFp8Rows>(output);
    case WeightFormat::kFp8Blocks:
      return Make<WeightFormat::kFp8Blocks>(output);
    case WeightFormat::kMxfp4:
      return Make<WeightFormat::kMxfp4, true>(output);
  }
  return {};
}

bool FindGroupedWgmma() {
  int device = 0, major = 0, minor = 0;
  cudaFuncAttributes attributes{};
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
         major == 9 && minor == 0 && HasTensorMaps() &&
         cudaFuncGetAttributes(&attributes,
                               Choose(WeightFormat::kBf16, false, GemmOutput::kFloat).kernel) ==
             cudaSuccess &&
         attributes.binaryVersion == 90;
}

}  // namespace

bool HasGroupedWgmma() {
  static const bool has = FindGroupedWgmma();
  return has;
}

Status LaunchGroupedWgmma(const GroupedGemm& args, Stream stream) {
  const bool pair = args.output == GemmOutput::kSiluMul;
  if (!HasGroupedWgmma() || (pair && args.out_stride % 8 != 0)) {
    return InvalidArgument("a GEMM of experts by wgmma takes whole 16 bytes of a row, on Hopper");
  }
  const DeviceMatrix& matrix = args.matrix;
  const WeightFormat format = FormatOf(matrix);
  const Choice choice = Choose(format, args.bias != nullptr, args.output);
  OSCAR_ASSIGN_OR_RETURN(const DeviceLimits limits, CurrentDeviceLimits());
  OSCAR_RETURN_IF_ERROR(
      AllowSharedMemory(choice.kernel, choice.shared_bytes, "preparing a GEMM of experts"));
  GroupedParams params = ParamsOf(args);
  const int box_rows = pair ? choice.rows / 2 : choice.rows;
  const int64_t row_bytes =
      format == WeightFormat::kMxfp4 ? Mxfp4RowBytes(matrix.inputs) : matrix.inputs;
  OSCAR_ASSIGN_OR_RETURN(
      CUtensorMap w_map,
      format == WeightFormat::kBf16
          ? SwizzledMap(matrix.weights, matrix.outputs, matrix.inputs, box_rows)
          : ByteMap(params.w, matrix.outputs, row_bytes, box_rows, choice.row_bytes));
  CUtensorMap scale_map = w_map;
  if (format == WeightFormat::kMxfp4) {
    OSCAR_ASSIGN_OR_RETURN(scale_map, ByteMap(params.w, matrix.outputs, row_bytes, box_rows, 16));
  }
  const int unit = pair ? choice.rows / 2 : choice.rows;
  const int written = pair ? args.out_stride : args.outputs();
  const int64_t items = int64_t{args.max_tiles} * ((written + unit - 1) / unit);
  void* kernel_args[] = {&w_map, &scale_map, &params};
  return LaunchOverlapping(choice.kernel,
                           {static_cast<int>(std::min<int64_t>(items, limits.multiprocessors)),
                            kThreads, choice.shared_bytes},
                           kernel_args, stream, "launching a GEMM of experts");
}

}  // namespace oscar::cuda
