// Built without contraction of products and sums (--fmad=false), as the CPU's code is. Sums of rows
// are those of 16 lanes: number i belongs to lane i % 16, a lane adds its numbers in ascending
// order, lanes fold 8, 4, 2, 1 apart. A warp holds the 16 lanes twice.
#include <algorithm>
#include <string>

#include "cache/block_layout.h"
#include "cuda/device/cuda_status.h"
#include "cuda/device/ptx.cuh"
#include "cuda/kv/head_row.cuh"
#include "cuda/portable/portable_kernels.h"
#include "cuda/portable/portable_math.cuh"

namespace oscar::cuda {
namespace {

constexpr int kWarps = 4;

// RmsNorm's factor for x[0, width).
template <typename Value>
__device__ float RowFactor(const Value& x, int width, float epsilon, int lane) {
  float sum = 0.0f;
  for (int i = lane % 16; i < width; i += 16) {
    const float v = x(i);
    sum = fmaf(v, v, sum);
  }
  sum = SumOfLanes16(sum);
  return 1.0f / sqrtf(sum / static_cast<float>(width) + epsilon);
}

// A warp a row.
__global__ void NormKernel(const float* x, const float* weight, float epsilon,
                           const int32_t* sources, float* out, int rows, int width) {
  const int row = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= rows) return;
  const float* in = x + int64_t{sources != nullptr ? sources[row] : row} * width;
  const float factor = RowFactor([&](int i) { return in[i]; }, width, epsilon, lane);
  for (int i = lane; i < width; i += 32) {
    out[int64_t{row} * width + i] = in[i] * factor * weight[i];
  }
}

// 64 rows x 64 outputs a block, 4 x 4 a thread, each one chain over the inputs in ascending order.
constexpr int kTile = 64, kDepth = 16, kGemmThreads = 256;

__global__ void __launch_bounds__(kGemmThreads) GemmKernel(const PortableGemm p) {
  __shared__ float x[kDepth][kTile + 4];
  __shared__ float w[kDepth][kTile + 4];
  const int thread = static_cast<int>(threadIdx.x);
  const int first_row = static_cast<int>(blockIdx.y) * kTile;
  const int first_output = static_cast<int>(blockIdx.x) * kTile;
  const int my_row = thread / 16 * 4, my_output = thread % 16 * 4;
  const auto* weights = reinterpret_cast<const uint16_t*>(p.weights);
  float sum[4][4] = {};
  for (int begin = 0; begin < p.inputs; begin += kDepth) {
    __syncthreads();
    for (int i = thread; i < kTile * kDepth; i += kGemmThreads) {
      const int line = i / kDepth, k = i % kDepth;
      const bool inside = begin + k < p.inputs;
      const int row = first_row + line, output = first_output + line;
      x[k][line] = inside && row < p.rows ? p.x[int64_t{row} * p.inputs + begin + k] : 0.0f;
      w[k][line] =
          inside && output < p.outputs
              ? __uint_as_float(uint32_t{weights[int64_t{output} * p.inputs + begin + k]} << 16)
              : 0.0f;
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
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = first_row + my_row + i, output = first_output + my_output + j;
      if (row >= p.rows || output >= p.outputs) continue;
      float value = sum[i][j];
      if (p.bias != nullptr) value += p.bias[output];
      float* out = p.out + int64_t{row} * p.out_stride + output;
      *out = p.add ? *out + value : value;
    }
  }
}

__global__ void SiluMulKernel(const float* gate_up, float* out, int64_t count, int width) {
  constexpr float kLog2E = 1.4426950408889634f;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const float* at = gate_up + i / width * 2 * width + i % width;
    // A gate that is not a number stays so.
    const float gate = at[0] < -87.0f ? -87.0f : at[0];
    out[i] = gate / (1.0f + CpuExp2(gate * -kLog2E)) * at[width];
  }
}

// WriteArguments::factors in the CPU's order: a warp a token and side.
__global__ void FactorsKernel(const PortableHeads p, float epsilon, float* factors) {
  const int unit = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, token = unit / 2, side = unit % 2;
  if (token >= p.tokens || p.positions[token] < 0) return;
  const float* row = p.qkv + int64_t{token} * p.stride + side * p.heads * p.head_dim;
  const int width = (side == 0 ? p.heads : p.kv_heads) * p.head_dim;
  const float factor = RowFactor([&](int i) { return row[i]; }, width, epsilon, lane);
  if (lane == 0) factors[unit] = factor;
}

// A warp a (token, head).
template <int kDim>
__global__ void __launch_bounds__(kWarps * 32)
    RopeKernel(const PortableHeads p, const PortableNorm norm, const float2* cos_sin, int half) {
  using Layout = WarpLayout<kDim>;
  constexpr int kRegs = Layout::kRegs;
  const int unit = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int turned = p.heads + p.kv_heads, token = unit / turned, head = unit % turned;
  if (token >= p.tokens || p.positions[token] < 0) return;
  float* row = p.qkv + int64_t{token} * p.stride + head * kDim;
  const bool is_q = head < p.heads;
  const float* weight = is_q ? norm.q : norm.k;
  float factor = 1.0f;
  if (norm.factors != nullptr) {
    factor = norm.factors[2 * token + (is_q ? 0 : 1)];
    weight += (is_q ? head : head - p.heads) * kDim;
  } else if (weight != nullptr) {
    factor = RowFactor([&](int i) { return row[i]; }, kDim, norm.epsilon, lane);
  }
  const auto normed = [&](int d) {
    return weight == nullptr ? row[d] : row[d] * factor * weight[d];
  };
  float x[kRegs];
#pragma unroll
  for (int r = 0; r < kRegs; ++r) x[r] = normed(lane + 32 * r);
  const float2* const angles = cos_sin + int64_t{p.positions[token]} * half;
  Rope<Layout>(
      x, lane, half, [&](int, int pair) { return angles[pair]; }, normed);
  __syncwarp();  // all lanes have read the row
#pragma unroll
  for (int r = 0; r < kRegs; ++r) row[lane + 32 * r] = x[r];
}

template <int kDim>
__global__ void __launch_bounds__(kWarps * 32)
    StoreKernel(const PortableHeads p, const PortableRotation rotation, const CacheView cache) {
  constexpr int kRegs = kDim / 32;
  constexpr BlockLayout kLayout(BlockKind::kBf16, CodeOrder::kTensorCore, kDim, kDim);
  const int unit = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int all = p.heads + 2 * p.kv_heads, token = unit / all, head = unit % all;
  if (token >= p.tokens || p.positions[token] < 0) return;
  const bool is_q = head < p.heads, is_v = head >= p.heads + p.kv_heads;
  const int kv_head = is_q ? head / (p.heads / p.kv_heads) : (head - p.heads) % p.kv_heads;
  float* row = p.qkv + int64_t{token} * p.stride + head * kDim;
  float x[kRegs];
#pragma unroll
  for (int r = 0; r < kRegs; ++r) x[r] = row[lane + 32 * r];
  if (!is_v && rotation.matrices != nullptr) {
    const float* matrix =
        rotation.matrices + (rotation.num_matrices > 1 ? int64_t{kv_head} * kDim * kDim : 0);
    float sum[kRegs] = {};
#pragma unroll
    for (int part = 0; part < kRegs; ++part) {
      for (int i = 0; i < 32; ++i) {
        const float factor = __shfl_sync(~0u, x[part], i);
        const float* line = matrix + (part * 32 + i) * kDim;
#pragma unroll
        for (int r = 0; r < kRegs; ++r) sum[r] = fmaf(factor, line[lane + 32 * r], sum[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRegs; ++r) x[r] = sum[r];
  } else if (!is_v && rotation.hadamard_order > 0) {
    HadamardButterflies(x, lane, rotation.hadamard_order);
#pragma unroll
    for (int r = 0; r < kRegs; ++r) x[r] *= rotation.hadamard_scale;
  }
  if (is_q) {
#pragma unroll
    for (int r = 0; r < kRegs; ++r) row[lane + 32 * r] = x[r];
    return;
  }
  const int position = p.positions[token];
  std::byte* block = const_cast<std::byte*>(cache.window_pool) +
                     cache.WindowOffset(p.table_rows[token], position, kv_head,
                                        static_cast<int64_t>(kLayout.block_bytes()));
#pragma unroll
  for (int r = 0; r < kRegs; ++r) {
    const int dim = lane + 32 * r, at_token = position % kPageTokens;
    const CodePosition at = is_v ? kLayout.VCode(at_token, dim) : kLayout.KCode(at_token, dim);
    *reinterpret_cast<uint16_t*>(block + at.offset + at.shift / 8) = ToBf16(x[r]).bits;
  }
}

unsigned Blocks(int64_t units) { return static_cast<unsigned>((units + kWarps - 1) / kWarps); }

Status NoHeadDim(int head_dim) {
  return Unimplemented("no portable pass for head dim " + std::to_string(head_dim));
}

}  // namespace

Status LaunchPortableNorm(const float* x, const float* weight, float epsilon,
                          const int32_t* sources, float* out, int rows, int width, Stream stream) {
  if (rows <= 0) return {};
  NormKernel<<<Blocks(rows), kWarps * 32, 0, stream>>>(x, weight, epsilon, sources, out, rows,
                                                       width);
  return CudaStatus(cudaGetLastError(), "launching a portable norm");
}

Status LaunchPortableGemm(const PortableGemm& product, Stream stream) {
  if (product.rows <= 0) return {};
  const dim3 grid(static_cast<unsigned>((product.outputs + kTile - 1) / kTile),
                  static_cast<unsigned>((product.rows + kTile - 1) / kTile));
  GemmKernel<<<grid, kGemmThreads, 0, stream>>>(product);
  return CudaStatus(cudaGetLastError(), "launching a portable product");
}

Status LaunchPortableSiluMul(const float* gate_up, float* out, int rows, int width, Stream stream) {
  const int64_t count = int64_t{rows} * width;
  if (count <= 0) return {};
  const auto blocks = static_cast<unsigned>(std::min<int64_t>((count + 255) / 256, 4096));
  SiluMulKernel<<<blocks, 256, 0, stream>>>(gate_up, out, count, width);
  return CudaStatus(cudaGetLastError(), "launching a portable activation");
}

Status LaunchPortableFactors(const PortableHeads& heads, float epsilon, float* factors,
                             Stream stream) {
  if (heads.tokens <= 0) return {};
  FactorsKernel<<<Blocks(int64_t{heads.tokens} * 2), kWarps * 32, 0, stream>>>(heads, epsilon,
                                                                               factors);
  return CudaStatus(cudaGetLastError(), "launching a portable norm over all heads");
}

Status LaunchPortableRope(const PortableHeads& heads, const PortableNorm& norm,
                          const float* cos_sin, int rotary_dims, Stream stream) {
  if (heads.tokens <= 0) return {};
  return DispatchHeadDim(heads.head_dim, NoHeadDim(heads.head_dim), [&]<int kDim>() {
    RopeKernel<kDim>
        <<<Blocks(int64_t{heads.tokens} * (heads.heads + heads.kv_heads)), kWarps * 32, 0,
           stream>>>(heads, norm, reinterpret_cast<const float2*>(cos_sin), rotary_dims / 2);
    return CudaStatus(cudaGetLastError(), "launching a portable RoPE");
  });
}

Status LaunchPortableStore(const PortableHeads& heads, const PortableRotation& rotation,
                           const CacheView& cache, Stream stream) {
  if (heads.tokens <= 0) return {};
  return DispatchHeadDim(heads.head_dim, NoHeadDim(heads.head_dim), [&]<int kDim>() {
    StoreKernel<kDim><<<Blocks(int64_t{heads.tokens} * (heads.heads + 2 * heads.kv_heads)),
                        kWarps * 32, 0, stream>>>(heads, rotation, cache);
    return CudaStatus(cudaGetLastError(), "launching a portable write");
  });
}

}  // namespace oscar::cuda
