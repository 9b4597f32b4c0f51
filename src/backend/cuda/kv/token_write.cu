// RMSNorm of a q or k head, RoPE, Hadamard, one rounding to BF16; K and V rows to their window
// page.
//
// Grid       a warp a (token, head); dim d of a row lies in lane d % 32, register d / 32, so that
//            RoPE's pairs (d, d + D / 2) are in one lane and the Hadamard's butterflies are
//            register pairs and five shuffles. All in fp32. A norm over all heads takes its factor
//            from a launch before this one, a block a token.
// Bound      few tokens: latency (positions, angles and norms are read before the predecessor has
//            ended); many: memory, 4 bytes a number read and 2 written.
#include <string>

#include "cache/block_layout.h"
#include "cuda/device/launch.h"
#include "cuda/device/ptx.cuh"
#include "cuda/kv/head_row.cuh"
#include "cuda/kv/token_write.h"

namespace oscar::cuda {
namespace {

constexpr int kWarps = 4;

enum class Written { kPlain, kHadamard, kTap };  // kTap: fp32 rows as they were read

struct Params {
  const float* qkv;
  int64_t qkv_stride;
  const int32_t* positions;
  const int32_t* table_rows;
  const float2* cos_sin;
  const float *q_norm, *k_norm, *factors;
  float epsilon, q_scale;
  uint16_t* q_out;
  float* tap;
  std::byte* window_pool;
  CacheView cache;
  int32_t tokens, q_heads, kv_heads, rotary_half;
};

template <int kDim, Written kWritten>
__global__ void __launch_bounds__(kWarps * 32) TokenWriteKernel(const Params p) {
  using Layout = WarpLayout<kDim>;
  constexpr int kRegs = Layout::kRegs;
  constexpr BlockLayout kLayout(BlockKind::kBf16, CodeOrder::kTensorCore, kDim, kDim);
  LetSuccessorStart();
  const int heads = p.q_heads + 2 * p.kv_heads;
  const int unit = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int token = min(unit / heads, p.tokens - 1), head = unit % heads;
  const int position = p.positions[token];
  const bool active = unit < p.tokens * heads && position >= 0;
  const bool is_v = head >= p.q_heads + p.kv_heads, is_q = head < p.q_heads;
  const float* norm = is_q ? p.q_norm : p.k_norm;
  if (p.factors != nullptr) norm += (is_q ? head : head - p.q_heads) * kDim;
  float weight[kRegs];
  float2 angle[kRegs];
  std::byte* block = nullptr;
  if (active) {
#pragma unroll
    for (int r = 0; r < kRegs; ++r) {
      weight[r] = norm != nullptr && !is_v ? norm[lane + 32 * r] : 1.0f;
    }
    const bool turns = p.cos_sin != nullptr && !is_v;
#pragma unroll
    for (int r = 0; r < kRegs; ++r) {
      const int d = lane + 32 * r;
      angle[r] = turns && d < 2 * p.rotary_half
                     ? p.cos_sin[int64_t{position} * p.rotary_half + PairOf(d, p.rotary_half)]
                     : make_float2(1.0f, 0.0f);
    }
    if (!is_q && kWritten != Written::kTap) {
      const int kv_head = is_v ? head - p.q_heads - p.kv_heads : head - p.q_heads;
      block = p.window_pool + p.cache.WindowOffset(p.table_rows[token], position, kv_head,
                                                   static_cast<int64_t>(kLayout.block_bytes()));
    }
  }
  WaitForPredecessor();
  if (!active) return;
  const float* in = p.qkv + token * p.qkv_stride + int64_t{head} * kDim;
  float x[kRegs];
#pragma unroll
  for (int r = 0; r < kRegs; ++r) x[r] = in[lane + 32 * r];
  if (!is_v) {
    float f = 1.0f;
    if (norm != nullptr) {
      f = p.factors != nullptr ? p.factors[2 * token + (is_q ? 0 : 1)]
                               : NormFactor<Layout>(x, p.epsilon);
#pragma unroll
      for (int r = 0; r < kRegs; ++r) x[r] *= f * weight[r];
    }
    Rope<Layout>(
        x, lane, p.rotary_half, [&](int r, int) { return angle[r]; },
        [&](int dim) { return norm == nullptr ? in[dim] : in[dim] * (f * norm[dim]); });
    if constexpr (kWritten == Written::kHadamard) {
#pragma unroll
      for (int stride = 1; stride < kRegs; stride *= 2) {
#pragma unroll
        for (int r = 0; r < kRegs; ++r) {
          if ((r & stride) != 0) continue;
          const float a = x[r], b = x[r + stride];
          x[r] = a + b;
          x[r + stride] = a - b;
        }
      }
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
#pragma unroll
        for (int r = 0; r < kRegs; ++r) {
          const float other = __shfl_xor_sync(~0u, x[r], offset);
          x[r] = (lane & offset) != 0 ? other - x[r] : x[r] + other;
        }
      }
#pragma unroll
      for (int r = 0; r < kRegs; ++r) x[r] *= kHadamardScale<kDim>;
    }
  }
#pragma unroll
  for (int r = 0; r < kRegs; ++r) {
    const int d = lane + 32 * r;
    if constexpr (kWritten == Written::kTap) {
      p.tap[token * p.qkv_stride + int64_t{head} * kDim + d] = x[r];
      continue;
    }
    const __nv_bfloat16 rounded = __float2bfloat16_rn(is_q ? x[r] * p.q_scale : x[r]);
    if (is_q) {
      reinterpret_cast<__nv_bfloat16*>(p.q_out)[(int64_t{token} * p.q_heads + head) * kDim + d] =
          rounded;
    } else {
      const int row = position % kPageTokens;
      const CodePosition at = is_v ? kLayout.VCode(row, d) : kLayout.KCode(row, d);
      *reinterpret_cast<__nv_bfloat16*>(block + at.offset + at.shift / 8) = rounded;
    }
  }
}

// One block a token.
constexpr int kFactorThreads = 256;
__global__ void __launch_bounds__(kFactorThreads)
    HeadFactorsKernel(const float* qkv, int64_t stride, int q_width, int k_width, float epsilon,
                      float* factors) {
  __shared__ float sums[2][kFactorThreads / 32];
  LetSuccessorStart();
  WaitForPredecessor();
  const int thread = static_cast<int>(threadIdx.x);
  const float* row = qkv + int64_t{blockIdx.x} * stride;
  float sum[2] = {0.0f, 0.0f};
#pragma unroll 4
  for (int i = thread * 4; i < q_width; i += kFactorThreads * 4) {
    const float4 v = *reinterpret_cast<const float4*>(row + i);
    sum[0] += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  for (int i = thread * 4; i < k_width; i += kFactorThreads * 4) {
    const float4 v = *reinterpret_cast<const float4*>(row + q_width + i);
    sum[1] += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const float warp_sum = WarpLayout<32>::Sum(sum[side]);
    if (thread % 32 == 0) sums[side][thread / 32] = warp_sum;
  }
  __syncthreads();
  if (thread >= 2) return;
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kFactorThreads / 32; ++i) total += sums[thread][i];
  const auto width = static_cast<float>(thread == 0 ? q_width : k_width);
  factors[2 * static_cast<int64_t>(blockIdx.x) + thread] = 1.0f / sqrtf(total / width + epsilon);
}

// Null where there is none.
const void* FindKernel(int head_dim, Written written) {
  return DispatchHeadDim<const void*>(head_dim, nullptr, [&]<int kDim>() -> const void* {
    switch (written) {
      case Written::kPlain:
        return reinterpret_cast<const void*>(&TokenWriteKernel<kDim, Written::kPlain>);
      case Written::kHadamard:
        return reinterpret_cast<const void*>(&TokenWriteKernel<kDim, Written::kHadamard>);
      case Written::kTap:
        return reinterpret_cast<const void*>(&TokenWriteKernel<kDim, Written::kTap>);
    }
    return nullptr;
  });
}

Status Launch(const AttentionShape& shape, const WriteArguments& args, Written written, float* tap,
              const char* what, Stream stream) {
  const void* kernel = FindKernel(shape.head_dim, written);
  if (kernel == nullptr) {
    return Unimplemented("no write kernel for head dim " + std::to_string(shape.head_dim));
  }
  Params params{};
  params.qkv = args.qkv;
  params.qkv_stride = args.qkv_stride;
  params.positions = args.positions;
  params.table_rows = args.table_rows;
  params.cos_sin = reinterpret_cast<const float2*>(args.cos_sin);
  params.q_norm = args.q_norm;
  params.k_norm = args.k_norm;
  params.factors = args.factors;
  params.epsilon = args.norm_epsilon;
  params.q_scale = args.q_scale;
  params.q_out = reinterpret_cast<uint16_t*>(args.q_out);
  params.tap = tap;
  params.window_pool = args.window_pool;
  params.cache = args.cache;
  params.tokens = args.tokens;
  params.q_heads = shape.num_q_heads;
  params.kv_heads = shape.num_kv_heads;
  params.rotary_half = (args.rotary_dims > 0 ? args.rotary_dims : shape.head_dim) / 2;
  const int units = args.tokens * (shape.num_q_heads + 2 * shape.num_kv_heads);
  void* kernel_args[] = {&params};
  return LaunchOverlapping(kernel, {(units + kWarps - 1) / kWarps, kWarps * 32}, kernel_args,
                           stream, what);
}

}  // namespace

bool HasTokenWrite(const AttentionShape& shape, RotationKind rotation) {
  return !IsMatrix(rotation) && FindKernel(shape.head_dim, Written::kPlain) != nullptr;
}

Status LaunchTokenWrite(const AttentionShape& shape, const WriteArguments& args, Stream stream) {
  const Written written =
      args.rotation == RotationKind::kHadamard ? Written::kHadamard : Written::kPlain;
  return Launch(shape, args, written, nullptr, "launching the token write", stream);
}

Status LaunchTap(const AttentionShape& shape, const WriteArguments& args, float* out,
                 Stream stream) {
  return Launch(shape, args, Written::kTap, out, "launching the calibration tap", stream);
}

Status LaunchHeadFactors(const AttentionShape& shape, const float* qkv, int64_t qkv_stride,
                         float epsilon, float* factors, int tokens, Stream stream) {
  int q_width = shape.num_q_heads * shape.head_dim, k_width = shape.num_kv_heads * shape.head_dim;
  void* args[] = {&qkv, &qkv_stride, &q_width, &k_width, &epsilon, &factors};
  return LaunchOverlapping(reinterpret_cast<const void*>(&HeadFactorsKernel),
                           {tokens, kFactorThreads}, args, stream,
                           "launching the norm over all heads");
}

}  // namespace oscar::cuda
