// out[n, m] = sum_k w[m, k] x[n, k] for n <= 16 on tensor cores, weights straight from memory.
//
// Grid       one block of 8 warps a 16 weight rows (32 where n > 8, or a gate and an up tile);
// three
//            blocks an SM, so that the projections of common models are one wave.
// Operands   m16n8k16 with the weights as A. The sum over k may run in any order, so a lane's
//            16-byte load, 8 consecutive k of a row, serves as its operands of two steps; x is
//            loaded the same way as B. Nothing is shuffled and no weight goes through shared
//            memory.
// Order      a warp takes spans of 128 k, every eighth; warps are added in order at the end. The
//            same for every n and tile, so a row's bits do not depend on the batch.
// Latency    as soon as a chunk's registers are used, the same chunk of the next span is loaded
// into
//            them; the first span is loaded before waiting for the kernel that writes x
//            (programmatic dependent launch).
// Norm       for few rows x may be the fp32 residual stream: its RMSNorm is then a factor of the
//            result, because every block sees the whole row anyway.
// Bound      memory: 2 bytes of weights a product row and k.
#include "cuda/cuda_status.h"
#include "cuda/kernels/ptx.cuh"
#include "gpu/skinny_gemm.h"

namespace oscar::gpu {
namespace {

constexpr int kWarps = 8;
constexpr int kSpanChunks = 4;  // of 32 k

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

__device__ __forceinline__ uint4 LoadWeights(const uint16_t* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ __forceinline__ uint32_t Pack(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <int kNTiles, int kRTiles, bool kNorm, ProductOutput kOut>
__global__ void __launch_bounds__(kWarps * 32, kNTiles == 1 ? 3 : 2) SkinnyKernel(const Params p) {
  constexpr int kChunks = kSpanChunks / kRTiles;  // loaded together
  constexpr bool kPair = kOut == ProductOutput::kSiluMul;
  __shared__ float partial[kWarps][kRTiles * 16][kNTiles * 8 + 1];
  __shared__ float squares[kWarps][8];
  cuda::LetSuccessorStart();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int tile_row = blockIdx.x * 16 * (kPair ? 1 : kRTiles);
  const int total_rows = kPair ? 2 * p.outputs : p.outputs;

  const uint16_t* w[kRTiles][2];
#pragma unroll
  for (int r = 0; r < kRTiles; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = tile_row + (kPair ? r * p.outputs : r * 16) + h * 8 + group;
      w[r][h] = p.w + int64_t{min(row, total_rows - 1)} * p.inputs + quad * 8;
    }
  }
  const int chunks = p.inputs / 32;
  // Step j of this warp: span warp + 8 (j / kRTiles), part j % kRTiles of it.
  const auto first_chunk = [&](int j) {
    return (warp + kWarps * (j / kRTiles)) * kSpanChunks + j % kRTiles * kChunks;
  };
  const int spans = (chunks + kSpanChunks - 1) / kSpanChunks;
  const int steps = warp < spans ? ((spans - warp + kWarps - 1) / kWarps) * kRTiles : 0;
  uint4 a[kChunks][kRTiles][2];
  const auto load = [&](int c, int chunk) {
#pragma unroll
    for (int r = 0; r < kRTiles; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        a[c][r][h] = chunk < chunks ? LoadWeights(w[r][h] + chunk * 32) : make_uint4(0, 0, 0, 0);
      }
    }
  };
  if (steps > 0) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) load(c, first_chunk(0) + c);
  }
  cuda::WaitForPredecessor();

  float square = 0.0f;
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
      square += x0.x * x0.x + x0.y * x0.y + x0.z * x0.z + x0.w * x0.w + x1.x * x1.x + x1.y * x1.y +
                x1.z * x1.z + x1.w * x1.w;
      return make_uint4(Pack(x0.x * f0.x, x0.y * f0.y), Pack(x0.z * f0.z, x0.w * f0.w),
                        Pack(x1.x * f1.x, x1.y * f1.y), Pack(x1.z * f1.z, x1.w * f1.w));
    }
  };
  float sums[kRTiles][kNTiles][4] = {};
  for (int j = 0; j < steps; ++j) {
    const int chunk = first_chunk(j);
    const int next = j + 1 < steps ? first_chunk(j + 1) : chunks;  // beyond the end: zeros
    uint4 b[kChunks][kNTiles];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) b[c][n] = inputs_at(n, chunk + c);
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int r = 0; r < kRTiles; ++r) {
        const uint4 lo = a[c][r][0], hi = a[c][r][1];
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
          cuda::MmaBf16(sums[r][n], lo.x, hi.x, lo.y, hi.y, b[c][n].x, b[c][n].y);
          cuda::MmaBf16(sums[r][n], lo.z, hi.z, lo.w, hi.w, b[c][n].z, b[c][n].w);
        }
      }
      load(c, next + c);
    }
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
    square += __shfl_xor_sync(~0u, square, 1);
    square += __shfl_xor_sync(~0u, square, 2);
    if (quad == 0) squares[warp][group] = square;
  }
  __syncthreads();
  const auto total = [&](int row, int n) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += partial[i][row][n];
    return sum;
  };
  constexpr int kOutRows = kPair ? 16 : kRTiles * 16;
  for (int i = threadIdx.x; i < kOutRows * kNTiles * 8; i += kWarps * 32) {
    const int row = i % kOutRows, n = i / kOutRows, m = tile_row + row;
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
}

template <ProductOutput kOut>
const void* Kernel(int rows, bool norm, int* row_tiles) {
  constexpr int kFew = kOut == ProductOutput::kSiluMul ? 2 : 1;  // tiles of a block of few rows
  *row_tiles = kOut == ProductOutput::kSiluMul || rows <= 8 ? 1 : 2;
  if (rows > 8) return reinterpret_cast<const void*>(&SkinnyKernel<2, 2, false, kOut>);
  if constexpr (kOut != ProductOutput::kAdd) {
    if (norm) return reinterpret_cast<const void*>(&SkinnyKernel<1, kFew, true, kOut>);
  }
  return reinterpret_cast<const void*>(&SkinnyKernel<1, kFew, false, kOut>);
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
  int row_tiles = 1;
  const void* kernel = nullptr;
  switch (args.output) {
    case ProductOutput::kBf16:
      kernel = Kernel<ProductOutput::kBf16>(args.rows, norm, &row_tiles);
      break;
    case ProductOutput::kFloat:
      kernel = Kernel<ProductOutput::kFloat>(args.rows, norm, &row_tiles);
      break;
    case ProductOutput::kAdd:
      kernel = Kernel<ProductOutput::kAdd>(args.rows, norm, &row_tiles);
      break;
    case ProductOutput::kSiluMul:
      kernel = Kernel<ProductOutput::kSiluMul>(args.rows, norm, &row_tiles);
      break;
  }
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>((args.outputs + 16 * row_tiles - 1) / (16 * row_tiles)));
  config.blockDim = dim3(kWarps * 32);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  void* kernel_args[] = {&params};
  return cuda::CudaStatus(cudaLaunchKernelExC(&config, kernel, kernel_args),
                          "launching a skinny product");
}

}  // namespace oscar::gpu
