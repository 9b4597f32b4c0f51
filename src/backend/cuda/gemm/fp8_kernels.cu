#include <algorithm>

#include "base/fp8.h"
#include "cuda/device/cuda_status.h"
#include "cuda/device/launch.h"
#include "cuda/device/ptx.cuh"
#include "cuda/gemm/fp8_kernels.h"
#include "cuda/gemm/fp8_words.cuh"

namespace oscar::cuda {
namespace {

constexpr int kThreads = 256;

// One block for `tile_rows` rows x `columns` inputs with a scale, which is written for each
// `scale_rows` of the rows. All are multiples of 4 or inputs' ends.
__global__ void __launch_bounds__(kThreads)
    QuantizeKernel(const __nv_bfloat162* weights, uint32_t* codes, float* scales, int rows,
                   int inputs, int tile_rows, int columns, int scale_rows) {
  __shared__ float largest[kThreads / 32];
  const int tiles = (inputs + columns - 1) / columns;
  const int tile = static_cast<int>(blockIdx.x) % tiles, first_column = tile * columns;
  const int first_row = static_cast<int>(blockIdx.x) / tiles * tile_rows;
  const int words = min(columns, inputs - first_column) / 4;  // of a row of the tile
  const int count = words * min(tile_rows, rows - first_row);
  const auto word_at = [&](int i) {
    return (int64_t{first_row + i / words} * inputs + first_column) / 4 + i % words;
  };
  float most = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    const __nv_bfloat162* const in = weights + word_at(i) * 2;
    const float2 a = __bfloat1622float2(in[0]), b = __bfloat1622float2(in[1]);
    most = fmaxf(most, fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(b.x), fabsf(b.y))));
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
  }
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) most = fmaxf(most, largest[i]);
  const float scale = most > 0.0f ? __fdiv_rn(most, kF8E4M3Max) : 1.0f;
  const int copies = min(tile_rows, rows - first_row);
  for (int r = static_cast<int>(threadIdx.x) * scale_rows; r < copies; r += kThreads * scale_rows) {
    scales[int64_t{(first_row + r) / scale_rows} * tiles + tile] = scale;
  }
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    const __nv_bfloat162* const in = weights + word_at(i) * 2;
    const float2 a = __bfloat1622float2(in[0]), b = __bfloat1622float2(in[1]);
    const uint32_t bytes = static_cast<uint32_t>(ToF8E4M3(__fdiv_rn(a.x, scale))) |
                           static_cast<uint32_t>(ToF8E4M3(__fdiv_rn(a.y, scale))) << 8 |
                           static_cast<uint32_t>(ToF8E4M3(__fdiv_rn(b.x, scale))) << 16 |
                           static_cast<uint32_t>(ToF8E4M3(__fdiv_rn(b.y, scale))) << 24;
    codes[word_at(i)] = PackFp8(bytes);
  }
}

__device__ __forceinline__ uint32_t Times(uint32_t pair, float scale) {
  const uint32_t values = Unscaled(pair);
  const float2 x = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&values));
  const __nv_bfloat162 product = __floats2bfloat162_rn(x.x * scale, x.y * scale);
  return *reinterpret_cast<const uint32_t*>(&product);
}

// A block has a row at a time, a thread 8 inputs of it, within one block of scales: what a warp
// reads and what it writes has no gaps.
__global__ void __launch_bounds__(kThreads)
    MultiplyOutKernel(const DeviceMatrix matrix, uint4* out) {
  WaitForPredecessor();  // which may still read `out`
  LetSuccessorStart();
  const int per_row = matrix.inputs / 8;
  for (int row = static_cast<int>(blockIdx.x); row < matrix.outputs;
       row += static_cast<int>(gridDim.x)) {
    const float* scales = matrix.scales + int64_t{row / matrix.scale_rows} * matrix.scale_columns;
    const uint2* words = reinterpret_cast<const uint2*>(matrix.codes) + int64_t{row} * per_row;
    uint4* const to = out + int64_t{row} * per_row;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < per_row; i += kThreads) {
      const float scale = __ldg(scales + (matrix.scale_columns == 1 ? 0 : i * 8 / kScaleInputs));
      const uint2 w = __ldcs(words + i);
      to[i] = {Times(FirstPair(w.x), scale), Times(SecondPair(w.x), scale),
               Times(FirstPair(w.y), scale), Times(SecondPair(w.y), scale)};
    }
  }
}

}  // namespace

Status LaunchQuantize(const Bf16* weights, uint32_t* codes, float* scales, int rows, int inputs,
                      Stream stream) {
  QuantizeKernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
      reinterpret_cast<const __nv_bfloat162*>(weights), codes, scales, rows, inputs,
      /*tile_rows=*/1, /*columns=*/inputs, /*scale_rows=*/1);
  return CudaStatus(cudaGetLastError(), "quantising weights");
}

Status LaunchQuantizeBlocks(const Bf16* weights, const DeviceMatrix& to, int tile_rows,
                            Stream stream) {
  const int tiles = (to.outputs + tile_rows - 1) / tile_rows * to.scale_columns;
  QuantizeKernel<<<static_cast<unsigned>(tiles), kThreads, 0, stream>>>(
      reinterpret_cast<const __nv_bfloat162*>(weights), to.codes, to.scales, to.outputs, to.inputs,
      tile_rows, kScaleInputs, to.scale_rows);
  return CudaStatus(cudaGetLastError(), "quantising weights");
}

Status LaunchMultiplyOut(const DeviceMatrix& matrix, Bf16* out, Stream stream) {
  constexpr int kMaxBlocks = 132 * 16;
  DeviceMatrix from = matrix;
  uint4* to = reinterpret_cast<uint4*>(out);
  void* args[] = {&from, &to};
  return LaunchOverlapping(reinterpret_cast<const void*>(&MultiplyOutKernel),
                           {.blocks = std::min(matrix.outputs, kMaxBlocks), .threads = kThreads},
                           args, stream, "multiplying weights out");
}

}  // namespace oscar::cuda
