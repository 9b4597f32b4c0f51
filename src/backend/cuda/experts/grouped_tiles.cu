// Many rows per expert: out[place, m] = sum_k x[row, k] w[expert, m, k] on tensor cores.
//
// Grid       two blocks an SM; items are (tile of up to 64 or 128 rows of one expert, 128 weight
//            rows or 64 gates and their 64 ups), weight rows inside: blocks that run together share
//            rows of x and whole experts in the L2. How many there are is read from the device.
// Pipeline   64 inputs a stage by 16-byte cp.async into 3 stages (FP8, MXFP4: 4); rows of x are
//            gathered there, and every eighth stage of MXFP4 brings the scales of eight. 96 KiB a
//            block at most, which every device from compute capability 8.6 on has.
// Operands   mma.sync m16n8k16, eight warps, two along the rows and four along the outputs, 64 x 32
//            outputs a warp (FP8 32 x 32: sums of blocks want registers of their own). The sum over
//            k may run in any order, so that a lane's 16-byte load, 8 consecutive k of a row (16 of
//            FP8 codes, 8 bytes of MXFP4), serves as its operands of two steps (four). Chunks of 16
//            bytes are swizzled so that eight lanes always read 128 different bytes.
// FP8        as in gemm_kernels.cuh, x already raised: codes are unpacked once for the rows of a
//            warp. MXFP4 as in grouped_skinny.cu.
// Order      k ascending in steps: fixed, whatever the tile.
// Bound      tensor cores by mma.sync, about six tenths of wgmma's rate on Hopper; shared memory is
//            read at 12 x 512 bytes for 32 MMAs, as fast as those are issued. Hopper has
//            grouped_wgmma.cu for many rows.
#include <algorithm>

#include "cuda/device/cuda_status.h"
#include "cuda/device/launch.h"
#include "cuda/experts/grouped_gemm.cuh"

namespace oscar::cuda {
namespace {

constexpr int kThreads = 256, kColumns = 128, kDepth = 64;
constexpr int kXRowBytes = kDepth * 2;
constexpr int kRunSteps = kMxfp4Run / kDepth;  // of MXFP4

template <WeightFormat kFormat>
struct Tile {
  static constexpr bool kMxfp4 = kFormat == WeightFormat::kMxfp4;
  static constexpr bool kFp8 = kFormat != WeightFormat::kBf16 && !kMxfp4;
  static constexpr int kStages = kFp8 || kMxfp4 ? 4 : 3;
  static constexpr int kWRowBytes = kMxfp4 ? kDepth / 2 : kFp8 ? kDepth : kDepth * 2;
  // Behind the stages, twice: scales of the columns for a run of 512 inputs.
  static constexpr int kScaleBytes = kMxfp4 ? kColumns * 16 : 0;
  static constexpr int kWBytes = kColumns * kWRowBytes;
  static constexpr int StageBytes(int rows) { return rows * kXRowBytes + kWBytes; }
  // Where 16-byte chunk `c` of a row lies in it.
  static __device__ __forceinline__ int XChunk(int row, int c) {
    return kFp8 || kMxfp4 ? c ^ (row & 1) : c ^ ((row & 1) << 2);
  }
  static __device__ __forceinline__ int WChunk(int row, int c) {
    return kFp8 || kMxfp4 ? c : c ^ ((row & 1) << 2);
  }
};

template <int kMTiles, GemmOutput kOut, WeightFormat kFormat, bool kBiased>
__global__ void __launch_bounds__(kThreads, 2) GroupedTilesKernel(const GroupedParams p) {
  using T = Tile<kFormat>;
  constexpr bool kPair = kOut == GemmOutput::kSiluMul, kFp8 = T::kFp8, kMxfp4 = T::kMxfp4;
  constexpr bool kBlocks = kFormat == WeightFormat::kFp8Blocks;
  constexpr int kRows = 2 * kMTiles * 16, kNTiles = 4;
  constexpr int kStages = T::kStages, kStage = T::StageBytes(kRows);
  constexpr int kOutputs = kPair ? kColumns / 2 : kColumns;  // of an item
  constexpr int kXCopies = kRows * 8 / kThreads, kWCopies = T::kWBytes / 16 / kThreads;
  constexpr int kWChunks = T::kWRowBytes / 16;
  extern __shared__ __align__(128) unsigned char shared[];
  LetSuccessorStart();
  WaitForPredecessor();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int group = lane / 4, quad = lane % 4, warp_m = warp / 4, warp_n = warp % 4;
  const int written = WrittenOutputs<kOut>(p);
  const int across = (written + kOutputs - 1) / kOutputs;
  const int items = *p.num_tiles * across, steps = p.inputs / kDepth;
  const int64_t w_pitch = kMxfp4 ? Mxfp4RowBytes(p.inputs) : int64_t{p.inputs} * (kFp8 ? 1 : 2);
  // A warp has gates and ups of the same outputs: 16 of each.
  const auto output_of = [&](int column) {
    return kPair ? column / 32 * 16 + column % 16 : column;
  };
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const ExpertTile tile = p.tiles[item / across];
    const int first = item % across * kOutputs;
    const int64_t base = int64_t{tile.expert} * p.matrix_rows;
    // Row of the matrix for column `column` of the item; beyond the outputs the last one.
    const auto matrix_row = [&](int column) {
      const int half = kPair ? column / 16 % 2 : 0;
      return base + half * p.outputs + min(first + output_of(column), p.outputs - 1);
    };
    // What this thread copies at every step, in units of 16 bytes; rows beyond the tile's are its
    // last one. A thread's rows are an even number apart: all are swizzled alike.
    uint32_t x_from[kXCopies], w_from[kWCopies];
    const int x_chunk = thread % 8, x_row = thread / 8;
    const int w_chunk = thread % kWChunks, w_row = thread / kWChunks;
#pragma unroll
    for (int i = 0; i < kXCopies; ++i) {
      const int place = tile.first + min(i * (kThreads / 8) + x_row, tile.rows - 1);
      const int64_t from = p.x_rows == nullptr ? place : p.x_rows[place];
      x_from[i] = static_cast<uint32_t>(from * (p.inputs / 8) + x_chunk);
    }
#pragma unroll
    for (int i = 0; i < kWCopies; ++i) {
      const int column = i * (kThreads / kWChunks) + w_row;
      w_from[i] =
          static_cast<uint32_t>(matrix_row(column) * (w_pitch / 16) + (kMxfp4 ? 0 : w_chunk));
    }
    const uint32_t x_to =
        SharedAddress(shared) +
        static_cast<uint32_t>(x_row * kXRowBytes + T::XChunk(x_row, x_chunk) * 16);
    const uint32_t w_to =
        SharedAddress(shared) + static_cast<uint32_t>(kRows * kXRowBytes + w_row * T::kWRowBytes +
                                                      T::WChunk(w_row, w_chunk) * 16);
    const auto fetch = [&](int step) {
      if (step < steps) {
        const auto stage = static_cast<uint32_t>(step % kStages * kStage);
        const auto* x = reinterpret_cast<const uint4*>(p.x) + step * (kXRowBytes / 16);
        const auto* w = reinterpret_cast<const uint4*>(p.w);
        if constexpr (kMxfp4) {
          const int run = step / kRunSteps;
          w += run * (kMxfp4RunBytes / 16);
          if (step % kRunSteps == 0 && w_chunk == 0) {
            CopyAsync(
                SharedAddress(shared) +
                    static_cast<uint32_t>(kStages * kStage + run % 2 * T::kScaleBytes + w_row * 16),
                w + w_from[0]);
          }
          w += 1 + step % kRunSteps * 2 + w_chunk;
        } else {
          w += step * (T::kWRowBytes / 16);
        }
#pragma unroll
        for (int i = 0; i < kXCopies; ++i) {
          CopyAsync(x_to + stage + i * (kThreads / 8 * kXRowBytes), x + x_from[i]);
        }
#pragma unroll
        for (int i = 0; i < kWCopies; ++i) {
          CopyAsync(w_to + stage + i * (kThreads / kWChunks * T::kWRowBytes), w + w_from[i]);
        }
      }
      CommitCopies();  // also of nothing, so that groups are steps
    };
    __syncthreads();  // all have read the item before
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) fetch(s);

    float sums[kMTiles][kNTiles][4] = {};
    float parts[kBlocks ? kMTiles : 1][kNTiles][4] = {};
    for (int step = 0; step < steps; ++step) {
      WaitForCopies<kStages - 2>();
      __syncthreads();
      fetch(step + kStages - 1);
      const unsigned char* const x_at = shared + step % kStages * kStage;
      const unsigned char* const w_at = x_at + kRows * kXRowBytes;
      const auto load_x = [&](int m, int h, int c) {
        const int row = (warp_m * kMTiles + m) * 16 + h * 8 + group;
        return *reinterpret_cast<const uint4*>(x_at + row * kXRowBytes + T::XChunk(row, c) * 16);
      };
      const auto load_w = [&](int n, int c) {
        const int column = warp_n * 32 + n * 8 + group;
        return *reinterpret_cast<const uint4*>(w_at + column * T::kWRowBytes +
                                               T::WChunk(column, c) * 16);
      };
      if constexpr (kMxfp4) {
        const unsigned char* const scales_at = shared + kStages * kStage +
                                               step / kRunSteps % 2 * T::kScaleBytes +
                                               step % kRunSteps * 2 + quad / 2;
        uint2 w[kNTiles];
        uint32_t scales[kNTiles];
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
          const int column = warp_n * 32 + n * 8 + group;
          w[n] = *reinterpret_cast<const uint2*>(w_at + column * T::kWRowBytes + quad * 8);
          scales[n] = scales_at[column * 16];
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          uint32_t pairs[kNTiles][4];
#pragma unroll
          for (int n = 0; n < kNTiles; ++n) {
            UnpackMxfp4(j == 0 ? w[n].x : w[n].y, Mxfp4Scale(scales[n]), pairs[n]);
          }
#pragma unroll
          for (int m = 0; m < kMTiles; ++m) {
            const uint4 lo = load_x(m, 0, quad * 2 + j), hi = load_x(m, 1, quad * 2 + j);
#pragma unroll
            for (int n = 0; n < kNTiles; ++n) {
              MmaBf16(sums[m][n], lo.x, hi.x, lo.y, hi.y, pairs[n][0], pairs[n][1]);
              MmaBf16(sums[m][n], lo.z, hi.z, lo.w, hi.w, pairs[n][2], pairs[n][3]);
            }
          }
        }
      } else if constexpr (!kFp8) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint4 w[kNTiles];
#pragma unroll
          for (int n = 0; n < kNTiles; ++n) w[n] = load_w(n, half * 4 + quad);
#pragma unroll
          for (int m = 0; m < kMTiles; ++m) {
            const uint4 lo = load_x(m, 0, half * 4 + quad), hi = load_x(m, 1, half * 4 + quad);
#pragma unroll
            for (int n = 0; n < kNTiles; ++n) {
              MmaBf16(sums[m][n], lo.x, hi.x, lo.y, hi.y, w[n].x, w[n].y);
              MmaBf16(sums[m][n], lo.z, hi.z, lo.w, hi.w, w[n].z, w[n].w);
            }
          }
        }
      } else {
        uint4 w[kNTiles];
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) w[n] = load_w(n, quad);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          uint4 lo[kMTiles], hi[kMTiles];
#pragma unroll
          for (int m = 0; m < kMTiles; ++m) {
            lo[m] = load_x(m, 0, quad * 2 + j);
            hi[m] = load_x(m, 1, quad * 2 + j);
          }
#pragma unroll
          for (int n = 0; n < kNTiles; ++n) {
            const uint32_t words[2] = {j == 0 ? w[n].x : w[n].z, j == 0 ? w[n].y : w[n].w};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const uint32_t b0 = FirstPair(words[i]), b1 = SecondPair(words[i]);
#pragma unroll
              for (int m = 0; m < kMTiles; ++m) {
                auto& sum = kBlocks ? parts[kBlocks ? m : 0][n] : sums[m][n];
                MmaBf16(sum, i == 0 ? lo[m].x : lo[m].z, i == 0 ? hi[m].x : hi[m].z,
                        i == 0 ? lo[m].y : lo[m].w, i == 0 ? hi[m].y : hi[m].w, b0, b1);
              }
            }
          }
        }
        if constexpr (kBlocks) {
          if (step % 2 == 0) continue;
            // The block of 128 inputs has ended.
#pragma unroll
          for (int n = 0; n < kNTiles; ++n) {
            float scales[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int64_t row = matrix_row(warp_n * 32 + n * 8 + quad * 2 + e) / p.scale_rows;
              scales[e] = __ldg(p.scales + row * p.scale_columns + step / 2);
            }
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                sums[m][n][i] += scales[i % 2] * parts[m][n][i];
                parts[m][n][i] = 0.0f;
              }
            }
          }
        }
      }
    }
    WaitForCopies<0>();

    const auto value = [&](int m, int n, int i) {
      float sum = sums[m][n][i];
      if constexpr (kFp8) sum *= kHalfOfFp8;
      if constexpr (kFormat == WeightFormat::kFp8Rows) {
        sum *= p.scales[matrix_row(warp_n * 32 + n * 8 + quad * 2 + i % 2)];
      }
      return sum;
    };
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = (warp_m * kMTiles + m) * 16 + h * 8 + group;
        if (row >= tile.rows) continue;
        const int64_t to = int64_t{tile.first + row} * p.out_stride;
#pragma unroll
        for (int n = 0; n < (kPair ? kNTiles / 2 : kNTiles); ++n) {
          const int output = first + output_of(warp_n * 32 + n * 8 + quad * 2);
          float v[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            v[e] = value(m, n, h * 2 + e);
            if constexpr (kBiased) {
              const float* bias = p.bias + base + output + e;
              if (output + e >= p.outputs) {
                v[e] = 0.0f;
              } else if constexpr (kPair) {
                v[e] = ClampedGateMul(p, v[e] + __ldg(bias),
                                      value(m, n + 2, h * 2 + e) + __ldg(bias + p.outputs));
              } else {
                v[e] += __ldg(bias);
              }
            } else if constexpr (kPair) {
              v[e] = output + e < p.outputs ? SiluMul(v[e], value(m, n + 2, h * 2 + e)) : 0.0f;
            }
          }
          if constexpr (kPair) {
            if (output >= written) continue;  // both are inside or outside: it is even
            const uint32_t pair = PackBf16(v[0], v[1]);
            const uint32_t raised = PackBf16(Bf16Low(pair) * p.factor, Bf16High(pair) * p.factor);
            *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + to + output) = raised;
          } else {
            auto* const out = static_cast<float*>(p.out) + to + output;
            if (output + 1 < written) {
              *reinterpret_cast<float2*>(out) = make_float2(v[0], v[1]);
            } else if (output < written) {
              *out = v[0];
            }
          }
        }
      }
    }
  }
}

struct Choice {
  const void* kernel;
  int shared_bytes;
};

template <int kMTiles, WeightFormat kFormat, bool kBiased = false>
Choice Make(GemmOutput output) {
  using T = Tile<kFormat>;
  const void* kernel =
      output == GemmOutput::kSiluMul
          ? reinterpret_cast<const void*>(
                &GroupedTilesKernel<kMTiles, GemmOutput::kSiluMul, kFormat, kBiased>)
          : reinterpret_cast<const void*>(
                &GroupedTilesKernel<kMTiles, GemmOutput::kFloat, kFormat, kBiased>);
  return {kernel, T::kStages * T::StageBytes(kMTiles * 32) + 2 * T::kScaleBytes};
}

template <WeightFormat kFormat, bool kBiased = false>
Choice MakeOfEither(GemmOutput output, int tile_rows) {
  return tile_rows > 64 ? Make<4, kFormat, kBiased>(output) : Make<2, kFormat, kBiased>(output);
}

Choice Choose(const GroupedGemm& args, int tile_rows) {
  const bool biased = args.bias != nullptr;
  switch (FormatOf(args.matrix)) {
    case WeightFormat::kBf16:
      return biased ? MakeOfEither<WeightFormat::kBf16, true>(args.output, tile_rows)
                    : MakeOfEither<WeightFormat::kBf16>(args.output, tile_rows);
    case WeightFormat::kFp8Rows:
      return biased ? Make<2, WeightFormat::kFp8Rows, true>(args.output)
                    : Make<2, WeightFormat::kFp8Rows>(args.output);
    case WeightFormat::kFp8Blocks:
      return Make<2, WeightFormat::kFp8Blocks>(args.output);
    case WeightFormat::kMxfp4:
      return MakeOfEither<WeightFormat::kMxfp4, true>(args.output, tile_rows);
  }
  return {};
}

}  // namespace

Status LaunchGroupedTiles(const GroupedGemm& args, int tile_rows, Stream stream) {
  const Choice choice = Choose(args, tile_rows);
  OSCAR_ASSIGN_OR_RETURN(const DeviceLimits limits, CurrentDeviceLimits());
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaFuncSetAttribute(choice.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      choice.shared_bytes),
                 "preparing a GEMM of experts"));
  GroupedParams params = ParamsOf(args);
  const bool pair = args.output == GemmOutput::kSiluMul;
  const int unit = pair ? kColumns / 2 : kColumns;
  const int written = pair ? args.out_stride : args.outputs();
  const int64_t items = int64_t{args.max_tiles} * ((written + unit - 1) / unit);
  void* kernel_args[] = {&params};
  return LaunchOverlapping(
      choice.kernel,
      {static_cast<int>(std::min<int64_t>(items, int64_t{2} * limits.multiprocessors)), kThreads,
       choice.shared_bytes},
      kernel_args, stream, "launching a GEMM of experts");
}

}  // namespace oscar::cuda
