// RMSNorm of a q or k head, RoPE, Hadamard, one rounding to BF16; K and V rows to their window
// page.
//
// Grid       a warp a (token, head); dim d of a row lies in lane d % 32, register d / 32, so that
//            RoPE's pairs (d, d + D / 2) are in one lane and the Hadamard's butterflies are
//            register pairs and five shuffles. All in fp32.
// Bound      few tokens: latency (positions, angles and norms are read before the predecessor has
//            ended); many: memory, 4 bytes a number read and 2 written.
#include "cache/block_layout.h"
#include "cuda/device/launch.h"
#include "cuda/device/ptx.cuh"
#include "cuda/kv/token_write.h"

namespace oscar::cuda {
namespace {

constexpr int kWarps = 4;

struct Params {
  const float* qkv;
  int64_t qkv_stride;
  const int32_t* positions;
  const int32_t* table_rows;
  const float2* cos_sin;
  const float *q_norm, *k_norm;
  float epsilon, q_scale;
  uint16_t* q_out;
  std::byte* window_pool;
  CacheView cache;
  int32_t tokens, q_heads, kv_heads;
};

template <int kDim, bool kHadamard>
__global__ void __launch_bounds__(kWarps * 32) TokenWriteKernel(const Params p) {
  constexpr int kRegs = kDim / 32;
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
  float weight[kRegs];
  float2 angle[kRegs / 2];
  std::byte* block = nullptr;
  if (active) {
#pragma unroll
    for (int r = 0; r < kRegs; ++r) {
      weight[r] = norm != nullptr && !is_v ? norm[lane + 32 * r] : 1.0f;
    }
#pragma unroll
    for (int r = 0; r < kRegs / 2; ++r) {
      angle[r] = p.cos_sin != nullptr && !is_v
                     ? p.cos_sin[int64_t{position} * (kDim / 2) + lane + 32 * r]
                     : make_float2(1.0f, 0.0f);
    }
    if (!is_q) {
      const int kv_head = is_v ? head - p.q_heads - p.kv_heads : head - p.q_heads;
      block = p.window_pool + p.cache.WindowOffset(p.table_rows[token], position, kv_head,
                                                   static_cast<int64_t>(kLayout.block_bytes()));
    }
  }
  WaitForPredecessor();
  if (!active) return;
  const float* in = p.qkv + token * p.qkv_stride + int64_t{head} * kDim + lane;
  float x[kRegs];
#pragma unroll
  for (int r = 0; r < kRegs; ++r) x[r] = in[32 * r];
  if (!is_v) {
    if (norm != nullptr) {
      float sum = 0.0f;
#pragma unroll
      for (int r = 0; r < kRegs; ++r) sum = fmaf(x[r], x[r], sum);
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      const float f = 1.0f / sqrtf(sum * (1.0f / kDim) + p.epsilon);
#pragma unroll
      for (int r = 0; r < kRegs; ++r) x[r] *= f * weight[r];
    }
#pragma unroll
    for (int r = 0; r < kRegs / 2; ++r) {
      const float low = x[r], high = x[r + kRegs / 2];
      x[r] = low * angle[r].x - high * angle[r].y;
      x[r + kRegs / 2] = high * angle[r].x + low * angle[r].y;
    }
    if constexpr (kHadamard) {
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

// Null where there is none.
const void* FindKernel(int head_dim, bool hadamard) {
  return DispatchHeadDim<const void*>(head_dim, nullptr, [&]<int kDim>() {
    return hadamard ? reinterpret_cast<const void*>(&TokenWriteKernel<kDim, true>)
                    : reinterpret_cast<const void*>(&TokenWriteKernel<kDim, false>);
  });
}

}  // namespace

bool HasTokenWrite(const AttentionShape& shape, RotationKind rotation) {
  return !IsMatrix(rotation) && FindKernel(shape.head_dim, false) != nullptr;
}

Status LaunchTokenWrite(const AttentionShape& shape, const WriteArguments& args, Stream stream) {
  Params params{};
  params.qkv = args.qkv;
  params.qkv_stride = args.qkv_stride;
  params.positions = args.positions;
  params.table_rows = args.table_rows;
  params.cos_sin = reinterpret_cast<const float2*>(args.cos_sin);
  params.q_norm = args.q_norm;
  params.k_norm = args.k_norm;
  params.epsilon = args.norm_epsilon;
  params.q_scale = args.q_scale;
  params.q_out = reinterpret_cast<uint16_t*>(args.q_out);
  params.window_pool = args.window_pool;
  params.cache = args.cache;
  params.tokens = args.tokens;
  params.q_heads = shape.num_q_heads;
  params.kv_heads = shape.num_kv_heads;
  const int units = args.tokens * (shape.num_q_heads + 2 * shape.num_kv_heads);
  void* kernel_args[] = {&params};
  return LaunchOverlapping(FindKernel(shape.head_dim, args.rotation == RotationKind::kHadamard),
                           {(units + kWarps - 1) / kWarps, kWarps * 32}, kernel_args, stream,
                           "launching the token write");
}

}  // namespace oscar::cuda
