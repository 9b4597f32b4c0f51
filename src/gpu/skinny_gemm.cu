// out[n, m] = sum_k w[m, k] x[n, k] for n <= 16 on tensor cores, at the speed of reading w.
//
// Grid       two blocks an SM, each with its share of tiles of 16 weight rows (32 where n > 8, or a
//            gate and an up tile).
// Pipeline   a producer warp copies 32 KiB of a tile at a time into a ring of three stages (bulk
//            copies on mbarriers), eight consumer warps take an eighth of its k each. The producer
//            starts before the kernel that writes x has ended (programmatic dependent launch).
// Operands   m16n8k16 with the weights as A. The sum over k may run in any order, so a lane's
//            16-byte load, 8 consecutive k of a row, serves as its operands of two steps; x is
//            loaded the same way as B. Rows in shared memory are 64 bytes further apart than they
//            are long, which keeps those loads free of conflicts.
// Order      fixed by the tile, and warps are added in order at the end: a row's bits do not depend
// on
//            the other rows of the launch.
// Norm       for few rows x may be the fp32 residual stream: its RMSNorm is then a factor of the
//            result, because every block sees the whole row anyway.
// Bound      memory: 2 bytes of weights a product row and k.
#include "cuda/cuda_status.h"
#include "cuda/kernels/ptx.cuh"
#include "gpu/skinny_gemm.h"

namespace oscar::gpu {
namespace {

constexpr int kWarps = 8;              // consumers
constexpr int kTileBytes = 16 * 2048;  // of weights a stage
constexpr int kPad = 64;               // bytes between rows
// As many as let two blocks share an SM.
constexpr int StagesFor(int n_tiles) { return n_tiles == 1 ? 3 : 2; }

struct Params {
  const uint16_t* w;
  const uint16_t* x;
  const float* residual;
  const float* norm_weight;
  float epsilon;
  void* out;
  const float* bias;
  int outputs, inputs, rows;
};

__device__ __forceinline__ uint32_t Pack(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <int kNTiles, int kRTiles, bool kNorm, ProductOutput kOut>
__global__ void __launch_bounds__((kWarps + 1) * 32, 2) SkinnyKernel(const Params p) {
  constexpr bool kPair = kOut == ProductOutput::kSiluMul;
  constexpr int kRows = kRTiles * 16, kStages = StagesFor(kNTiles);
  constexpr int kRowBytes = kTileBytes / kRows, kPitch = kRowBytes + kPad;
  constexpr int kSpan = kRowBytes / 2;          // k of a stage
  constexpr int kChunks = kSpan / 32 / kWarps;  // of 32 k, a warp's share of a stage
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ uint64_t barriers[2 * kStages];
  __shared__ float partial[kWarps][kRows][kNTiles * 8];
  __shared__ float squares[kWarps][8];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const auto full = [&](int slot) { return cuda::SharedAddress(&barriers[slot]); };
  const auto empty = [&](int slot) { return cuda::SharedAddress(&barriers[kStages + slot]); };
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kStages; ++slot) {
      cuda::BarrierInit(full(slot), cuda::FullArrivals());
      cuda::BarrierInit(empty(slot), kWarps);
    }
    cuda::BarrierInitFence();
  }
  __syncthreads();
  cuda::LetSuccessorStart();
  const int tile_rows = kPair ? 16 : kRows;  // of the output
  const int tiles = (p.outputs + tile_rows - 1) / tile_rows;
  const int total_rows = kPair ? 2 * p.outputs : p.outputs;
  const int stages = (p.inputs + kSpan - 1) / kSpan, chunks = p.inputs / 32;

  if (warp == kWarps) {
    int step = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      for (int s = 0; s < stages; ++s, ++step) {
        const int slot = step % kStages, round = step / kStages;
        if (round > 0) cuda::BarrierWait(empty(slot), (round - 1) & 1);
        const int k = s * kSpan, bytes = min(kRowBytes, (p.inputs - k) * 2);
        const cuda::StageFill fill(full(slot), static_cast<uint32_t>(bytes * kRows), lane);
        const uint32_t to =
            cuda::SharedAddress(ring) + static_cast<uint32_t>(slot * kRows * kPitch);
        for (int r = 0; r < kRows; ++r) {
          const int row = tile * tile_rows + (kPair && r >= 16 ? p.outputs + r - 16 : r);
          fill.Copy(to + static_cast<uint32_t>(r * kPitch),
                    p.w + int64_t{min(row, total_rows - 1)} * p.inputs + k,
                    static_cast<uint32_t>(bytes));
        }
        fill.End();
      }
    }
    return;
  }

  cuda::WaitForPredecessor();
  float square = 0.0f;
  bool count_squares = true;  // on the first tile
  const auto inputs_at = [&](int n, int chunk) {
    const int row = n * 8 + group;
    if (row >= p.rows || chunk >= chunks) return make_uint4(0, 0, 0, 0);
    const int k = chunk * 32 + quad * 8;
    if constexpr (!kNorm) {
      return *reinterpret_cast<const uint4*>(p.x + int64_t{row} * p.inputs + k);
    } else {
      const auto* x = reinterpret_cast<const float4*>(p.residual + int64_t{row} * p.inputs + k);
      const auto* f = reinterpret_cast<const float4*>(p.norm_weight + k);
      const float4 x0 = x[0], x1 = x[1], f0 = __ldg(f), f1 = __ldg(f + 1);
      if (count_squares) {
        square += x0.x * x0.x + x0.y * x0.y + x0.z * x0.z + x0.w * x0.w + x1.x * x1.x +
                  x1.y * x1.y + x1.z * x1.z + x1.w * x1.w;
      }
      return make_uint4(Pack(x0.x * f0.x, x0.y * f0.y), Pack(x0.z * f0.z, x0.w * f0.w),
                        Pack(x1.x * f1.x, x1.y * f1.y), Pack(x1.z * f1.z, x1.w * f1.w));
    }
  };
  int step = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float sums[kRTiles][kNTiles][4] = {};
    for (int s = 0; s < stages; ++s, ++step) {
      const int slot = step % kStages, first = s * (kSpan / 32) + warp * kChunks;
      uint4 b[kChunks][kNTiles];
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) b[c][n] = inputs_at(n, first + c);
      }
      cuda::BarrierWait(full(slot), (step / kStages) & 1);
      const unsigned char* at =
          ring + slot * kRows * kPitch + group * kPitch + warp * kChunks * 64 + quad * 16;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (first + c >= chunks) break;  // nothing was copied there
#pragma unroll
        for (int r = 0; r < kRTiles; ++r) {
          const uint4 lo = *reinterpret_cast<const uint4*>(at + r * 16 * kPitch + c * 64);
          const uint4 hi = *reinterpret_cast<const uint4*>(at + (r * 16 + 8) * kPitch + c * 64);
#pragma unroll
          for (int n = 0; n < kNTiles; ++n) {
            cuda::MmaBf16(sums[r][n], lo.x, hi.x, lo.y, hi.y, b[c][n].x, b[c][n].y);
            cuda::MmaBf16(sums[r][n], lo.z, hi.z, lo.w, hi.w, b[c][n].z, b[c][n].w);
          }
        }
      }
      __syncwarp();
      if (lane == 0) cuda::BarrierArrive(empty(slot));
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
    if constexpr (kNorm) {
      if (count_squares) {
        square += __shfl_xor_sync(~0u, square, 1);
        square += __shfl_xor_sync(~0u, square, 2);
        if (quad == 0) squares[warp][group] = square;
        count_squares = false;
      }
    }
    cuda::NamedSync(1, kWarps * 32);
    const auto total = [&](int row, int n) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) sum += partial[i][row][n];
      return sum;
    };
    constexpr int kOutRows = kPair ? 16 : kRows;
    for (int i = threadIdx.x; i < kOutRows * kNTiles * 8; i += kWarps * 32) {
      const int row = i % kOutRows, n = i / kOutRows, m = tile * tile_rows + row;
      if (n >= p.rows || m >= p.outputs) continue;
      float factor = 1.0f;
      if constexpr (kNorm) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kWarps; ++j) sum += squares[j][n];
        factor = 1.0f / sqrtf(sum / static_cast<float>(p.inputs) + p.epsilon);
      }
      float value = total(row, n) * factor;
      if constexpr (kPair) {
        const float up = total(16 + row, n) * factor;
        value = value / (1.0f + __expf(-value)) * up;
      } else if (p.bias != nullptr) {
        value += p.bias[m];
      }
      const int64_t at = int64_t{n} * p.outputs + m;
      if constexpr (kOut == ProductOutput::kAdd) {
        static_cast<float*>(p.out)[at] += value;
      } else if constexpr (kOut == ProductOutput::kFloat) {
        static_cast<float*>(p.out)[at] = value;
      } else {
        static_cast<__nv_bfloat16*>(p.out)[at] = __float2bfloat16_rn(value);
      }
    }
    cuda::NamedSync(1, kWarps * 32);  // before the sums are overwritten
  }
}

// Which kernel, how many weight rows its tiles have and what shared memory it takes.
struct Choice {
  const void* kernel;
  int tile_rows, shared_bytes;
};

template <int kNTiles, int kRTiles, bool kNorm, ProductOutput kOut>
Choice Make() {
  constexpr int kRows = kRTiles * 16;
  return {reinterpret_cast<const void*>(&SkinnyKernel<kNTiles, kRTiles, kNorm, kOut>),
          kOut == ProductOutput::kSiluMul ? 16 : kRows,
          StagesFor(kNTiles) * (kTileBytes + kRows * kPad)};
}

template <ProductOutput kOut>
Choice Choose(int rows, bool norm, bool invariant) {
  constexpr int kFew = kOut == ProductOutput::kSiluMul ? 2 : 1;  // tiles where rows are few
  if (rows > 8 || invariant) return Make<2, 2, false, kOut>();
  if constexpr (kOut != ProductOutput::kAdd) {
    if (norm) return Make<1, kFew, true, kOut>();
  }
  return Make<1, kFew, false, kOut>();
}

}  // namespace

Status LaunchSkinny(const SkinnyArguments& args, Stream stream) {
  const bool norm = args.residual != nullptr;
  if (args.rows < 1 || args.rows > (norm ? kNormedRows : kSkinnyRows) || args.inputs % 32 != 0 ||
      args.outputs < 1 || (norm && args.output == ProductOutput::kAdd)) {
    return InvalidArgument(
        "a skinny product takes 1 to 16 rows (4 with its norm) and inputs in "
        "multiples of 32");
  }
  Params params{reinterpret_cast<const uint16_t*>(args.weights),
                reinterpret_cast<const uint16_t*>(args.x),
                args.residual,
                args.norm_weight,
                args.norm_epsilon,
                args.out,
                args.bias,
                args.outputs,
                args.inputs,
                args.rows};
  Choice choice{};
  switch (args.output) {
    case ProductOutput::kBf16:
      choice = Choose<ProductOutput::kBf16>(args.rows, norm, args.invariant);
      break;
    case ProductOutput::kFloat:
      choice = Choose<ProductOutput::kFloat>(args.rows, norm, args.invariant);
      break;
    case ProductOutput::kAdd:
      choice = Choose<ProductOutput::kAdd>(args.rows, norm, args.invariant);
      break;
    case ProductOutput::kSiluMul:
      choice = Choose<ProductOutput::kSiluMul>(args.rows, norm, args.invariant);
      break;
  }
  int device = 0, multiprocessors = 0;
  OSCAR_RETURN_IF_ERROR(cuda::CudaStatus(cudaGetDevice(&device), "finding the device"));
  OSCAR_RETURN_IF_ERROR(cuda::CudaStatus(
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
      "reading the device's limits"));
  OSCAR_RETURN_IF_ERROR(cuda::CudaStatus(
      cudaFuncSetAttribute(choice.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           choice.shared_bytes),
      "preparing a skinny product"));
  const int tiles = (args.outputs + choice.tile_rows - 1) / choice.tile_rows;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>(tiles < 2 * multiprocessors ? tiles : 2 * multiprocessors));
  config.blockDim = dim3((kWarps + 1) * 32);
  config.dynamicSmemBytes = static_cast<size_t>(choice.shared_bytes);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  void* kernel_args[] = {&params};
  return cuda::CudaStatus(cudaLaunchKernelExC(&config, choice.kernel, kernel_args),
                          "launching a skinny product");
}

}  // namespace oscar::gpu
