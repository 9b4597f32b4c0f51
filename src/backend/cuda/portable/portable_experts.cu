// Experts in the CPU's order of sums, built without contraction (--fmad=false): a GEMM is one fused
// chain over the inputs; of FP8 weights one for each slice of 128 inputs or less that share a
// scale, which multiplies its sum (simd/grouped_gemm.cc). MXFP4 weights are multiplied as BF16.
#include <algorithm>

#include "base/mxfp4.h"
#include "cuda/device/cuda_status.h"
#include "cuda/portable/portable_kernels.h"
#include "cuda/portable/portable_math.cuh"

namespace oscar::cuda {
namespace {

constexpr int kTile = kPortableTileRows, kDepth = 16, kGemmThreads = 256;
constexpr int kSliceInputs = 128;  // simd/grouped_gemm.cc's

// An FP8 code's value: its exponent is 120 too small as fp32's.
__device__ __forceinline__ float OfCode(uint8_t code) {
  const uint32_t bits = (uint32_t{code} & 0x80u) << 24 | (uint32_t{code} & 0x7fu) << 20;
  return __uint_as_float(bits) * 0x1p120f;
}

// 64 places x 64 outputs a block, 4 x 4 a thread.
__global__ void __launch_bounds__(kGemmThreads) GroupedGemmKernel(const PortableGroupedGemm p) {
  __shared__ float x[kDepth][kTile + 4];
  __shared__ float w[kDepth][kTile + 4];
  if (static_cast<int>(blockIdx.y) >= *p.num_tiles) return;
  const ExpertTile tile = p.tiles[blockIdx.y];
  const PortableMatrix matrix = p.experts[tile.expert];
  const int thread = static_cast<int>(threadIdx.x);
  const int first_output = static_cast<int>(blockIdx.x) * kTile;
  const int my_row = thread / 16 * 4, my_output = thread % 16 * 4;
  const bool fp8 = matrix.codes != nullptr;
  const int segments = fp8 ? (p.inputs + matrix.scale_inputs - 1) / matrix.scale_inputs : 0;
  const auto slice_end = [&](int begin) {
    if (!fp8) return p.inputs;
    const int segment_end = (begin / matrix.scale_inputs + 1) * matrix.scale_inputs;
    return min(min(begin + kSliceInputs, segment_end), p.inputs);
  };
  float sum[4][4] = {}, total[4][4] = {};
  int slice = 0, end = slice_end(0);
  for (int begin = 0; begin < p.inputs; begin += kDepth) {
    __syncthreads();
    for (int i = thread; i < kTile * kDepth; i += kGemmThreads) {
      const int line = i / kDepth, k = begin + i % kDepth;
      const int output = first_output + line;
      float a = 0.0f, b = 0.0f;
      if (k < p.inputs && line < tile.rows) {
        const int place = tile.first + line;
        a = p.x[int64_t{p.x_rows != nullptr ? p.x_rows[place] : place} * p.inputs + k];
      }
      if (k < p.inputs && output < p.outputs) {
        const int64_t at = int64_t{output} * p.inputs + k;
        if (fp8) {
          b = OfCode(matrix.codes[at]);
        } else if (matrix.mxfp4_codes != nullptr) {
          const int code = matrix.mxfp4_codes[at / 2] >> (at % 2 * 4) & 15;
          b = ToFloat(
              Mxfp4ToBf16(static_cast<uint8_t>(code), matrix.mxfp4_scales[at / kMxfp4Block]));
        } else {
          b = __uint_as_float(uint32_t{matrix.weights[at].bits} << 16);
        }
      }
      x[i % kDepth][line] = a;
      w[i % kDepth][line] = b;
    }
    __syncthreads();
    const int depth = min(kDepth, p.inputs - begin);
    for (int k = 0; k < depth; ++k) {
      const float4 a = *reinterpret_cast<const float4*>(&x[k][my_row]);
      const float4 b = *reinterpret_cast<const float4*>(&w[k][my_output]);
      const float left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(left[i], right[j], sum[i][j]);
      }
    }
    // Slices end at multiples of 32 inputs, or with the last.
    if (!fp8 || begin + kDepth < end) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int output = min(first_output + my_output + j, p.outputs - 1);
      const float scale = matrix.scales[int64_t{output} * segments + slice / matrix.scale_inputs];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[i][j] = fmaf(scale, sum[i][j], total[i][j]);
        sum[i][j] = 0.0f;
      }
    }
    slice = end;
    end = slice_end(slice);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = my_row + i, output = first_output + my_output + j;
      if (row >= tile.rows || output >= p.outputs) continue;
      float result = fp8 ? total[i][j] : sum[i][j];
      if (p.bias != nullptr) result += p.bias[int64_t{tile.expert} * p.outputs + output];
      p.out[int64_t{tile.first + row} * p.outputs + output] = result;
    }
  }
}

constexpr int kWarps = 4;

// A warp per row and expert.
__global__ void DotKernel(const float* x, const float* router, const float* bias, float* scores,
                          int rows, int hidden, int num_experts) {
  const int64_t unit = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (unit >= int64_t{rows} * num_experts) return;
  const float* a = router + unit % num_experts * hidden;
  const float* b = x + unit / num_experts * hidden;
  float sum = 0.0f;
  for (int i = lane % 16; i < hidden; i += 16) sum = fmaf(a[i], b[i], sum);
  sum = SumOfLanes16(sum);
  if (bias != nullptr) sum += bias[unit % num_experts];
  if (lane == 0) scores[unit] = sum;
}

// ClampedGateMulRow of simd/vec_ops.cc.
__global__ void ClampedGateKernel(const float* gate_up, ClampedGate clamped, float* out,
                                  int64_t count) {
  constexpr float kLog2E = 1.4426950408889634f;
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at >= count) return;
  float gate = gate_up[2 * at], up = gate_up[2 * at + 1];
  // What is no number stays so.
  const float lowest = -87.0f / clamped.slope;
  gate = gate > clamped.limit ? clamped.limit : gate;
  gate = gate < lowest ? lowest : gate;
  up = up > clamped.limit ? clamped.limit : up;
  up = up < -clamped.limit ? -clamped.limit : up;
  out[at] = (up + 1.0f) * (gate / (1.0f + CpuExp2(gate * (-clamped.slope * kLog2E))));
}

// A warp per row.
__global__ void ScoreKernel(float* scores, RouterScore kind, int rows, int num_experts) {
  constexpr float kLog2E = 1.4426950408889634f;
  const int row = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= rows) return;
  float* x = scores + int64_t{row} * num_experts;
  if (kind == RouterScore::kSigmoid) {
    for (int i = lane; i < num_experts; i += 32) {
      // A logit that is not a number stays so.
      const float v = x[i] < -87.0f ? -87.0f : x[i];
      x[i] = 1.0f / (1.0f + CpuExp2(v * -kLog2E));
    }
    return;
  }
  float largest = -INFINITY;
  for (int i = lane; i < num_experts; i += 32) largest = x[i] > largest ? x[i] : largest;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, offset));
  }
  // Both halves of the warp have the same numbers.
  float sum = 0.0f;
  for (int i = lane % 16; i < num_experts; i += 16) sum = sum + CpuExp2((x[i] - largest) * kLog2E);
  sum = SumOfLanes16(sum);
  const float factor = 1.0f / sum;
  __syncwarp();
  for (int i = lane; i < num_experts; i += 32) x[i] = CpuExp2((x[i] - largest) * kLog2E) * factor;
}

}  // namespace

Status LaunchPortableGroupedGemm(const PortableGroupedGemm& product, Stream stream) {
  if (product.max_tiles <= 0) return {};
  // Tiles are in y, which has fewer.
  constexpr int kMostTiles = 65535;
  if (product.max_tiles > kMostTiles) {
    return InvalidArgument("a portable pass has too many rows for its experts: lower --chunk");
  }
  const dim3 grid(static_cast<unsigned>((product.outputs + kTile - 1) / kTile),
                  static_cast<unsigned>(product.max_tiles));
  GroupedGemmKernel<<<grid, kGemmThreads, 0, stream>>>(product);
  return CudaStatus(cudaGetLastError(), "launching a portable GEMM of experts");
}

Status LaunchPortableClampedGate(const float* gate_up, const ClampedGate& gate, float* out,
                                 int rows, int width, Stream stream) {
  const int64_t count = int64_t{rows} * width;
  if (count <= 0) return {};
  constexpr int kGateThreads = 256;
  ClampedGateKernel<<<static_cast<unsigned>((count + kGateThreads - 1) / kGateThreads),
                      kGateThreads, 0, stream>>>(gate_up, gate, out, count);
  return CudaStatus(cudaGetLastError(), "launching portable gates of experts");
}

Status LaunchPortableScores(const float* x, const float* router, const float* bias,
                            RouterScore kind, float* scores, int rows, int hidden, int num_experts,
                            Stream stream) {
  if (rows <= 0) return {};
  const int64_t units = int64_t{rows} * num_experts;
  DotKernel<<<static_cast<unsigned>((units + kWarps - 1) / kWarps), kWarps * 32, 0, stream>>>(
      x, router, bias, scores, rows, hidden, num_experts);
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaGetLastError(), "launching a portable router"));
  ScoreKernel<<<static_cast<unsigned>((rows + kWarps - 1) / kWarps), kWarps * 32, 0, stream>>>(
      scores, kind, rows, num_experts);
  return CudaStatus(cudaGetLastError(), "launching a portable router");
}

}  // namespace oscar::cuda
