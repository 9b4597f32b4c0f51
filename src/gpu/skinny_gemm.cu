// out[n, m] = sum_k w[m, k] x[n, k] for n <= 16 on tensor cores, weights straight from memory.
//
// Grid       one block of 8 warps a 16 weight rows (32 where n > 8, or a gate and an up tile).
// Operands   m16n8k16 with the weights as A. The sum over k may run in any order, so a lane's
//            16-byte load, 8 consecutive k of a row, serves as its operands of two steps; x is
//            loaded the same way as B. Nothing is shuffled and no weight goes through shared
//            memory.
// Order      a warp takes spans of 128 k, every eighth; warps are added in order at the end. The
//            same for every n and tile, so a row's bits do not depend on the batch.
// Latency    the next span is loaded while the current one is multiplied; the first is loaded
// before
//            waiting for the kernel that writes x (programmatic dependent launch).
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

template <int kNTiles, int kRTiles, ProductOutput kOut>
__global__ void __launch_bounds__(kWarps * 32, 2) SkinnyKernel(const Params p) {
  constexpr int kChunks = kSpanChunks / kRTiles;  // loaded together
  constexpr bool kPair = kOut == ProductOutput::kSiluMul;
  __shared__ float partial[kWarps][kRTiles * 16][kNTiles * 8 + 1];
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
  uint4 a[kRTiles][2][kChunks];
  const auto load = [&](int j) {
    const int chunk = first_chunk(j);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int r = 0; r < kRTiles; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          a[r][h][c] =
              chunk + c < chunks ? LoadWeights(w[r][h] + (chunk + c) * 32) : make_uint4(0, 0, 0, 0);
        }
      }
    }
  };
  if (steps > 0) load(0);
  cuda::WaitForPredecessor();

  float sums[kRTiles][kNTiles][4] = {};
  for (int j = 0; j < steps; ++j) {
    uint4 b[kNTiles][kChunks];
    const int chunk = first_chunk(j);
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      const int row = n * 8 + group;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        b[n][c] = row < p.rows && chunk + c < chunks
                      ? *reinterpret_cast<const uint4*>(p.x + int64_t{row} * p.inputs +
                                                        (chunk + c) * 32 + quad * 8)
                      : make_uint4(0, 0, 0, 0);
      }
    }
    uint4 now[kRTiles][2][kChunks];
#pragma unroll
    for (int r = 0; r < kRTiles; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) now[r][h][c] = a[r][h][c];
      }
    }
    if (j + 1 < steps) load(j + 1);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int r = 0; r < kRTiles; ++r) {
        const uint4 lo = now[r][0][c], hi = now[r][1][c];
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
          cuda::MmaBf16(sums[r][n], lo.x, hi.x, lo.y, hi.y, b[n][c].x, b[n][c].y);
          cuda::MmaBf16(sums[r][n], lo.z, hi.z, lo.w, hi.w, b[n][c].z, b[n][c].w);
        }
      }
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
    float value = total(row, n);
    if constexpr (kPair) {
      const float up = total(16 + row, n);
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
const void* Kernel(int rows, int* row_tiles) {
  if constexpr (kOut == ProductOutput::kSiluMul) {
    *row_tiles = 1;
    return rows <= 8 ? reinterpret_cast<const void*>(&SkinnyKernel<1, 2, kOut>)
                     : reinterpret_cast<const void*>(&SkinnyKernel<2, 2, kOut>);
  } else {
    *row_tiles = rows <= 8 ? 1 : 2;
    return rows <= 8 ? reinterpret_cast<const void*>(&SkinnyKernel<1, 1, kOut>)
                     : reinterpret_cast<const void*>(&SkinnyKernel<2, 2, kOut>);
  }
}

}  // namespace

Status LaunchSkinny(const SkinnyArguments& args, Stream stream) {
  if (args.rows < 1 || args.rows > kSkinnyRows || args.inputs % 32 != 0 || args.outputs < 1) {
    return InvalidArgument("a skinny product takes 1 to 16 rows and inputs in multiples of 32");
  }
  Params params{reinterpret_cast<const uint16_t*>(args.weights),
                reinterpret_cast<const uint16_t*>(args.x),
                args.out,
                args.bias,
                args.outputs,
                args.inputs,
                args.rows};
  int row_tiles = 1;
  const void* kernel = nullptr;
  switch (args.output) {
    case ProductOutput::kBf16:
      kernel = Kernel<ProductOutput::kBf16>(args.rows, &row_tiles);
      break;
    case ProductOutput::kFloat:
      kernel = Kernel<ProductOutput::kFloat>(args.rows, &row_tiles);
      break;
    case ProductOutput::kAdd:
      kernel = Kernel<ProductOutput::kAdd>(args.rows, &row_tiles);
      break;
    case ProductOutput::kSiluMul:
      kernel = Kernel<ProductOutput::kSiluMul>(args.rows, &row_tiles);
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
