// Few rows per expert: out[place, m] = sum_k w[expert, m, k] x[row, k] on tensor cores, at the
// speed of reading the weights of the experts that are touched.
//
// Grid       two blocks an SM; items are (tile of up to 8 or 16 rows of one expert, 16 weight rows
//            or 8 gates and their 8 ups), weight rows inside, so that neighbours read neighbours.
//            How many there are is read from the device: blocks beyond them end at once.
// Pipeline   as in gemm/skinny_gemm.cu: a producer warp copies 2 KiB of each of an item's 16 weight
//            rows at a time into a ring (bulk copies on mbarriers, marked to leave the L2 first
//            where an expert has one tile), running ahead over items; eight consumer warps take an
//            eighth of a stage's k each. 192 KiB a SM are on their way.
// Operands   weights are A, rows of x are B, gathered by the lanes that multiply them (L2). FP8 as
//            in gemm_kernels.cuh, x already raised; scales of blocks multiply the sum over each 128
//            k. MXFP4: a lane's 16 bytes are a block of 32 k, so that it has one scale, which came
//            with the codes (base/mxfp4.h); weights become BF16 exactly, by a shift, two masks and
//            a product a pair, before the MMA. Chunks of 128 k are dealt to warps one by one, since
//            all k of a row are often one stage.
// Combine    of up to 8 rows: the last block to bring one of a row's outputs adds them all.
// Order      fixed by the item: k of a warp ascending, warps in order. Which tile a row is in, how
//            many rows it has and whether it is of 8 or 16 does not show.
// Bytes      2 (FP8: 1, MXFP4: 17/32) a weight of each touched expert, once per tile; x and outputs
//            are small.
//            Qwen3-30B-A3B, one row: 8 experts x 9.4 MB a layer; gate and up are 768 items for 264
//            blocks, 3 rounds of which the last is 91 % full.
#include <algorithm>

#include "cuda/device/cuda_status.h"
#include "cuda/device/launch.h"
#include "cuda/experts/grouped_gemm.cuh"

namespace oscar::cuda {
namespace {

constexpr int kWarps = 8;  // consumers
constexpr int kThreads = (kWarps + 1) * 32;
constexpr int kRows = 16, kRowBytes = 2048, kPad = 64, kPitch = kRowBytes + kPad;
constexpr int kStageBytes = kRows * kPitch;
// MXFP4: whole runs of 512 k, in a pitch that puts two rows' 64 bytes side by side, too.
constexpr int kRuns = kRowBytes / kMxfp4RunBytes, kMxfp4Pitch = 1984;
static_assert(kRuns * kMxfp4RunBytes <= kMxfp4Pitch && kMxfp4Pitch <= kPitch);
constexpr int kMaxStages = 3, kMinStages = 2, kBlocks = 2;

// A block of rows `lo` and `hi`: two steps a word.
template <int kNTiles>
__device__ __forceinline__ void MultiplyMxfp4(float (&sums)[kNTiles][4], const uint4& lo,
                                              const uint4& hi, const Mxfp4Scale& lo_scale,
                                              const Mxfp4Scale& hi_scale,
                                              const uint4 (&x)[kNTiles][4]) {
  const uint32_t lo_words[4] = {lo.x, lo.y, lo.z, lo.w}, hi_words[4] = {hi.x, hi.y, hi.z, hi.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t a[4], b[4];
    UnpackMxfp4(lo_words[i], lo_scale, a);
    UnpackMxfp4(hi_words[i], hi_scale, b);
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      MmaBf16(sums[n], a[0], b[0], a[1], b[1], x[n][i].x, x[n][i].y);
      MmaBf16(sums[n], a[2], b[2], a[3], b[3], x[n][i].z, x[n][i].w);
    }
  }
}

// By all consumers, after outputs [first, first + kRows) of a tile's rows have been written and a
// barrier. Whoever brings the last of a row's choices adds them to the stream, best first.
__device__ __forceinline__ void CombineTile(const GroupedParams& p, const ExpertTile& tile,
                                            int first, int column, int columns) {
  __shared__ int row_of[kCombineRows];  // -1: others are to come
  const auto thread = static_cast<int>(threadIdx.x);
  const CombineInto& into = p.combine;
  if (thread < tile.rows) {
    const int row = into.rows[tile.first + thread];
    int32_t* const arrived = into.arrived + row * columns + column;
    __threadfence();
    const bool is_last = atomicAdd(arrived, 1) == into.choices - 1;
    if (is_last) *arrived = 0;
    __threadfence();
    row_of[thread] = is_last ? row : -1;
  }
  NamedSync(1, kWarps * 32);
  const int n = thread / kRows, m = first + thread % kRows;
  if (n < tile.rows && row_of[n] >= 0 && m < p.outputs) {
    const int row = row_of[n];
    float* const to = into.stream + int64_t{row} * p.outputs + m;
    float sum = *to;
#pragma unroll 8
    for (int i = row * into.choices; i < (row + 1) * into.choices; ++i) {
      const float* y = static_cast<const float*>(p.out) + int64_t{into.places[i]} * p.out_stride;
      sum = fmaf(into.weights[i], __ldcg(y + m), sum);
    }
    *to = sum;
  }
  NamedSync(1, kWarps * 32);  // before the rows are overwritten
}

template <int kNTiles>
constexpr int kPartialBytes = kWarps* kRows*(kNTiles * 8 + 1) * 4;

template <int kNTiles, GemmOutput kOut, WeightFormat kFormat, bool kBiased>
__global__ void __launch_bounds__(kThreads, kBlocks) GroupedSkinnyKernel(const GroupedParams p) {
  constexpr bool kPair = kOut == GemmOutput::kSiluMul;
  constexpr bool kMxfp4 = kFormat == WeightFormat::kMxfp4;
  constexpr bool kFp8 = kFormat != WeightFormat::kBf16 && !kMxfp4;
  constexpr int kWidth = kFp8 ? 1 : 2;  // bytes of a weight
  // k of a chunk, which is 64 bytes of a row, and loads of 16 bytes of x, a lane's share of it
  constexpr int kChunkK = kMxfp4 ? 128 : 64 / kWidth, kLoads = kChunkK / 32;
  constexpr int kTileRows = kPair ? kRows / 2 : kRows;  // of the output
  // k of a stage; a warp's share of its chunks
  constexpr int kSpan = kMxfp4 ? kRuns * kMxfp4Run : kRowBytes / kWidth;
  constexpr int kStageChunks = kSpan / kChunkK;
  constexpr int kChunks = (kStageChunks + kWarps - 1) / kWarps;
  constexpr int kRowPitch = kMxfp4 ? kMxfp4Pitch : kPitch;
  // Chunks whose operands are held at once: as many as registers take.
  constexpr int kHeld = kMxfp4 ? 2 / kNTiles : kFp8 && kNTiles > 1 ? kChunks / 2 : kChunks;
  constexpr int kColumns = kNTiles * 8 + 1;  // of partial sums: rows in different banks
  static_assert(kChunks % 2 == 0);           // whole blocks of 128 k
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ uint64_t barriers[2 * kMaxStages];
  auto* const partial =
      reinterpret_cast<float(*)[kRows][kColumns]>(ring + p.stages * kStageBytes);  // [kWarps]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const auto full = [&](int slot) { return SharedAddress(&barriers[slot]); };
  const auto empty = [&](int slot) { return SharedAddress(&barriers[kMaxStages + slot]); };
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < p.stages; ++slot) {
      BarrierInit(full(slot), FullArrivals());
      BarrierInit(empty(slot), kWarps);
    }
    BarrierInitFence();
  }
  __syncthreads();
  LetSuccessorStart();
  // Which experts are read is the predecessor's result.
  WaitForPredecessor();
  const int written = WrittenOutputs<kOut>(p);
  const int across = (written + kTileRows - 1) / kTileRows;  // items of a tile
  const int items = *p.num_tiles * across;
  const int stages = (p.inputs + kSpan - 1) / kSpan;
  const int chunks = kMxfp4 ? (p.inputs + kChunkK - 1) / kChunkK : p.inputs / kChunkK;
  // Row `r` of an item among all experts' rows; what lies beyond the outputs is the last one.
  const auto matrix_row = [&](const ExpertTile& tile, int first, int r) {
    const int half = kPair ? r / kTileRows : 0, row = first + (kPair ? r % kTileRows : r);
    return int64_t{tile.expert} * p.matrix_rows + half * p.outputs + min(row, p.outputs - 1);
  };
  int slot = 0;
  uint32_t parity = 0;
  const auto advance = [&] {
    if (++slot == p.stages) slot = 0, parity ^= 1;
  };

  if (warp == kWarps) {
    const int64_t pitch = kMxfp4 ? Mxfp4RowBytes(p.inputs) : int64_t{p.inputs} * kWidth;
    bool first_round = true;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      const ExpertTile tile = p.tiles[item / across];
      const int first = item % across * kTileRows;
      for (int s = 0; s < stages; ++s) {
        if (!first_round) BarrierWait(empty(slot), parity ^ 1);
        const int k = s * kSpan;
        const int64_t from = kMxfp4 ? int64_t{s} * (kRuns * kMxfp4RunBytes) : int64_t{k} * kWidth;
        const int bytes = kMxfp4
                              ? static_cast<int>(min(int64_t{kRuns * kMxfp4RunBytes}, pitch - from))
                              : min(kRowBytes, (p.inputs - k) * kWidth);
        const StageFill fill(full(slot), static_cast<uint32_t>(bytes * kRows), lane);
        const uint32_t to = SharedAddress(ring) + static_cast<uint32_t>(slot * kStageBytes);
#pragma unroll 4
        for (int r = 0; r < kRows; ++r) {
          fill.Copy(to + static_cast<uint32_t>(r * kRowPitch),
                    p.w + matrix_row(tile, first, r) * pitch + from, static_cast<uint32_t>(bytes));
        }
        fill.End();
        advance();
        if (slot == 0) first_round = false;
      }
    }
    return;
  }

  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const ExpertTile tile = p.tiles[item / across];
    const int first = item % across * kTileRows;
    const uint16_t* x[kNTiles];  // this lane's rows; null beyond the tile's
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      const int place = tile.first + n * 8 + group;
      x[n] = n * 8 + group >= tile.rows
                 ? nullptr
                 : p.x + int64_t{p.x_rows == nullptr ? place : p.x_rows[place]} * p.inputs;
    }
    float sums[kNTiles][4] = {}, block_sums[kNTiles][4] = {};
    for (int s = 0; s < stages; ++s) {
      // A warp's chunks follow each other; of MXFP4, each is kWarps behind the one before.
      constexpr int kEvery = kMxfp4 ? kWarps : 1;
      const int first_chunk = s * kStageChunks + (kMxfp4 ? warp : warp * kChunks);
      const auto is_beyond = [&](int c) {
        return first_chunk + c * kEvery >= chunks ||
               (kStageChunks % kWarps != 0 && warp + c * kWarps >= kStageChunks);
      };
      uint4 b[kHeld][kNTiles][kLoads];
      const auto load = [&](int c) {
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
          for (int j = 0; j < kLoads; ++j) {
            const int k = (first_chunk + c * kEvery) * kChunkK + quad * (kChunkK / 4) + j * 8;
            const bool none = x[n] == nullptr || is_beyond(c) || (kMxfp4 && k >= p.inputs);
            b[c % kHeld][n][j] =
                none ? make_uint4(0, 0, 0, 0) : *reinterpret_cast<const uint4*>(x[n] + k);
          }
        }
      };
#pragma unroll
      for (int c = 0; c < kHeld; ++c) load(c);
      // Of this lane's rows in the blocks of its chunks.
      [[maybe_unused]] float scales[kChunks / 2][2];
      if constexpr (kFormat == WeightFormat::kFp8Blocks) {
#pragma unroll
        for (int c = 0; c < kChunks / 2; ++c) {
          const int block = min(first_chunk / 2 + c, p.scale_columns - 1);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int64_t row = matrix_row(tile, first, h * 8 + group) / p.scale_rows;
            scales[c][h] = __ldg(p.scales + row * p.scale_columns + block);
          }
        }
      }
      BarrierWait(full(slot), parity);
      const unsigned char* at = ring + slot * kStageBytes + group * kRowPitch +
                                (kMxfp4 ? 0 : warp * kChunks * 64 + quad * 16);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (is_beyond(c)) break;  // nothing was copied there
        // Of MXFP4, this lane's block in the stage. What lies behind the inputs meets zeros.
        const int block = (warp + c * kWarps) * 4 + quad;
        const int codes = kMxfp4 ? static_cast<int>(Mxfp4CodesAt(block)) : c * 64;
        const uint4 lo = *reinterpret_cast<const uint4*>(at + codes);
        const uint4 hi = *reinterpret_cast<const uint4*>(at + 8 * kRowPitch + codes);
        if constexpr (kMxfp4) {
          const auto scale = static_cast<int>(Mxfp4ScaleAt(block));
          MultiplyMxfp4<kNTiles>(sums, lo, hi, Mxfp4Scale(at[scale]),
                                 Mxfp4Scale(at[8 * kRowPitch + scale]), b[c % kHeld]);
        } else if constexpr (kFormat == WeightFormat::kBf16) {
#pragma unroll
          for (int n = 0; n < kNTiles; ++n) {
            const uint4& v = b[c % kHeld][n][0];
            MmaBf16(sums[n], lo.x, hi.x, lo.y, hi.y, v.x, v.y);
            MmaBf16(sums[n], lo.z, hi.z, lo.w, hi.w, v.z, v.w);
          }
        } else if constexpr (kFormat == WeightFormat::kFp8Rows) {
          MultiplyFp8<kNTiles>(sums, lo, hi, b[c % kHeld]);
        } else {
          MultiplyFp8<kNTiles>(block_sums, lo, hi, b[c % kHeld]);
          if (c % 2 == 1) {
#pragma unroll
            for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                sums[n][i] += scales[c / 2][i / 2] * block_sums[n][i];
                block_sums[n][i] = 0.0f;
              }
            }
          }
        }
        if (c + kHeld < kChunks) load(c + kHeld);
      }
      __syncwarp();
      if (lane == 0) BarrierArrive(empty(slot));
      advance();
    }
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      float* const top = &partial[warp][group][n * 8 + quad * 2];
      float* const bottom = &partial[warp][group + 8][n * 8 + quad * 2];
      top[0] = sums[n][0];
      top[1] = sums[n][1];
      bottom[0] = sums[n][2];
      bottom[1] = sums[n][3];
    }
    NamedSync(1, kWarps * 32);
    const auto total = [&](int r, int n) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) sum += partial[i][r][n];
      if constexpr (kFp8) sum *= kHalfOfFp8;
      if constexpr (kFormat == WeightFormat::kFp8Rows) sum *= p.scales[matrix_row(tile, first, r)];
      return sum;
    };
    for (int i = threadIdx.x; i < kTileRows * kNTiles * 8; i += kWarps * 32) {
      const int r = i % kTileRows, n = i / kTileRows, m = first + r;
      if (n >= tile.rows || m >= written) continue;
      const int64_t to = int64_t{tile.first + n} * p.out_stride + m;
      if constexpr (kPair) {
        float value = 0.0f;
        if constexpr (kBiased) {
          if (m < p.outputs) {
            const float* bias = p.bias + int64_t{tile.expert} * p.matrix_rows + m;
            value = ClampedGateMul(p, total(r, n) + __ldg(bias),
                                   total(kTileRows + r, n) + __ldg(bias + p.outputs));
          }
        } else {
          value = m < p.outputs ? SiluMul(total(r, n), total(kTileRows + r, n)) : 0.0f;
        }
        const __nv_bfloat16 rounded = __float2bfloat16_rn(value);
        static_cast<__nv_bfloat16*>(p.out)[to] =
            __float2bfloat16_rn(__bfloat162float(rounded) * p.factor);
      } else if constexpr (kBiased) {
        const float bias = __ldg(p.bias + int64_t{tile.expert} * p.matrix_rows + m);
        static_cast<float*>(p.out)[to] = total(r, n) + bias;
      } else {
        static_cast<float*>(p.out)[to] = total(r, n);
      }
    }
    NamedSync(1, kWarps * 32);  // before the sums are overwritten
    if constexpr (!kPair && kNTiles == 1) {
      if (p.combine.stream != nullptr) CombineTile(p, tile, first, item % across, across);
    }
  }
}

template <int kNTiles, WeightFormat kFormat, bool kBiased = false>
const void* KernelFor(GemmOutput output) {
  return output == GemmOutput::kSiluMul
             ? reinterpret_cast<const void*>(
                   &GroupedSkinnyKernel<kNTiles, GemmOutput::kSiluMul, kFormat, kBiased>)
             : reinterpret_cast<const void*>(
                   &GroupedSkinnyKernel<kNTiles, GemmOutput::kFloat, kFormat, kBiased>);
}

template <int kNTiles>
const void* KernelFor(const GroupedGemm& args) {
  const bool biased = args.bias != nullptr;
  switch (FormatOf(args.matrix)) {
    case WeightFormat::kBf16:
      return biased ? KernelFor<kNTiles, WeightFormat::kBf16, true>(args.output)
                    : KernelFor<kNTiles, WeightFormat::kBf16>(args.output);
    case WeightFormat::kFp8Rows:
      return biased ? KernelFor<kNTiles, WeightFormat::kFp8Rows, true>(args.output)
                    : KernelFor<kNTiles, WeightFormat::kFp8Rows>(args.output);
    case WeightFormat::kFp8Blocks:
      return KernelFor<kNTiles, WeightFormat::kFp8Blocks>(args.output);
    case WeightFormat::kMxfp4:
      return KernelFor<kNTiles, WeightFormat::kMxfp4, true>(args.output);
  }
  return nullptr;
}

}  // namespace

Status LaunchGroupedSkinny(const GroupedGemm& args, int tile_rows, Stream stream) {
  const bool wide = tile_rows > 8;
  const void* kernel = wide ? KernelFor<2>(args) : KernelFor<1>(args);
  const int partial = wide ? kPartialBytes<2> : kPartialBytes<1>;
  OSCAR_ASSIGN_OR_RETURN(const DeviceLimits limits, CurrentDeviceLimits());
  constexpr int kStatic = 256;  // barriers
  const int half = limits.shared_per_multiprocessor / kBlocks - limits.shared_reserved - kStatic;
  int blocks = kBlocks, stages = std::min(kMaxStages, (half - partial) / kStageBytes);
  if (stages < kMinStages) {
    blocks = 1;
    stages = std::min(kMaxStages, (limits.shared_per_block - kStatic - partial) / kStageBytes);
  }
  if (stages < kMinStages) {
    return Unimplemented("this GPU has too little shared memory for experts; use --device cpu");
  }
  GroupedParams params = ParamsOf(args);
  params.stages = stages;
  const int shared_bytes = stages * kStageBytes + partial;
  OSCAR_RETURN_IF_ERROR(CudaStatus(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
      "preparing a GEMM of experts"));
  const int unit = args.output == GemmOutput::kSiluMul ? kRows / 2 : kRows;
  const int written = args.output == GemmOutput::kSiluMul ? args.out_stride : args.outputs();
  const int64_t items = int64_t{args.max_tiles} * ((written + unit - 1) / unit);
  void* kernel_args[] = {&params};
  return LaunchOverlapping(
      kernel,
      {static_cast<int>(std::min<int64_t>(items, int64_t{blocks} * limits.multiprocessors)),
       kThreads, shared_bytes},
      kernel_args, stream, "launching a GEMM of experts");
}

}  // namespace oscar::cuda
