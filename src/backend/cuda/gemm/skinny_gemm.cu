// out[n, m] = sum_k w[m, k] x[n, k] for n <= 16 (FP8: 32) on tensor cores, at the speed of reading
// w.
//
// Grid       two blocks an SM, each with its share of tiles of 16 weight rows (32 where n > 8, or a
//            gate and an up tile). n > 16: one block, because operands fill the registers, and for
//            gates and ups tiles of 64 rows, which halves how often x is read.
// Pipeline   a producer warp copies 32 KiB of a tile (64 KiB where it has 64 rows) at a time into a
//            ring of stages (bulk copies on mbarriers), eight consumer warps take an eighth of its
//            k each. The producer starts before the kernel that writes x has ended (programmatic
//            dependent launch).
// Operands   m16n8k16 with the weights as A. The sum over k may run in any order, so a lane's
//            16-byte load, 8 consecutive k of a row, serves as its operands of two steps; x is
//            loaded the same way as B. Rows in shared memory are 64 bytes further apart than they
//            are long, which keeps those loads free of conflicts.
// FP8        the same 16 bytes are 16 consecutive k and serve four steps. Codes are unpacked as in
//            gemm_kernels.cuh; tensor cores take subnormal operands as they are. Scales of rows
//            multiply the result, those of blocks the sum over each 128 k.
// Order      fixed by the tile, and warps are added in order at the end: a row's bits do not depend
//            on the other rows of the launch.
// Bound      memory: 2 bytes of weights, or 1, a product row and k.
#include <algorithm>

#include "cuda/device/cuda_status.h"
#include "cuda/device/launch.h"
#include "cuda/gemm/gemm_kernels.cuh"
#include "cuda/gemm/skinny_gemm.h"

namespace oscar::cuda {
namespace {

constexpr int kWarps = 8;  // consumers
constexpr int kPad = 64;   // bytes between rows

// What fits an SM: tiles of 8 rows of x and of 16 rows of weights.
template <int kNTiles, int kRTiles>
struct Fit {
  static constexpr int kBlocks = kNTiles > 2 ? 1 : 2;
  static constexpr int kRows = kRTiles * 16;
  static constexpr int kRowBytes = (kRTiles > 2 ? 65536 : 32768) / kRows;  // of a stage
  static constexpr int kPitch = kRowBytes + kPad;
  static constexpr int kStages = kNTiles == 1 ? 3 : kNTiles == 2 || kRTiles > 2 ? 2 : 4;
  static constexpr int kRingBytes = kStages * kRows * kPitch;
  static constexpr int kColumns = kNTiles * 8 + 1;  // of partial sums: rows in different banks
  static constexpr int kSharedBytes = kRingBytes + kWarps * kRows * kColumns * 4;
  static_assert(kBlocks * (kSharedBytes + 1536) <= 227 * 1024);
};

template <int kNTiles, int kRTiles, GemmOutput kOut, WeightFormat kFormat>
__global__ void __launch_bounds__((kWarps + 1) * 32, Fit<kNTiles, kRTiles>::kBlocks)
    SkinnyKernel(const GemmParams p) {
  using F = Fit<kNTiles, kRTiles>;
  constexpr bool kPair = kOut == GemmOutput::kSiluMul;
  constexpr bool kFp8 = kFormat != WeightFormat::kBf16;
  constexpr int kWidth = kFp8 ? 1 : 2;  // bytes of a weight
  constexpr int kChunkK = 64 / kWidth;  // k of a chunk, which is 64 bytes of a row
  constexpr int kLoads = kFp8 ? 2 : 1;  // of 16 bytes of x, a lane's share of a chunk
  constexpr int kRows = F::kRows, kStages = F::kStages;
  constexpr int kRowBytes = F::kRowBytes, kPitch = F::kPitch;
  constexpr int kTileRows = kPair ? kRows / 2 : kRows;  // of the output
  constexpr int kSpan = kRowBytes / kWidth;             // k of a stage
  constexpr int kChunks = kSpan / kChunkK / kWarps;     // a warp's share of a stage
  static_assert(kChunks % 2 == 0);                      // whole blocks of 128 k
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ uint64_t barriers[2 * kStages];
  auto* const partial =
      reinterpret_cast<float(*)[kRows][F::kColumns]>(ring + F::kRingBytes);  // [kWarps]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const auto full = [&](int slot) { return SharedAddress(&barriers[slot]); };
  const auto empty = [&](int slot) { return SharedAddress(&barriers[kStages + slot]); };
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kStages; ++slot) {
      BarrierInit(full(slot), FullArrivals());
      BarrierInit(empty(slot), kWarps);
    }
    BarrierInitFence();
  }
  __syncthreads();
  LetSuccessorStart();
  const int tiles = (p.outputs + kTileRows - 1) / kTileRows;
  const int total_rows = kPair ? 2 * p.outputs : p.outputs;
  const int stages = (p.inputs + kSpan - 1) / kSpan, chunks = p.inputs / kChunkK;

  if (warp == kWarps) {
    const int64_t pitch = int64_t{p.inputs} * kWidth;
    int step = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      for (int s = 0; s < stages; ++s, ++step) {
        const int slot = step % kStages, round = step / kStages;
        if (round > 0) BarrierWait(empty(slot), (round - 1) & 1);
        const int k = s * kSpan, bytes = min(kRowBytes, (p.inputs - k) * kWidth);
        const StageFill fill(full(slot), static_cast<uint32_t>(bytes * kRows), lane);
        const uint32_t to = SharedAddress(ring) + static_cast<uint32_t>(slot * kRows * kPitch);
        // One addition a row; the last tile repeats the last row.
#pragma unroll
        for (int half = 0; half < (kPair ? 2 : 1); ++half) {
          const int row = tile * kTileRows + half * p.outputs;
          const unsigned char* from = p.w + min(row, total_rows - 1) * pitch + k * kWidth;
#pragma unroll
          for (int r = 0; r < kTileRows; ++r) {
            fill.CopyOnce(to + static_cast<uint32_t>((half * kTileRows + r) * kPitch), from,
                          static_cast<uint32_t>(bytes));
            if (row + r + 1 < total_rows) from += pitch;
          }
        }
        fill.End();
      }
    }
    return;
  }

  WaitForPredecessor();
  const auto inputs_at = [&](int n, int chunk, int load) {
    const int row = n * 8 + group;
    if (row >= p.rows || chunk >= chunks) return make_uint4(0, 0, 0, 0);
    const int k = chunk * kChunkK + quad * (kChunkK / 4) + load * 8;
    const uint4 pairs = *reinterpret_cast<const uint4*>(p.x + int64_t{row} * p.inputs + k);
    return kFp8 ? RaiseForFp8(pairs) : pairs;
  };
  // Which row of the matrix row `r` of a tile is.
  const auto matrix_row = [&](int tile, int r) {
    const int row = tile * kTileRows + (r >= kTileRows ? p.outputs + r - kTileRows : r);
    return min(row, total_rows - 1);
  };
  // A warp's operands of a stage. Unpacking FP8 leaves less time to wait for them, so each is asked
  // for again, for the stage after, as soon as it has been used.
  uint4 b[kChunks][kNTiles][kLoads];
  const auto load = [&](int c, int first) {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) b[c][n][j] = inputs_at(n, first + c, j);
    }
  };
  if constexpr (kFp8) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) load(c, warp * kChunks);
  }
  int step = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float sums[kRTiles][kNTiles][4] = {};
    float block_sums[kFormat == WeightFormat::kFp8Blocks ? kRTiles : 1][kNTiles][4] = {};
    for (int s = 0; s < stages; ++s, ++step) {
      const int slot = step % kStages, first = s * (kSpan / kChunkK) + warp * kChunks;
      const int first_next = (s + 1 == stages ? 0 : s + 1) * (kSpan / kChunkK) + warp * kChunks;
      if constexpr (!kFp8) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) load(c, first);
      }
      // Of this lane's rows in the blocks of its chunks.
      float scales[kFormat == WeightFormat::kFp8Blocks ? kChunks / 2 : 1][kRTiles][2];
      if constexpr (kFormat == WeightFormat::kFp8Blocks) {
#pragma unroll
        for (int c = 0; c < kChunks / 2; ++c) {
          const int block = min(first / 2 + c, p.scale_columns - 1);
#pragma unroll
          for (int r = 0; r < kRTiles; ++r) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int row = matrix_row(tile, r * 16 + h * 8 + group) / p.scale_rows;
              scales[c][r][h] = __ldg(p.scales + int64_t{row} * p.scale_columns + block);
            }
          }
        }
      }
      BarrierWait(full(slot), (step / kStages) & 1);
      const unsigned char* at =
          ring + slot * kRows * kPitch + group * kPitch + warp * kChunks * 64 + quad * 16;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int r = 0; r < kRTiles; ++r) {
          if (first + c >= chunks) break;  // nothing was copied there
          const uint4 lo = *reinterpret_cast<const uint4*>(at + r * 16 * kPitch + c * 64);
          const uint4 hi = *reinterpret_cast<const uint4*>(at + (r * 16 + 8) * kPitch + c * 64);
          if constexpr (kFormat == WeightFormat::kBf16) {
#pragma unroll
            for (int n = 0; n < kNTiles; ++n) {
              const uint4& x = b[c][n][0];
              MmaBf16(sums[r][n], lo.x, hi.x, lo.y, hi.y, x.x, x.y);
              MmaBf16(sums[r][n], lo.z, hi.z, lo.w, hi.w, x.z, x.w);
            }
          } else if constexpr (kFormat == WeightFormat::kFp8Rows) {
            MultiplyFp8<kNTiles>(sums[r], lo, hi, b[c]);
          } else {
            MultiplyFp8<kNTiles>(block_sums[r], lo, hi, b[c]);
            if (c % 2 == 0) continue;
#pragma unroll
            for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                sums[r][n][i] += scales[c / 2][r][i / 2] * block_sums[r][n][i];
                block_sums[r][n][i] = 0.0f;
              }
            }
          }
        }
        if constexpr (kFp8) load(c, first_next);
      }
      __syncwarp();
      if (lane == 0) BarrierArrive(empty(slot));
    }
#pragma unroll
    for (int r = 0; r < kRTiles; ++r) {
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        float* top = &partial[warp][r * 16 + group][n * 8 + quad * 2];
        float* bottom = &partial[warp][r * 16 + group + 8][n * 8 + quad * 2];
        top[0] = sums[r][n][0];
        top[1] = sums[r][n][1];
        bottom[0] = sums[r][n][2];
        bottom[1] = sums[r][n][3];
      }
    }
    NamedSync(1, kWarps * 32);
    const auto total = [&](int row, int n) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) sum += partial[i][row][n];
      return sum;
    };
    for (int i = threadIdx.x; i < kTileRows * kNTiles * 8; i += kWarps * 32) {
      const int row = i % kTileRows, n = i / kTileRows, m = tile * kTileRows + row;
      if (n >= p.rows || m >= p.outputs) continue;
      constexpr float kFactor = kFp8 ? kHalfOfFp8 : 1.0f;
      float value = total(row, n) * kFactor;
      if constexpr (kFormat == WeightFormat::kFp8Rows) value *= p.scales[m];
      if constexpr (kPair) {
        float up = total(kTileRows + row, n) * kFactor;
        if constexpr (kFormat == WeightFormat::kFp8Rows) up *= p.scales[p.outputs + m];
        value = SiluMul(value, up);
      } else if (p.bias != nullptr) {
        value += p.bias[m];
      }
      const int64_t at = int64_t{n} * p.out_stride + m;
      if constexpr (kOut == GemmOutput::kAdd) {
        static_cast<float*>(p.out)[at] += value;
      } else if constexpr (kOut == GemmOutput::kFloat) {
        static_cast<float*>(p.out)[at] = value;
      } else {
        static_cast<__nv_bfloat16*>(p.out)[at] = __float2bfloat16_rn(value);
      }
    }
    NamedSync(1, kWarps * 32);  // before the sums are overwritten
  }
}

// Which kernel, how many weight rows its tiles have and what shared memory it takes.
struct Choice {
  const void* kernel;
  int tile_rows, shared_bytes, blocks;  // of an SM
};

template <int kNTiles, int kRTiles, GemmOutput kOut, WeightFormat kFormat>
Choice Make() {
  using F = Fit<kNTiles, kRTiles>;
  return {reinterpret_cast<const void*>(&SkinnyKernel<kNTiles, kRTiles, kOut, kFormat>),
          kOut == GemmOutput::kSiluMul ? F::kRows / 2 : F::kRows, F::kSharedBytes, F::kBlocks};
}

template <GemmOutput kOut, WeightFormat kFormat>
Choice Choose(int rows, bool invariant) {
  constexpr int kFew = kOut == GemmOutput::kSiluMul ? 2 : 1;  // tiles where rows are few
  if constexpr (kFormat != WeightFormat::kBf16) {
    // Other matrices would have too few tiles of 64 rows for all SMs, and sums of blocks take as
    // many registers as the sums themselves.
    constexpr bool kWide = kOut == GemmOutput::kSiluMul && kFormat == WeightFormat::kFp8Rows;
    constexpr int kTiles = kWide ? 4 : 2;
    if (rows > 16) return Make<4, kTiles, kOut, kFormat>();
  }
  if (rows > 8 || invariant) return Make<2, 2, kOut, kFormat>();
  return Make<1, kFew, kOut, kFormat>();
}

template <WeightFormat kFormat>
Choice Choose(GemmOutput output, int rows, bool invariant) {
  switch (output) {
    case GemmOutput::kFloat:
      return Choose<GemmOutput::kFloat, kFormat>(rows, invariant);
    case GemmOutput::kAdd:
      return Choose<GemmOutput::kAdd, kFormat>(rows, invariant);
    case GemmOutput::kSiluMul:
      return Choose<GemmOutput::kSiluMul, kFormat>(rows, invariant);
  }
  return {};
}

Choice Choose(const GemmArguments& args, bool invariant) {
  switch (FormatOf(args.matrix)) {
    case WeightFormat::kBf16:
      return Choose<WeightFormat::kBf16>(args.output, args.rows, invariant);
    case WeightFormat::kFp8Rows:
      return Choose<WeightFormat::kFp8Rows>(args.output, args.rows, invariant);
    case WeightFormat::kFp8Blocks:
      return Choose<WeightFormat::kFp8Blocks>(args.output, args.rows, invariant);
    case WeightFormat::kMxfp4:
      break;
  }
  return {};
}

// Whether a block may have that much, and a little beside it.
bool HasShared(int bytes) {
  const auto limits = CurrentDeviceLimits();
  return limits.has_value() && limits->shared_per_block >= bytes + 1024;
}

}  // namespace

bool TakesSkinnyLaunches() {
  return HasShared(
      std::max({Fit<1, 1>::kSharedBytes, Fit<1, 2>::kSharedBytes, Fit<2, 2>::kSharedBytes}));
}

bool TakesWideLaunches() {
  return HasShared(std::max(Fit<4, 4>::kSharedBytes, Fit<4, 2>::kSharedBytes));
}

Status LaunchSkinny(const GemmArguments& args, bool invariant, Stream stream) {
  const bool fp8 = args.matrix.is_fp8();
  if (args.rows < 1 || args.rows > SkinnyRows(fp8 && !invariant) || args.outputs() < 1 ||
      !FitsGemmKernels(args.matrix.inputs, fp8) || args.residual != nullptr ||
      args.matrix.is_mxfp4()) {
    return InvalidArgument(
        "a skinny product takes 1 to 16 rows (FP8 32) and inputs in multiples of 32, of 128 in "
        "FP8");
  }
  GemmParams params = ParamsOf(args);
  const Choice choice = Choose(args, invariant);
  OSCAR_ASSIGN_OR_RETURN(const DeviceLimits limits, CurrentDeviceLimits());
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaFuncSetAttribute(choice.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      choice.shared_bytes),
                 "preparing a skinny product"));
  const int tiles = (args.outputs() + choice.tile_rows - 1) / choice.tile_rows;
  void* kernel_args[] = {&params};
  return LaunchOverlapping(choice.kernel,
                           {std::min(tiles, choice.blocks * limits.multiprocessors),
                            (kWarps + 1) * 32, choice.shared_bytes},
                           kernel_args, stream, "launching a skinny product");
}

}  // namespace oscar::cuda
