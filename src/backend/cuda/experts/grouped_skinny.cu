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
// in
//            gemm_kernels.cuh, x already raised; scales of blocks multiply the sum over each 128 k.
// Order      fixed by the item: k of a warp ascending, warps in order. Which tile a row is in, how
//            many rows it has and whether it is of 8 or 16 does not show.
// Bytes      2 (FP8: 1) a weight of each touched expert, once per tile; x and outputs are small.
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
constexpr int kMaxStages = 3, kMinStages = 2, kBlocks = 2;

template <int kNTiles>
constexpr int kPartialBytes = kWarps* kRows*(kNTiles * 8 + 1) * 4;

template <int kNTiles, GemmOutput kOut, WeightFormat kFormat>
__global__ void __launch_bounds__(kThreads, kBlocks) GroupedSkinnyKernel(const GroupedParams p) {
  constexpr bool kPair = kOut == GemmOutput::kSiluMul;
  constexpr bool kFp8 = kFormat != WeightFormat::kBf16;
  constexpr int kWidth = kFp8 ? 1 : 2;  // bytes of a weight
  constexpr int kChunkK = 64 / kWidth;  // k of a chunk, which is 64 bytes of a row
  constexpr int kLoads = kFp8 ? 2 : 1;  // of 16 bytes of x, a lane's share of a chunk
  constexpr int kTileRows = kPair ? kRows / 2 : kRows;  // of the output
  constexpr int kSpan = kRowBytes / kWidth;             // k of a stage
  constexpr int kChunks = kSpan / kChunkK / kWarps;     // a warp's share of a stage
  // Chunks whose operands are held at once: as many as registers take.
  constexpr int kHeld = kFp8 && kNTiles > 1 ? kChunks / 2 : kChunks;
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
  const int stages = (p.inputs + kSpan - 1) / kSpan, chunks = p.inputs / kChunkK;
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
    const int64_t pitch = int64_t{p.inputs} * kWidth;
    bool first_round = true;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      const ExpertTile tile = p.tiles[item / across];
      const int first = item % across * kTileRows;
      for (int s = 0; s < stages; ++s) {
        if (!first_round) BarrierWait(empty(slot), parity ^ 1);
        const int k = s * kSpan, bytes = min(kRowBytes, (p.inputs - k) * kWidth);
        const StageFill fill(full(slot), static_cast<uint32_t>(bytes * kRows), lane);
        const uint32_t to = SharedAddress(ring) + static_cast<uint32_t>(slot * kStageBytes);
#pragma unroll 4
        for (int r = 0; r < kRows; ++r) {
          fill.Copy(to + static_cast<uint32_t>(r * kPitch),
                    p.w + matrix_row(tile, first, r) * pitch + int64_t{k} * kWidth,
                    static_cast<uint32_t>(bytes));
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
      const int first_chunk = s * (kSpan / kChunkK) + warp * kChunks;
      uint4 b[kHeld][kNTiles][kLoads];
      const auto load = [&](int c) {
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
          for (int j = 0; j < kLoads; ++j) {
            const int k = (first_chunk + c) * kChunkK + quad * (kChunkK / 4) + j * 8;
            b[c % kHeld][n][j] = x[n] == nullptr || first_chunk + c >= chunks
                                     ? make_uint4(0, 0, 0, 0)
                                     : *reinterpret_cast<const uint4*>(x[n] + k);
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
      const unsigned char* at =
          ring + slot * kStageBytes + group * kPitch + warp * kChunks * 64 + quad * 16;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (first_chunk + c >= chunks) break;  // nothing was copied there
        const uint4 lo = *reinterpret_cast<const uint4*>(at + c * 64);
        const uint4 hi = *reinterpret_cast<const uint4*>(at + 8 * kPitch + c * 64);
        if constexpr (kFormat == WeightFormat::kBf16) {
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
        const float value = m < p.outputs ? SiluMul(total(r, n), total(kTileRows + r, n)) : 0.0f;
        const __nv_bfloat16 rounded = __float2bfloat16_rn(value);
        static_cast<__nv_bfloat16*>(p.out)[to] =
            __float2bfloat16_rn(__bfloat162float(rounded) * p.factor);
      } else {
        static_cast<float*>(p.out)[to] = total(r, n);
      }
    }
    NamedSync(1, kWarps * 32);  // before the sums are overwritten
  }
}

template <int kNTiles, WeightFormat kFormat>
const void* KernelFor(GemmOutput output) {
  return output == GemmOutput::kSiluMul
             ? reinterpret_cast<const void*>(
                   &GroupedSkinnyKernel<kNTiles, GemmOutput::kSiluMul, kFormat>)
             : reinterpret_cast<const void*>(
                   &GroupedSkinnyKernel<kNTiles, GemmOutput::kFloat, kFormat>);
}

template <int kNTiles>
const void* KernelFor(const GroupedGemm& args) {
  switch (FormatOf(args.matrix)) {
    case WeightFormat::kBf16:
      return KernelFor<kNTiles, WeightFormat::kBf16>(args.output);
    case WeightFormat::kFp8Rows:
      return KernelFor<kNTiles, WeightFormat::kFp8Rows>(args.output);
    case WeightFormat::kFp8Blocks:
      return KernelFor<kNTiles, WeightFormat::kFp8Blocks>(args.output);
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
