// What the product kernels have in common. Device code and what launches it.
#pragma once

#include "base/fp8.h"
#include "cuda/device/ptx.cuh"
#include "cuda/gemm/gemm_arguments.h"

namespace oscar::cuda {

// FP8: what a scale is for. MXFP4 is of experts alone (experts/).
enum class WeightFormat { kBf16, kFp8Rows, kFp8Blocks, kMxfp4 };

inline WeightFormat FormatOf(const DeviceMatrix& matrix) {
  if (matrix.is_mxfp4()) return WeightFormat::kMxfp4;
  if (!matrix.is_fp8()) return WeightFormat::kBf16;
  return matrix.scale_columns == 1 ? WeightFormat::kFp8Rows : WeightFormat::kFp8Blocks;
}

struct GemmParams {
  const unsigned char* w;
  const float* scales;
  int scale_rows, scale_columns;
  const uint16_t* x;
  const float* residual;  // null: x
  const float* norm_weight;
  float epsilon;
  void* out;
  const float* bias;
  int outputs, inputs, rows, out_stride;
  int stages;  // of the ring, where kernels leave it to the launch
};

inline GemmParams ParamsOf(const GemmArguments& args) {
  const DeviceMatrix& matrix = args.matrix;
  GemmParams params{};
  params.w = matrix.is_fp8() ? reinterpret_cast<const unsigned char*>(matrix.codes)
                             : reinterpret_cast<const unsigned char*>(matrix.weights);
  params.scales = matrix.scales;
  params.scale_rows = matrix.scale_rows;
  params.scale_columns = matrix.scale_columns;
  params.x = reinterpret_cast<const uint16_t*>(args.x);
  params.residual = args.residual;
  params.norm_weight = args.norm_weight;
  params.epsilon = args.norm_epsilon;
  params.out = args.out;
  params.bias = args.bias;
  params.outputs = args.outputs();
  params.inputs = matrix.inputs;
  params.rows = args.rows;
  params.out_stride = args.out_stride;
  return params;
}

// FP8 words unpack to BF16 that is 2^120 too small (base/fp8.h). Half of the factor multiplies x
// before, the other half the sum after, all of it exact.
inline constexpr float kHalfOfFp8 = 0x1p60f;

__device__ __forceinline__ uint32_t RaiseForFp8(uint32_t pair) {
  constexpr uint32_t kFactor = 0x5d805d80u;  // 2^60, 2^60
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair),
                                         *reinterpret_cast<const __nv_bfloat162*>(&kFactor));
  return *reinterpret_cast<const uint32_t*>(&product);
}
__device__ __forceinline__ uint4 RaiseForFp8(const uint4& pairs) {
  return make_uint4(RaiseForFp8(pairs.x), RaiseForFp8(pairs.y), RaiseForFp8(pairs.z),
                    RaiseForFp8(pairs.w));
}

// Sixteen codes a lane of rows `lo` and `hi`: four steps.
template <int kNTiles>
__device__ __forceinline__ void MultiplyFp8(float (&sums)[kNTiles][4], const uint4& lo,
                                            const uint4& hi, const uint4 (&b)[kNTiles][2]) {
  const uint32_t lo_words[4] = {lo.x, lo.y, lo.z, lo.w}, hi_words[4] = {hi.x, hi.y, hi.z, hi.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t a0 = FirstPair(lo_words[i]), a1 = FirstPair(hi_words[i]);
    const uint32_t a2 = SecondPair(lo_words[i]), a3 = SecondPair(hi_words[i]);
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      const uint4& x = b[n][i / 2];
      MmaBf16(sums[n], a0, a1, a2, a3, i % 2 == 0 ? x.x : x.z, i % 2 == 0 ? x.y : x.w);
    }
  }
}

__device__ __forceinline__ float SiluMul(float gate, float up) {
  return gate / (1.0f + __expf(-gate)) * up;
}

}  // namespace oscar::cuda
