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
  // Where kernels have biases:
  const float* bias;
  float limit, slope;  // of ClampedGate
  bool lane_order;     // of what wgmma writes
  CombineInto combine;
};

inline GroupedParams ParamsOf(const GroupedGemm& args) {
  const DeviceMatrix& matrix = args.matrix;
  GroupedParams params{};
  params.w = matrix.is_mxfp4() ? matrix.mxfp4
             : matrix.is_fp8() ? reinterpret_cast<const unsigned char*>(matrix.codes)
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
  params.bias = args.bias;
  params.combine = args.combine;
  params.lane_order = args.lane_order;
  if (args.clamped.has_value()) {
    params.limit = args.clamped->limit;
    params.slope = args.clamped->slope;
  }
  return params;
}

// Outputs that are written: of BF16 rows, the zeros behind them, too, which are inputs of the next
// GEMM.
template <GemmOutput kOut>
__device__ __forceinline__ int WrittenOutputs(const GroupedParams& p) {
  return kOut == GemmOutput::kSiluMul ? p.out_stride : p.outputs;
}

// Of gate and up, biases added: ClampedGate's rule. What is no number stays so.
__device__ __forceinline__ float ClampedGateMul(const GroupedParams& p, float gate, float up) {
  gate = gate > p.limit ? p.limit : gate;
  up = up > p.limit ? p.limit : up < -p.limit ? -p.limit : up;
  return (up + 1.0f) * (gate / (1.0f + __expf(-p.slope * gate)));
}

// A block's scale as the factor of pairs of Mxfp4Pair: 2^(scale - 1), both halves. Beyond BF16's
// exponents, which no trained model reaches, it is the product of two.
struct Mxfp4Scale {
  uint32_t factor;
  uint32_t scale;

  __device__ __forceinline__ explicit Mxfp4Scale(uint32_t s)
      : factor((min(s, kInOne) + 126u) * 0x00800080u), scale(s) {}
  __device__ __forceinline__ bool is_beyond() const { return scale > kInOne; }
  __device__ __forceinline__ uint32_t rest() const { return (scale - 1u) * 0x00800080u; }

 private:
  static constexpr uint32_t kInOne = 128;
};
__device__ __forceinline__ uint32_t MultiplyPair(uint32_t pair, uint32_t factor) {
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair),
                                         *reinterpret_cast<const __nv_bfloat162*>(&factor));
  return *reinterpret_cast<const uint32_t*>(&product);
}
// The eight weights of a word, exactly.
__device__ __forceinline__ void UnpackMxfp4(uint32_t word, const Mxfp4Scale& scale,
                                            uint32_t (&pairs)[4]) {
  pairs[0] = MultiplyPair(Mxfp4Pair<0>(word), scale.factor);
  pairs[1] = MultiplyPair(Mxfp4Pair<1>(word), scale.factor);
  pairs[2] = MultiplyPair(Mxfp4Pair<2>(word), scale.factor);
  pairs[3] = MultiplyPair(Mxfp4Pair<3>(word), scale.factor);
  if (scale.is_beyond()) {
#pragma unroll
    for (uint32_t& pair : pairs) pair = MultiplyPair(pair, scale.rest());
  }
}

}  // namespace oscar::cuda
