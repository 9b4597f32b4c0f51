// out[n, m] = sum_k w[m, k] x[n, k] for one n or two, at the speed of reading w.
//
// Grid       one block an SM, each with its share of the outputs, the same to one, in tiles of up
//            to 16 weight rows (or 8 gates and their 8 ups) of about the same height.
// Pipeline   a producer warp copies 4 KiB of each of a tile's rows at a time into a ring of 64 KiB
//            stages, bulk copies on mbarriers: long ones, because memory likes them, and marked as
//            the first to leave the L2, which the activations are to stay in. It starts before the
//            kernel that writes x has ended (programmatic dependent launch).
// Operands   x is brought to shared memory once, as BF16. If it is the residual stream, its RMSNorm
//            is a factor of the result. 16 consumer warps: each takes half of a tile's rows and an
//            eighth of a stage's k, eight consecutive k a lane, which it multiplies in fp32.
// FP8        codes are unpacked as in gemm_kernels.cuh. Scales of rows multiply the result,
//            those of blocks the sum over a lane's eight k.
// Order      fixed by the tile: lanes are added by a tree, warps in order.
// Bound      memory: 2 bytes of weights, or 1, a product row and k.
#include <algorithm>

#include "cuda/device/cuda_status.h"
#include "cuda/device/launch.h"
#include "cuda/gemm/gemm_kernels.cuh"
#include "cuda/gemm/gemv.h"

namespace oscar::cuda {
namespace {

constexpr int kTileRows = 16, kRowBytes = 4096, kStageBytes = kTileRows * kRowBytes;
constexpr int kWarps = 16, kThreads = kWarps * 32;  // consumers
constexpr int kSlices = 8;                          // warps that share the k of a stage
constexpr int kWarpRows = kTileRows / (kWarps / kSlices);
constexpr int kMinStages = 2, kMaxStages = 3;
constexpr int kLaneK = 8, kWarpK = 32 * kLaneK;  // k that a warp takes at once

__device__ __forceinline__ void Unpack(const uint4& pairs, float (&out)[kLaneK]) {
  const uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = Bf16Low(words[i]);
    out[2 * i + 1] = Bf16High(words[i]);
  }
}

template <bool kFp8>
__device__ __forceinline__ void LoadWeights(const unsigned char* at, float (&out)[kLaneK]) {
  if constexpr (kFp8) {
    const uint2 words = *reinterpret_cast<const uint2*>(at);
    Unpack(make_uint4(FirstPair(words.x), SecondPair(words.x), FirstPair(words.y),
                      SecondPair(words.y)),
           out);
  } else {
    Unpack(*reinterpret_cast<const uint4*>(at), out);
  }
}

// The sums over all lanes of eight numbers: lanes 4 i to 4 i + 3 have that of number i.
__device__ __forceinline__ float SumOfLanes(float (&v)[8], int lane) {
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
    const bool upper = (lane & (half * 4)) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float mine = upper ? v[half + i] : v[i], other = upper ? v[i] : v[half + i];
      v[i] = mine + __shfl_xor_sync(~0u, other, half * 4);
    }
  }
  v[0] += __shfl_xor_sync(~0u, v[0], 2);
  return v[0] + __shfl_xor_sync(~0u, v[0], 1);
}

// The outputs of a block, in tiles of at most `most`. In 32 bits, because nothing else is done
// until this is known: outputs times blocks, and a block's outputs squared / 8, are below 2^32.
struct Share {
  uint32_t first, count, tiles;
  __device__ Share(int outputs, int most) {
    const auto all = static_cast<uint32_t>(outputs);
    first = blockIdx.x * all / gridDim.x;
    count = (blockIdx.x + 1) * all / gridDim.x - first;
    tiles = (count + static_cast<uint32_t>(most) - 1) / static_cast<uint32_t>(most);
  }
  __device__ int Begin(uint32_t tile) const {
    return static_cast<int>(first + tile * count / tiles);
  }
};

// Eight numbers of a row of x, in BF16.
template <bool kFp8>
__device__ __forceinline__ uint4 LoadInputs(const GemmParams& p, int64_t at, int k, float* square) {
  if (p.residual == nullptr) {
    const uint4 pairs = *reinterpret_cast<const uint4*>(p.x + at);
    return kFp8 ? RaiseForFp8(pairs) : pairs;
  }
  const auto* x = reinterpret_cast<const float4*>(p.residual + at);
  const auto* f = reinterpret_cast<const float4*>(p.norm_weight + k);
  const float4 x0 = x[0], x1 = x[1], f0 = __ldg(f), f1 = __ldg(f + 1);
  *square += x0.x * x0.x + x0.y * x0.y + x0.z * x0.z + x0.w * x0.w + x1.x * x1.x + x1.y * x1.y +
             x1.z * x1.z + x1.w * x1.w;
  const uint4 pairs =
      make_uint4(PackBf16(x0.x * f0.x, x0.y * f0.y), PackBf16(x0.z * f0.z, x0.w * f0.w),
                 PackBf16(x1.x * f1.x, x1.y * f1.y), PackBf16(x1.z * f1.z, x1.w * f1.w));
  return kFp8 ? RaiseForFp8(pairs) : pairs;
}

template <int kRows, GemmOutput kOut, WeightFormat kFormat>
__global__ void __launch_bounds__(kThreads + 32, 1) GemvKernel(const GemmParams p) {
  constexpr bool kPair = kOut == GemmOutput::kSiluMul;
  constexpr bool kFp8 = kFormat != WeightFormat::kBf16,
                 kBlocks = kFormat == WeightFormat::kFp8Blocks;
  constexpr int kWidth = kFp8 ? 1 : 2;               // bytes of a weight
  constexpr int kSpan = kRowBytes / kWidth;          // k of a stage
  constexpr int kPasses = kSpan / kSlices / kWarpK;  // a warp's share of a stage
  constexpr int kTileOutputs = kPair ? kTileRows / 2 : kTileRows;
  static_assert(kWarpRows == 8 && kRows * kTileOutputs <= kThreads);
  extern __shared__ __align__(128) unsigned char shared[];  // ring, then x [kRows, inputs]
  __shared__ uint64_t barriers[2 * kMaxStages];
  __shared__ float partial[2][kWarps][kWarpRows][kRows];  // of this tile and of the one before
  __shared__ float squares[kWarps][kRows];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const auto full = [&](int slot) { return SharedAddress(&barriers[slot]); };
  const auto empty = [&](int slot) { return SharedAddress(&barriers[kMaxStages + slot]); };
  if (thread == 0) {
    for (int slot = 0; slot < p.stages; ++slot) {
      BarrierInit(full(slot), FullArrivals());
      BarrierInit(empty(slot), kWarps);
    }
    BarrierInitFence();
  }
  __syncthreads();
  LetSuccessorStart();
  const Share share(p.outputs, kTileOutputs);
  const int stages = (p.inputs + kSpan - 1) / kSpan;  // of a tile
  int slot = 0;
  uint32_t parity = 0;
  const auto advance = [&] {
    if (++slot == p.stages) slot = 0, parity ^= 1;
  };

  if (warp == kWarps) {
    const int64_t pitch = int64_t{p.inputs} * kWidth;
    bool first_round = true;
    for (uint32_t tile = 0; tile < share.tiles; ++tile) {
      const int first = share.Begin(tile), height = share.Begin(tile + 1) - first;
      for (int s = 0; s < stages; ++s) {
        if (!first_round) BarrierWait(empty(slot), parity ^ 1);
        const int k = s * kSpan, bytes = min(kRowBytes, (p.inputs - k) * kWidth);
        const int rows = kPair ? 2 * height : height;
        const StageFill fill(full(slot), static_cast<uint32_t>(bytes * rows), lane);
        const uint32_t stage = SharedAddress(shared) + static_cast<uint32_t>(slot * kStageBytes);
#pragma unroll
        for (int half = 0; half < (kPair ? 2 : 1); ++half) {
          uint32_t to = stage + static_cast<uint32_t>(half * (kWarpRows * kRowBytes));
          const unsigned char* from =
              p.w + (int64_t{half} * p.outputs + first) * pitch + int64_t{k} * kWidth;
#pragma unroll 4
          for (int r = 0; r < height; ++r, to += kRowBytes, from += pitch) {
            fill.CopyOnce(to, from, static_cast<uint32_t>(bytes));
          }
        }
        fill.End();
        advance();
        if (slot == 0) first_round = false;
      }
    }
    return;
  }

  auto* const x_rows = reinterpret_cast<uint16_t*>(shared + p.stages * kStageBytes);
  WaitForPredecessor();
#pragma unroll
  for (int n = 0; n < kRows; ++n) {
    float square = 0.0f;
    for (int k = thread * kLaneK; k < p.inputs; k += kThreads * kLaneK) {
      *reinterpret_cast<uint4*>(x_rows + n * p.inputs + k) =
          LoadInputs<kFp8>(p, int64_t{n} * p.inputs + k, k, &square);
    }
    if (p.residual == nullptr) continue;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) square += __shfl_xor_sync(~0u, square, step);
    if (lane == 0) squares[warp][n] = square;
  }
  NamedSync(1, kThreads);

  const int slice = warp % kSlices, half = warp / kSlices;
  int buffer = 0;
  for (uint32_t tile = 0; tile < share.tiles; ++tile, buffer ^= 1) {
    const int first = share.Begin(tile), height = share.Begin(tile + 1) - first;
    // One thread an output and row of x; what it adds to is asked for early.
    const int out_row = thread % kTileOutputs, n_out = thread / kTileOutputs;
    const int m = first + out_row;
    const bool writes = n_out < kRows && out_row < height;
    const int64_t out_at = int64_t{n_out} * p.out_stride + m;
    [[maybe_unused]] float before = 0.0f;
    if (writes && !kPair) {
      if (p.bias != nullptr) before = p.bias[m];
      if constexpr (kOut == GemmOutput::kAdd) before += static_cast<const float*>(p.out)[out_at];
    }
    float sums[kRows][kWarpRows] = {};
    for (int s = 0; s < stages; ++s) {
      const int k_of_warp = slice * (kPasses * kWarpK) + lane * kLaneK;
      const int first_k = s * kSpan + k_of_warp;
      [[maybe_unused]] float scales[kPasses][kWarpRows];
      if constexpr (kBlocks) {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          const int block = min((first_k + pass * kWarpK) / kScaleInputs, p.scale_columns - 1);
#pragma unroll
          for (int r = 0; r < kWarpRows; ++r) {
            const int row = first + min(kPair ? r : half * kWarpRows + r, height - 1) +
                            (kPair ? half * p.outputs : 0);
            scales[pass][r] =
                __ldg(p.scales + int64_t{row / p.scale_rows} * p.scale_columns + block);
          }
        }
      }
      BarrierWait(full(slot), parity);
      const unsigned char* at =
          shared + slot * kStageBytes + half * (kWarpRows * kRowBytes) + k_of_warp * kWidth;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int k = first_k + pass * kWarpK;
        if (k >= p.inputs) break;  // nothing was copied there
        float x[kRows][kLaneK];
#pragma unroll
        for (int n = 0; n < kRows; ++n) {
          Unpack(*reinterpret_cast<const uint4*>(x_rows + n * p.inputs + k), x[n]);
        }
        // Rows that a lower tile has not are multiplied too, whatever lies in their place, and
        // their sums not read: a branch per row costs more than that (FP8 8 %).
#pragma unroll
        for (int r = 0; r < kWarpRows; ++r) {
          float w[kLaneK];
          LoadWeights<kFp8>(at + r * kRowBytes + pass * (kWarpK * kWidth), w);
#pragma unroll
          for (int n = 0; n < kRows; ++n) {
            float sum = kBlocks ? 0.0f : sums[n][r];
#pragma unroll
            for (int i = 0; i < kLaneK; ++i) sum = fmaf(w[i], x[n][i], sum);
            sums[n][r] = kBlocks ? fmaf(scales[pass][r], sum, sums[n][r]) : sum;
          }
        }
      }
      __syncwarp();
      if (lane == 0) BarrierArrive(empty(slot));
      advance();
    }
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const float sum = SumOfLanes(sums[n], lane);
      if (lane % 4 == 0) partial[buffer][warp][lane / 4][n] = sum;
    }
    // Once a tile is enough: nobody writes these sums again before all have come here once more.
    NamedSync(1, kThreads);
    if (!writes) continue;
    const auto total = [&](int row) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kSlices; ++i) {
        sum += partial[buffer][row / kWarpRows * kSlices + i][row % kWarpRows][n_out];
      }
      return sum;
    };
    float factor = kFp8 ? kHalfOfFp8 : 1.0f;
    if (p.residual != nullptr) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) sum += squares[i][n_out];
      factor *= 1.0f / sqrtf(sum / static_cast<float>(p.inputs) + p.epsilon);
    }
    float value = total(out_row) * factor;
    if constexpr (kFormat == WeightFormat::kFp8Rows) value *= p.scales[m];
    if constexpr (kPair) {
      float up = total(kTileOutputs + out_row) * factor;
      if constexpr (kFormat == WeightFormat::kFp8Rows) up *= p.scales[p.outputs + m];
      static_cast<__nv_bfloat16*>(p.out)[out_at] = __float2bfloat16_rn(SiluMul(value, up));
    } else {
      static_cast<float*>(p.out)[out_at] = value + before;
    }
  }
}

template <int kRows, WeightFormat kFormat>
const void* KernelFor(GemmOutput output) {
  switch (output) {
    case GemmOutput::kFloat:
      return reinterpret_cast<const void*>(&GemvKernel<kRows, GemmOutput::kFloat, kFormat>);
    case GemmOutput::kAdd:
      return reinterpret_cast<const void*>(&GemvKernel<kRows, GemmOutput::kAdd, kFormat>);
    case GemmOutput::kSiluMul:
      return reinterpret_cast<const void*>(&GemvKernel<kRows, GemmOutput::kSiluMul, kFormat>);
  }
  return nullptr;
}

const void* KernelFor(const GemmArguments& args) {
  switch (FormatOf(args.matrix)) {
    case WeightFormat::kBf16:
      return args.rows == 1 ? KernelFor<1, WeightFormat::kBf16>(args.output)
                            : KernelFor<2, WeightFormat::kBf16>(args.output);
    case WeightFormat::kFp8Rows:
      return KernelFor<1, WeightFormat::kFp8Rows>(args.output);
    case WeightFormat::kFp8Blocks:
      return KernelFor<1, WeightFormat::kFp8Blocks>(args.output);
    case WeightFormat::kMxfp4:
      break;
  }
  return nullptr;
}

int64_t InputBytes(int inputs, int rows) { return int64_t{rows} * inputs * 2; }

// Stages of the ring that there is room for beside x.
int StagesFor(const DeviceLimits& limits, int inputs, int rows) {
  constexpr int kStatic = 3072;  // barriers, sums and squares
  const int64_t room = limits.shared_per_block - kStatic - InputBytes(inputs, rows);
  return static_cast<int>(std::min<int64_t>(kMaxStages, room / kStageBytes));
}

}  // namespace

bool FitsGemv(const DeviceMatrix& matrix, int rows) {
  if (matrix.is_mxfp4() || rows < 1 || rows > GemvRows(matrix.is_fp8()) ||
      !FitsGemmKernels(matrix.inputs, matrix.is_fp8())) {
    return false;
  }
  const auto limits = CurrentDeviceLimits();
  return limits.has_value() && StagesFor(*limits, matrix.inputs, rows) >= kMinStages;
}

Status LaunchGemv(const GemmArguments& args, Stream stream) {
  const DeviceMatrix& matrix = args.matrix;
  if (args.outputs() < 1 || !FitsGemv(matrix, args.rows)) {
    return InvalidArgument(
        "a product by gemv takes one row, or two in BF16, that fit shared memory, and inputs in "
        "multiples of 32, of 128 in FP8");
  }
  OSCAR_ASSIGN_OR_RETURN(const DeviceLimits limits, CurrentDeviceLimits());
  GemmParams params = ParamsOf(args);
  params.stages = StagesFor(limits, matrix.inputs, args.rows);
  const void* kernel = KernelFor(args);
  const int shared_bytes =
      params.stages * kStageBytes + static_cast<int>(InputBytes(matrix.inputs, args.rows));
  OSCAR_RETURN_IF_ERROR(CudaStatus(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
      "preparing a product"));
  void* kernel_args[] = {&params};
  return LaunchOverlapping(
      kernel, {std::min(args.outputs(), limits.multiprocessors), kThreads + 32, shared_bytes},
      kernel_args, stream, "launching a product");
}

}  // namespace oscar::cuda
