// Norm and RoPE of one head of q or k: the one place of the device that knows them. Kernels differ
// in which of a row's dims a lane has, which a Layout says:
//
//   kRegs         registers of a row that a lane has
//   Dim(i, lane)  which dim register i is; registers i and i + kRegs / 2 are D / 2 dims apart
//   Sum(x)        over the lanes of the row
//
// RoPE turns pairs (d, d + half) of the first 2 half dims. Where that is the whole head, a pair is
// in one lane. Otherwise its other half may be in any lane, and `partner` reads it from where the
// row came from, which the warp has just read: L1.
#pragma once

#include <cstdint>

namespace oscar::cuda {

// A warp per row.
template <int kDim>
struct WarpLayout {
  static constexpr int kRegs = kDim / 32, kHalf = kDim / 2;
  static __device__ __forceinline__ int Dim(int i, int lane) { return lane + 32 * i; }
  static __device__ __forceinline__ float Sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
    return x;
  }
};

// Four lanes per row, in tensor-core A layout: register 4 s + 2 j + e is dim 16 s + 8 j + 2 lane +
// e.
template <int kDim>
struct QuadLayout {
  static constexpr int kRegs = kDim / 4, kHalf = kDim / 2;
  static __device__ __forceinline__ int Dim(int i, int quad) {
    return i / 4 * 16 + i / 2 % 2 * 8 + quad * 2 + i % 2;
  }
  static __device__ __forceinline__ float Sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
  }
};

// What a head's row is multiplied with in its norm, weights apart.
template <typename Layout>
__device__ __forceinline__ float NormFactor(const float (&x)[Layout::kRegs], float epsilon) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < Layout::kRegs; ++i) sum = fmaf(x[i], x[i], sum);
  return 1.0f / sqrtf(Layout::Sum(sum) * (0.5f / Layout::kHalf) + epsilon);
}

// Where RoPE finds the angle of a dim: pairs are counted from 0.
__device__ __forceinline__ int PairOf(int dim, int half) { return dim < half ? dim : dim - half; }

// `angle(i, pair)`: cosine and sine for register i. `partner(d)`: dim d of the row after its norm.
template <typename Layout, typename Angle, typename Partner>
__device__ __forceinline__ void Rope(float (&x)[Layout::kRegs], int lane, int half,
                                     const Angle& angle, const Partner& partner) {
  constexpr int kPairs = Layout::kRegs / 2;
  if (half == Layout::kHalf) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 cs = angle(i, Layout::Dim(i, lane));
      const float low = x[i], high = x[i + kPairs];
      x[i] = low * cs.x - high * cs.y;
      x[i + kPairs] = high * cs.x + low * cs.y;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < Layout::kRegs; ++i) {
    const int dim = Layout::Dim(i, lane);
    if (dim >= 2 * half) continue;
    const float2 cs = angle(i, PairOf(dim, half));
    const float mine = x[i];
    if (dim < half) {
      x[i] = mine * cs.x - partner(dim + half) * cs.y;
    } else {
      x[i] = mine * cs.x + partner(dim - half) * cs.y;
    }
  }
}

// Butterflies of a Hadamard of blocks of `order` dims over a warp's row (WarpLayout), without its
// scale, in the CPU's order.
template <int kRegs>
__device__ __forceinline__ void HadamardButterflies(float (&x)[kRegs], int lane, int order) {
#pragma unroll
  for (int stride = 1; stride < 32; stride *= 2) {
    if (stride >= order) break;
#pragma unroll
    for (int r = 0; r < kRegs; ++r) {
      const float other = __shfl_xor_sync(~0u, x[r], stride);
      x[r] = (lane & stride) != 0 ? other - x[r] : x[r] + other;
    }
  }
#pragma unroll
  for (int stride = 1; stride < kRegs; stride *= 2) {
    if (32 * stride >= order) break;
#pragma unroll
    for (int r = 0; r < kRegs; ++r) {
      if ((r & stride) != 0) continue;
      const float a = x[r], b = x[r + stride];
      x[r] = a + b;
      x[r + stride] = a - b;
    }
  }
}

}  // namespace oscar::cuda
