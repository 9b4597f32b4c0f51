#include "cuda/device/launch.h"
#include "cuda/device/ptx.cuh"
#include "cuda/experts/shared_share.h"
#include "cuda/linear_attention/state_math.cuh"

namespace oscar::cuda {
namespace {

constexpr int kThreads = 256;

// A block per row.
__global__ void __launch_bounds__(kThreads)
    ShareKernel(const float* x, const float* share, float epsilon, uint16_t* gated, int hidden,
                int width) {
  __shared__ float squares[kThreads / 32], dots[kThreads / 32];
  LetSuccessorStart();
  WaitForPredecessor();
  const float* const row = x + int64_t{blockIdx.x} * hidden;
  float square = 0.0f, dot = 0.0f;
  for (int i = static_cast<int>(threadIdx.x) * 4; i < hidden; i += kThreads * 4) {
    const float4 a = *reinterpret_cast<const float4*>(row + i);
    const float4 b = *reinterpret_cast<const float4*>(share + i);
    square += a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w;
    dot += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    square += __shfl_xor_sync(~0u, square, offset);
    dot += __shfl_xor_sync(~0u, dot, offset);
  }
  if (threadIdx.x % 32 == 0) {
    squares[threadIdx.x / 32] = square;
    dots[threadIdx.x / 32] = dot;
  }
  __syncthreads();
  square = dot = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) {
    square += squares[i];
    dot += dots[i];
  }
  const float factor = SigmoidOf(dot / sqrtf(square / static_cast<float>(hidden) + epsilon));
  uint16_t* const out = gated + int64_t{blockIdx.x} * width;
  for (int i = static_cast<int>(threadIdx.x) * 4; i < width; i += kThreads * 4) {
    const uint2 four = *reinterpret_cast<const uint2*>(out + i);
    *reinterpret_cast<uint2*>(out + i) = {
        PackBf16(Bf16Low(four.x) * factor, Bf16High(four.x) * factor),
        PackBf16(Bf16Low(four.y) * factor, Bf16High(four.y) * factor)};
  }
}

}  // namespace

Status LaunchSharedShare(const float* x, const float* share, float epsilon, Bf16* gated, int rows,
                         int hidden, int width, Stream stream) {
  auto* out = reinterpret_cast<uint16_t*>(gated);
  void* args[] = {&x, &share, &epsilon, &out, &hidden, &width};
  return LaunchOverlapping(reinterpret_cast<const void*>(&ShareKernel), {rows, kThreads}, args,
                           stream, "launching a shared expert's share");
}

}  // namespace oscar::cuda
