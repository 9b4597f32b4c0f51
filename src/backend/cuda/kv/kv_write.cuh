// Writes new tokens: RMSNorm of q and k heads, RoPE, rotation, one rounding to BF16; K and V rows
// go to their window page, rotated q rows to the attention kernel's input.
//
// Grid       (row tiles / 4 warps, KV heads + 1). A warp takes 16 rows of one KV head, counted over
//            tokens x (its query heads and K), in tensor-core A layout: norm needs two shuffles and
//            RoPE none. The last y row copies V.
// Shared     none: a rotation (64 KiB at D 128, high and low halves) is read as ready B fragments
//            and stays in L1.
// Bytes      tokens x (6 q_heads + 12 kv_heads) x D (fp32 in, BF16 out), and the rotation.
// Bound      memory at small D; at D 128 the products: three BF16 MMAs (x_hi R_hi + x_lo R_hi +
//            x_hi R_lo) stand for an fp32 one, relative error about 2^-16.
#pragma once

#include <cstdint>

#include "cache/block_layout.h"
#include "cuda/device/ptx.cuh"
#include "cuda/kv/head_row.cuh"
#include "cuda/kv/write_params.h"
#include "quant/rotation_kind.h"

namespace oscar::cuda {

template <int kDim>
__device__ __forceinline__ std::byte* WindowBlock(const WriteKernelParams& p, int token, int head) {
  constexpr BlockLayout kLayout(BlockKind::kBf16, CodeOrder::kTensorCore, kDim, kDim);
  return p.window_pool + p.cache.WindowOffset(p.table_rows[token], p.positions[token], head,
                                              static_cast<int64_t>(kLayout.block_bytes()));
}

template <int kDim>
__device__ void CopyValues(const WriteKernelParams& p) {
  constexpr int kChunks = kDim / 8;  // of 16 bytes
  constexpr BlockLayout kLayout(BlockKind::kBf16, CodeOrder::kTensorCore, kDim, kDim);
  const int64_t total = int64_t{p.tokens} * p.num_kv_heads * kChunks;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < total;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int chunk = static_cast<int>(i % kChunks);
    const int head = static_cast<int>(i / kChunks % p.num_kv_heads);
    const int token = static_cast<int>(i / kChunks / p.num_kv_heads);
    if (p.positions[token] < 0) continue;
    const auto* v = reinterpret_cast<const float4*>(
        p.qkv + token * p.qkv_stride + (p.num_q_heads + p.num_kv_heads + head) * int64_t{kDim} +
        chunk * 8);
    const float4 a = v[0], b = v[1];
    const uint32_t at = kLayout.VCode(p.positions[token] % kPageTokens, chunk * 8).offset;
    *reinterpret_cast<uint4*>(WindowBlock<kDim>(p, token, head) + at) = {
        PackBf16(a.x, a.y), PackBf16(a.z, a.w), PackBf16(b.x, b.y), PackBf16(b.z, b.w)};
  }
}

// 16 rows of D numbers in fp32, A layout: x[r][i] is row (lane / 4 + 8 r), dim
// QuadLayout::Dim(i, lane % 4).
template <int kDim>
struct RowTile {
  using Layout = QuadLayout<kDim>;
  static constexpr int kSteps = kDim / 16, kRegs = Layout::kRegs;
  float x[2][kRegs];

  __device__ void Load(int r, const float* row, int quad) {
#pragma unroll
    for (int i = 0; i < kRegs; i += 2) {
      const float2 pair = row == nullptr
                              ? make_float2(0.0f, 0.0f)
                              : *reinterpret_cast<const float2*>(row + Layout::Dim(i, quad));
      x[r][i] = pair.x;
      x[r][i + 1] = pair.y;
    }
  }
  __device__ void Norm(int r, const float* weight, float factor, int quad) {
#pragma unroll
    for (int i = 0; i < kRegs; i += 2) {
      const float2 w = __ldg(reinterpret_cast<const float2*>(weight + Layout::Dim(i, quad)));
      x[r][i] *= factor * w.x;
      x[r][i + 1] *= factor * w.y;
    }
  }
  __device__ void Scale(int r, float factor) {
#pragma unroll
    for (int i = 0; i < kRegs; ++i) x[r][i] *= factor;
  }
  // Orthonormal Walsh-Hadamard: dim bits are e, quad (2), j, then step.
  __device__ void Hadamard(int quad) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int s = 0; s < kRegs; s += 4) {
        float* const v = x[r] + s;
        const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
        v[0] = a + c;
        v[1] = b + d;
        v[2] = a - c;
        v[3] = b - d;
#pragma unroll
        for (int bit = 1; bit <= 2; bit *= 2) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float other = __shfl_xor_sync(~0u, v[j], bit);
            v[j] = (quad & bit) != 0 ? other - v[j] : v[j] + other;
          }
        }
      }
#pragma unroll
      for (int stride = 4; stride < kRegs; stride *= 2) {
#pragma unroll
        for (int i = 0; i < kRegs; ++i) {
          if ((i & stride) != 0) continue;
          const float a = x[r][i], b = x[r][i + stride];
          x[r][i] = a + b;
          x[r][i + stride] = a - b;
        }
      }
#pragma unroll
      for (int i = 0; i < kRegs; ++i) x[r][i] *= kHadamardScale<kDim>;
    }
  }
};

template <int kDim, RotationKind kRotation>
__global__ void __launch_bounds__(kWriteWarps * 32)
    WriteTokensKernel(const __grid_constant__ WriteKernelParams p) {
  WaitForPredecessor();
  if (static_cast<int>(blockIdx.y) == p.num_kv_heads) {
    CopyValues<kDim>(p);
    return;
  }
  constexpr BlockLayout kLayout(BlockKind::kBf16, CodeOrder::kTensorCore, kDim, kDim);
  using Layout = QuadLayout<kDim>;
  constexpr int kSteps = kDim / 16;
  const int lane = static_cast<int>(threadIdx.x) % 32, quad = lane & 3;
  const auto kv_head = static_cast<int>(blockIdx.y);
  const int per_token = p.num_q_heads / p.num_kv_heads + 1;  // its query heads, then K
  const int tile = static_cast<int>(blockIdx.x) * kWriteWarps + static_cast<int>(threadIdx.x) / 32;
  if (tile * 16 >= p.tokens * per_token) return;

  RowTile<kDim> rows;
  std::byte* k_block[2] = {nullptr, nullptr};  // where each of this lane's two rows goes
  uint16_t* q_row[2] = {nullptr, nullptr};
  int k_token[2] = {0, 0};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int index = tile * 16 + lane / 4 + 8 * r;
    const int token = index / per_token, head = index % per_token;
    const int position = token < p.tokens ? p.positions[token] : -1;
    const bool is_k = head == per_token - 1;
    const float* source = nullptr;
    if (position >= 0) {
      const int q_head = kv_head * (per_token - 1) + head;
      source =
          p.qkv + token * p.qkv_stride + int64_t{is_k ? p.num_q_heads + kv_head : q_head} * kDim;
      if (is_k) {
        k_block[r] = WindowBlock<kDim>(p, token, kv_head);
        k_token[r] = position % kPageTokens;
      } else {
        q_row[r] = p.q_out + (int64_t{token} * p.num_q_heads + q_head) * kDim;
      }
    }
    rows.Load(r, source, quad);
    const float* norm = is_k ? p.k_norm : p.q_norm;
    const float scale = is_k ? 1.0f : p.q_scale;
    // All lanes take part in the sum.
    float factor = NormFactor<Layout>(rows.x[r], p.norm_epsilon);
    if (p.factors != nullptr) {
      factor = position >= 0 ? p.factors[2 * token + (is_k ? 1 : 0)] : 1.0f;
      norm += (is_k ? kv_head : kv_head * (per_token - 1) + head) * kDim;
    }
    if (norm != nullptr) rows.Norm(r, norm, factor, quad);
    if (!is_k) rows.Scale(r, scale);
    if (p.cos_sin == nullptr || position < 0) continue;
    const float2* const angles = p.cos_sin + int64_t{position} * p.rotary_half;
    Rope<Layout>(
        rows.x[r], quad, p.rotary_half, [&](int, int pair) { return __ldg(angles + pair); },
        [&](int dim) {
          const float x = source[dim];
          return (norm == nullptr ? x : x * (factor * __ldg(norm + dim))) * scale;
        });
  }
  const auto store = [&](int r, int dim, float low, float high) {
    const uint32_t pair = PackBf16(low, high);
    if (q_row[r] != nullptr) {
      *reinterpret_cast<uint32_t*>(q_row[r] + dim) = pair;
    } else if (k_block[r] != nullptr) {
      *reinterpret_cast<uint32_t*>(k_block[r] + kLayout.KCode(k_token[r], dim).offset) = pair;
    }
  };
  if constexpr (kRotation == RotationKind::kCalibrated) {
    uint32_t high[kSteps][4], low[kSteps][4];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // a0: row, j 0; a1: row + 8, j 0; a2: row, j 1; a3
        const float a = rows.x[i & 1][s * 4 + (i >> 1) * 2],
                    b = rows.x[i & 1][s * 4 + (i >> 1) * 2 + 1];
        high[s][i] = PackBf16(a, b);
        low[s][i] = PackBf16(a - Bf16Low(high[s][i]), b - Bf16High(high[s][i]));
      }
    }
    const uint4* fragments =
        p.rotation + int64_t{p.rotations > 1 ? kv_head : 0} * (kSteps * (kDim / 8) * 32);
#pragma unroll 2
    for (int n = 0; n < kDim / 8; ++n) {
      float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint4 b = __ldg(fragments + (s * (kDim / 8) + n) * 32 + lane);
        MmaBf16(c, low[s][0], low[s][1], low[s][2], low[s][3], b.x, b.y);
        MmaBf16(c, high[s][0], high[s][1], high[s][2], high[s][3], b.z, b.w);
        MmaBf16(c, high[s][0], high[s][1], high[s][2], high[s][3], b.x, b.y);
      }
      store(0, n * 8 + quad * 2, c[0], c[1]);
      store(1, n * 8 + quad * 2, c[2], c[3]);
    }
  } else {
    if constexpr (kRotation == RotationKind::kHadamard) rows.Hadamard(quad);
#pragma unroll
    for (int i = 0; i < rows.kRegs; i += 2) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        store(r, Layout::Dim(i, quad), rows.x[r][i], rows.x[r][i + 1]);
      }
    }
  }
}

}  // namespace oscar::cuda
