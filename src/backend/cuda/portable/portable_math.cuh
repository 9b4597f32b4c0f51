// The CPU's functions on the device, for files that are built without contraction.
#pragma once

namespace oscar::cuda {

// The fold of 16 lanes, which a warp holds twice, 8, 4, 2, 1 apart: in all lanes.
__device__ __forceinline__ float SumOfLanes16(float sum) {
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  return sum;
}

// Exp2 of simd/lanes16-inl.h.
__device__ __forceinline__ float CpuExp2(float x) {
  const float clamped = fmaxf(x, -126.0f);
  const float n = rintf(clamped), f = clamped - n;
  float p = 1.5403530393381608e-4f;
  p = fmaf(p, f, 1.3333558146428443e-3f);
  p = fmaf(p, f, 9.6181291076284772e-3f);
  p = fmaf(p, f, 5.5504108664821580e-2f);
  p = fmaf(p, f, 2.4022650695910071e-1f);
  p = fmaf(p, f, 6.9314718055994531e-1f);
  p = fmaf(p, f, 1.0f);
  const float scaled = __int_as_float(__float_as_int(p) + (static_cast<int>(n) << 23));
  return x >= -126.0f ? scaled : 0.0f;
}

}  // namespace oscar::cuda
