// What the grouped kernels share. Device code and what launches it.
#pragma once

#include "cuda/experts/grouped_gemm.h"
#include "cuda/gemm/gemm_kernels.cuh"

namespace oscar::cuda {

struct GroupedParams {
  const unsigned char* w;
  const float* scales;
  int scale_rows, scale_columns;
  const uint16_t* x;
  const int32_t* x_rows;
  const ExpertTile* tiles;
  const int32_t* num_tiles;
  void* out;
  int outputs, inputs, out_stride;
  int matrix_rows;  // of an expert
  int stages;       // of the ring, where kernels leave it to the launch
  float factor;     // of what is written in BF16: 1 or 2^60
};

inline GroupedParams ParamsOf(const GroupedGemm& args) {
  const DeviceMatrix& matrix = args.matrix;
  GroupedParams params{};
  params.w = matrix.is_fp8() ? reinterpret_cast<const unsigned char*>(matrix.codes)
                             : reinterpret_cast<const unsigned char*>(matrix.weights);
  params.scales = matrix.scales;
  params.scale_rows = matrix.scale_rows;
  params.scale_columns = matrix.scale_columns;
  params.x = reinterpret_cast<const uint16_t*>(args.x);
  params.x_rows = args.x_rows;
  params.tiles = args.tiles;
  params.num_tiles = args.num_tiles;
  params.out = args.out;
  params.outputs = args.outputs();
  params.inputs = matrix.inputs;
  params.out_stride = args.out_stride;
  params.matrix_rows = matrix.outputs / args.num_experts;
  params.factor = args.raise ? kHalfOfFp8 : 1.0f;
  return params;
}

// Outputs that are written: of BF16 rows, the zeros behind them, too, which are inputs of the next
// GEMM.
template <GemmOutput kOut>
__device__ __forceinline__ int WrittenOutputs(const GroupedParams& p) {
  return kOut == GemmOutput::kSiluMul ? p.out_stride : p.outputs;
}

}  // namespace oscar::cuda
