#include <algorithm>

#include "base/mxfp4.h"
#include "base/rng.h"
#include "cuda/device/cuda_status.h"
#include "cuda/device/launch.h"
#include "cuda/device/ptx.cuh"
#include "cuda/step_kernels.h"

namespace oscar::cuda {
namespace {

constexpr int kNormThreads = 512;
constexpr int kNormVectors = 8;  // float4 a thread
static_assert(kNormThreads * kNormVectors * 4 == kMaxNormWidth);

__device__ __forceinline__ uint2 PackBf16(float4 v) {
  const __nv_bfloat162 a = __floats2bfloat162_rn(v.x, v.y), b = __floats2bfloat162_rn(v.z, v.w);
  return {*reinterpret_cast<const uint32_t*>(&a), *reinterpret_cast<const uint32_t*>(&b)};
}

__device__ __forceinline__ float2 UnpackBf16(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

// One block a row; `hidden` is a multiple of 4.
__global__ void EmbedKernel(const int32_t* tokens, const int32_t* sampled, int num_sampled,
                            const uint16_t* table, float* x, int hidden, int vocab) {
  int token = tokens[blockIdx.x];
  if (token < 0) token = -1 - token < num_sampled ? sampled[-1 - token] : 0;
  const int64_t from = int64_t{token >= 0 && token < vocab ? token : 0} * hidden;
  for (int i = threadIdx.x * 4; i < hidden; i += blockDim.x * 4) {
    const uint2 pair = *reinterpret_cast<const uint2*>(table + from + i);
    const float2 a = UnpackBf16(pair.x), b = UnpackBf16(pair.y);
    *reinterpret_cast<float4*>(x + int64_t{blockIdx.x} * hidden + i) = {a.x, a.y, b.x, b.y};
  }
}

// One block a row. The row stays in registers between the sum and the scaling.
__global__ void __launch_bounds__(kNormThreads)
    NormKernel(const float* x, const float* weight, float epsilon, const int32_t* sources,
               uint16_t* out, int hidden) {
  LetSuccessorStart();
  __shared__ float sums[kNormThreads / 32];
  // Weights do not depend on the predecessor.
  float4 w[kNormVectors];
#pragma unroll
  for (int j = 0; j < kNormVectors; ++j) {
    const int i = (j * kNormThreads + static_cast<int>(threadIdx.x)) * 4;
    if (i < hidden) w[j] = *reinterpret_cast<const float4*>(weight + i);
  }
  WaitForPredecessor();
  const int64_t row = sources != nullptr ? sources[blockIdx.x] : static_cast<int>(blockIdx.x);
  const float* in = x + row * hidden;
  float4 v[kNormVectors];
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kNormVectors; ++j) {
    const int i = (j * kNormThreads + static_cast<int>(threadIdx.x)) * 4;
    v[j] = i < hidden ? *reinterpret_cast<const float4*>(in + i) : make_float4(0, 0, 0, 0);
    sum += v[j].x * v[j].x + v[j].y * v[j].y + v[j].z * v[j].z + v[j].w * v[j].w;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kNormThreads / 32; ++i) sum += sums[i];
  const float f = 1.0f / sqrtf(sum / static_cast<float>(hidden) + epsilon);
#pragma unroll
  for (int j = 0; j < kNormVectors; ++j) {
    const int i = (j * kNormThreads + static_cast<int>(threadIdx.x)) * 4;
    if (i >= hidden) continue;
    const float4 scaled{v[j].x * f * w[j].x, v[j].y * f * w[j].y, v[j].z * f * w[j].z,
                        v[j].w * f * w[j].w};
    *reinterpret_cast<uint2*>(out + int64_t{blockIdx.x} * hidden + i) = PackBf16(scaled);
  }
}

__device__ __forceinline__ float SiluMul(float gate, float up) {
  return gate / (1.0f + __expf(-gate)) * up;
}

// Four numbers a thread; `width` is a multiple of 4.
__global__ void SiluMulKernel(const float* gate_up, uint16_t* out, int64_t vectors, int width) {
  const int per_row = width / 4;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < vectors;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t row = i / per_row, column = i % per_row * 4;
    const float* at = gate_up + row * 2 * width + column;
    const float4 g = *reinterpret_cast<const float4*>(at);
    const float4 u = *reinterpret_cast<const float4*>(at + width);
    *reinterpret_cast<uint2*>(out + row * width + column) =
        PackBf16({SiluMul(g.x, u.x), SiluMul(g.y, u.y), SiluMul(g.z, u.z), SiluMul(g.w, u.w)});
  }
}

__global__ void AddBiasKernel(float* out, const float* bias, int64_t count, int width, int stride) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    out[i / width * stride + i % width] += bias[i % width];
  }
}

__global__ void ScatterKernel(const TableUpdate* updates, int count, int32_t* table) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) table[updates[i].index] = updates[i].value;
}

__global__ void RandomWeightsKernel(uint64_t seed, uint64_t stream, __nv_bfloat16* out,
                                    int64_t count) {
  const int64_t blocks = (count + 3) / 4;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < blocks;
       i += int64_t{gridDim.x} * blockDim.x) {
    const auto words = Philox(seed, stream).Block(static_cast<uint64_t>(i));
    for (int j = 0; j < 4 && i * 4 + j < count; ++j) {
      const uint32_t bits = words[static_cast<size_t>(j)];
      const int sum = static_cast<int>((bits & 255) + ((bits >> 8) & 255) + ((bits >> 16) & 255) +
                                       (bits >> 24));
      out[i * 4 + j] = __float2bfloat16_rn(static_cast<float>(sum - 510) * (0.02f / 147.8f));
    }
  }
}

// A thread per block of 32 weights; `out` is zero.
__global__ void RandomMxfp4Kernel(uint64_t seed, uint64_t stream, uint8_t scale, uint8_t* out,
                                  int rows, int inputs, int64_t row_bytes, bool alternates) {
  const int blocks = inputs / kMxfp4Block;
  const int64_t count = int64_t{rows} * blocks;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const auto row = static_cast<int>(i / blocks), block = static_cast<int>(i % blocks);
    int from = row;
    if (alternates) from = row < rows / 2 ? 2 * row : 2 * (row - rows / 2) + 1;
    const auto words =
        Philox(seed, stream).Block(static_cast<uint64_t>(int64_t{from} * blocks + block));
    uint8_t* const to = out + row * row_bytes;
    to[Mxfp4ScaleAt(block)] = scale;
    *reinterpret_cast<uint4*>(to + Mxfp4CodesAt(block)) = make_uint4(
        PackMxfp4(words[0]), PackMxfp4(words[1]), PackMxfp4(words[2]), PackMxfp4(words[3]));
  }
}

constexpr int kReadAhead = 8;

__global__ void ReadKernel(const uint4* data, int64_t vectors, uint32_t* sink) {
  uint32_t sum = 0;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + (kReadAhead - 1) * stride < vectors; i += kReadAhead * stride) {
    uint4 v[kReadAhead];
#pragma unroll
    for (int j = 0; j < kReadAhead; ++j) v[j] = __ldcs(data + i + j * stride);
#pragma unroll
    for (int j = 0; j < kReadAhead; ++j) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  for (; i < vectors; i += stride) sum += data[i].x;
  if (sum == 0x9e3779b9u && threadIdx.x == 2000) *sink = sum;  // no thread has that number
}

unsigned BlocksFor(int64_t items, int threads) {
  return static_cast<unsigned>(std::clamp<int64_t>((items + threads - 1) / threads, 1, 132 * 16));
}

}  // namespace

bool KernelsRunHere() {
  cudaFuncAttributes attributes;
  const bool runs = cudaFuncGetAttributes(&attributes, EmbedKernel) == cudaSuccess;
  cudaGetLastError();  // a failure here is an answer, not an error
  return runs;
}

Status LaunchEmbed(const int32_t* tokens, const int32_t* sampled, int num_sampled,
                   const Bf16* table, float* x, int rows, int hidden, int vocab, Stream stream) {
  EmbedKernel<<<static_cast<unsigned>(rows), 256, 0, stream>>>(
      tokens, sampled, num_sampled, reinterpret_cast<const uint16_t*>(table), x, hidden, vocab);
  return CudaStatus(cudaGetLastError(), "launching the embedding");
}

Status LaunchNorm(const float* x, const float* weight, float epsilon, const int32_t* sources,
                  Bf16* out, int rows, int hidden, Stream stream) {
  if (hidden % 4 != 0 || hidden > kMaxNormWidth) {
    return Unimplemented(
        "RMSNorm on the GPU takes hidden sizes that are multiples of 4, up to 16384");
  }
  void* args[] = {&x, &weight, &epsilon, &sources, &out, &hidden};
  return LaunchOverlapping(reinterpret_cast<const void*>(&NormKernel), {rows, kNormThreads}, args,
                           stream, "launching RMSNorm");
}

Status LaunchSiluMul(const float* gate_up, Bf16* out, int rows, int width, Stream stream) {
  const int64_t vectors = int64_t{rows} * width / 4;
  SiluMulKernel<<<BlocksFor(vectors, 256), 256, 0, stream>>>(
      gate_up, reinterpret_cast<uint16_t*>(out), vectors, width);
  return CudaStatus(cudaGetLastError(), "launching SiLU");
}

Status LaunchAddBias(float* out, const float* bias, int rows, int width, int stride,
                     Stream stream) {
  const int64_t count = int64_t{rows} * width;
  AddBiasKernel<<<BlocksFor(count, 256), 256, 0, stream>>>(out, bias, count, width, stride);
  return CudaStatus(cudaGetLastError(), "launching the bias");
}

Status LaunchScatter(const TableUpdate* updates, int count, int32_t* table, Stream stream) {
  if (count == 0) return {};
  ScatterKernel<<<static_cast<unsigned>((count + 255) / 256), 256, 0, stream>>>(updates, count,
                                                                                table);
  return CudaStatus(cudaGetLastError(), "launching the page-table update");
}

Status LaunchRead(const std::byte* data, int64_t bytes, uint32_t* sink, Stream stream) {
  ReadKernel<<<132 * 8, 256, 0, stream>>>(reinterpret_cast<const uint4*>(data), bytes / 16, sink);
  return CudaStatus(cudaGetLastError(), "launching the read");
}

Status LaunchRandomWeights(uint64_t seed, uint64_t stream_id, Bf16* out, int64_t count,
                           Stream stream) {
  RandomWeightsKernel<<<BlocksFor(count / 4, 256), 256, 0, stream>>>(
      seed, stream_id, reinterpret_cast<__nv_bfloat16*>(out), count);
  return CudaStatus(cudaGetLastError(), "sampled random weights");
}

Status LaunchRandomMxfp4(uint64_t seed, uint64_t stream_id, uint8_t scale, uint8_t* out, int rows,
                         int inputs, int64_t row_bytes, bool alternates, Stream stream) {
  OSCAR_RETURN_IF_ERROR(CudaStatus(
      cudaMemsetAsync(out, 0, static_cast<size_t>(rows * row_bytes), stream), "random weights"));
  const int64_t blocks = int64_t{rows} * (inputs / kMxfp4Block);
  RandomMxfp4Kernel<<<BlocksFor(blocks, 256), 256, 0, stream>>>(seed, stream_id, scale, out, rows,
                                                                inputs, row_bytes, alternates);
  return CudaStatus(cudaGetLastError(), "random weights");
}

}  // namespace oscar::cuda
