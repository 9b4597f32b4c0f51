// The recurrent form. A block has a (sequence, value head), whose matrix S [key dims, value dims]
// lies in its registers from the first token to the last:
//
//   warp w has columns [8 w, 8 w + 8), lane l of it rows l / 2 + 16 i of four of them
//
// so that no warp needs another's sums, and memory is read and written once, 32 bytes of a row at a
// time. With h = S^T k and g = S^T q of the state before a token, what the rule writes and gives is
//
//   c = beta (v - alpha h),   S <- alpha S + k c^T,   o = alpha g + (k . q) c
//
// one reduction over the keys instead of two. The matrix is on its way before the inputs are waited
// for: nothing that may still run touches it.
//
// Tokens are convolved and normed in tiles: channels of q and k by every block that needs them,
// which costs less than a launch. The inputs that the state keeps for the next convolution are
// written when all blocks of a key head have read them, by the last that has.
#include "cuda/device/launch.h"
#include "cuda/device/ptx.cuh"
#include "cuda/linear_attention/linear_attention.h"
#include "cuda/linear_attention/state_math.cuh"

namespace oscar::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kTile = 16;  // tokens: one per warp where rows are normed
constexpr int kRows = kMaxStateKeyDim / 16;
static_assert(kWarps * 8 == kMaxStateValueDim && kTile == kWarps);
static_assert(2 * kMaxStateKeyDim + kMaxStateValueDim <= kThreads);

struct StateParams {
  LinearAttentionSpec spec;
  const float *conv, *decay_rate, *step_bias, *norm;
  float norm_epsilon;
  const float* inputs;
  std::byte* arena;
  int64_t place_bytes, layer_offset;
  const int32_t* states;
  const PrefillChunk* chunks;
  uint32_t* arrivals;
  uint16_t* out;
};

__device__ __forceinline__ float SumOfWarp(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

struct Tile {
  float q[kTile][kMaxStateKeyDim], k[kTile][kMaxStateKeyDim];
  float v[kTile][kMaxStateValueDim], o[kTile][kMaxStateValueDim];
  float alpha[kTile], beta[kTile], kq[kTile];
  bool is_last;
};

__global__ void __launch_bounds__(kThreads, 2) StateKernel(const StateParams p) {
  LetSuccessorStart();
  __shared__ Tile tile;
  const LinearAttentionSpec& spec = p.spec;
  const int key_dim = spec.key_dim, value_dim = spec.value_dim, taps = spec.conv_kernel;
  const int item = static_cast<int>(blockIdx.x) / spec.value_heads;
  const int head = static_cast<int>(blockIdx.x) % spec.value_heads;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int place = p.states[item];
  if (place < 0) return;
  auto* const state = reinterpret_cast<float*>(p.arena + place * p.place_bytes + p.layer_offset);
  float* const kept = state + spec.matrix_floats();
  const int column = warp * 8 + lane % 2 * 4, first_key = lane / 2;
  float* const mine = state + (head * key_dim + first_key) * int64_t{value_dim} + column;
  float4 s[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const bool inside = column < value_dim && first_key + 16 * i < key_dim;
    s[i] = inside ? __ldcs(reinterpret_cast<const float4*>(mine + 16 * i * value_dim))
                  : make_float4(0, 0, 0, 0);
  }
  WaitForPredecessor();
  const PrefillChunk chunk = p.chunks != nullptr ? p.chunks[item] : PrefillChunk{item, 1};
  const int64_t width = spec.input_width();
  const float* const inputs = p.inputs + chunk.query_begin * width;
  const int channels = spec.conv_channels();

  // The channel of this thread.
  const int part = thread < key_dim ? 0 : thread < 2 * key_dim ? 1 : 2;
  const int dim = thread - part * key_dim;
  const bool has_channel = thread < 2 * key_dim + value_dim;
  const HeadChannels at = ChannelsOf(spec, head, part);
  const int input = at.input + dim, channel = at.channel + dim;
  float weights[kMaxConvTaps];
#pragma unroll
  for (int j = 0; j < kMaxConvTaps; ++j) {
    weights[j] = has_channel && j < taps ? p.conv[j * channels + channel] : 0.0f;
  }
  // Of the token that many after the chunk's first; before it, what the state kept.
  const auto input_of = [&](int token) {
    return token >= 0 ? inputs[token * width + input]
                      : kept[(taps - 1 + token) * int64_t{channels} + channel];
  };

  for (int first = 0; first < chunk.query_tokens; first += kTile) {
    const int tokens = min(kTile, chunk.query_tokens - first);
    if (has_channel) {
      float* const to = part == 0 ? tile.q[0] : part == 1 ? tile.k[0] : tile.v[0];
      const int stride = part == 2 ? kMaxStateValueDim : kMaxStateKeyDim;
      for (int t = 0; t < tokens; ++t) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kMaxConvTaps; ++j) {
          if (j < taps) sum = fmaf(weights[j], input_of(first + t - (taps - 1) + j), sum);
        }
        to[t * stride + dim] = Silu(sum);
      }
    }
    if (thread >= kThreads - 32 && lane < tokens) {
      const float* const row = inputs + (first + lane) * width;
      tile.alpha[lane] =
          Exp(-p.decay_rate[head] * Softplus(row[spec.AOf(head)] + p.step_bias[head]));
      tile.beta[lane] = SigmoidOf(row[spec.BOf(head)]);
    }
    __syncthreads();
    if (first == 0 && thread == 0) {
      // This block has read what the state kept.
      const int each = spec.values_per_key_head();
      uint32_t* const arrived = p.arrivals + item * spec.key_heads + head / each;
      __threadfence();
      tile.is_last = atomicAdd(arrived, 1u) + 1 == static_cast<uint32_t>(each);
      if (tile.is_last) *arrived = 0;
    }
    if (warp < tokens) {
      float* const q = tile.q[warp];
      float* const k = tile.k[warp];
      float qq = 0.0f, kk = 0.0f, kq = 0.0f;
      for (int d = lane; d < key_dim; d += 32) {
        qq = fmaf(q[d], q[d], qq);
        kk = fmaf(k[d], k[d], kk);
        kq = fmaf(k[d], q[d], kq);
      }
      const float q_factor =
          1.0f / sqrtf((SumOfWarp(qq) + kLengthEpsilon) * static_cast<float>(key_dim));
      const float k_factor = 1.0f / sqrtf(SumOfWarp(kk) + kLengthEpsilon);
      kq = SumOfWarp(kq);
      for (int d = lane; d < key_dim; d += 32) {
        q[d] *= q_factor;
        k[d] *= k_factor;
      }
      if (lane == 0) tile.kq[warp] = kq * q_factor * k_factor;
    }
    __syncthreads();
    if (first == 0 && has_channel && (part == 2 || tile.is_last)) {
      __threadfence();
      // A thread's channel from the oldest on: none is overwritten before it is moved.
      for (int j = 0; j < taps - 1; ++j) {
        kept[j * int64_t{channels} + channel] = input_of(chunk.query_tokens - (taps - 1) + j);
      }
    }

    for (int t = 0; t < tokens; ++t) {
      const float alpha = tile.alpha[t];
      float h[4] = {}, g[4] = {};
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = first_key + 16 * i;
        if (row >= key_dim) break;
        const float k = tile.k[t][row], q = tile.q[t][row];
        h[0] = fmaf(k, s[i].x, h[0]), g[0] = fmaf(q, s[i].x, g[0]);
        h[1] = fmaf(k, s[i].y, h[1]), g[1] = fmaf(q, s[i].y, g[1]);
        h[2] = fmaf(k, s[i].z, h[2]), g[2] = fmaf(q, s[i].z, g[2]);
        h[3] = fmaf(k, s[i].w, h[3]), g[3] = fmaf(q, s[i].w, g[3]);
      }
      float change[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
#pragma unroll
        for (int offset = 2; offset < 32; offset *= 2) {
          h[c] += __shfl_xor_sync(~0u, h[c], offset);
          g[c] += __shfl_xor_sync(~0u, g[c], offset);
        }
        const float v = column < value_dim ? tile.v[t][column + c] : 0.0f;
        change[c] = tile.beta[t] * (v - alpha * h[c]);
        g[c] = fmaf(tile.kq[t], change[c], alpha * g[c]);
      }
      if (lane < 2 && column < value_dim) {
        *reinterpret_cast<float4*>(&tile.o[t][column]) = {g[0], g[1], g[2], g[3]};
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = first_key + 16 * i;
        if (row >= key_dim) break;
        const float k = tile.k[t][row];
        s[i].x = fmaf(k, change[0], alpha * s[i].x);
        s[i].y = fmaf(k, change[1], alpha * s[i].y);
        s[i].z = fmaf(k, change[2], alpha * s[i].z);
        s[i].w = fmaf(k, change[3], alpha * s[i].w);
      }
    }
    __syncthreads();

    if (warp < tokens) {
      const int row = first + warp;
      const float* const z = inputs + row * width + spec.ZOf(head);
      uint16_t* const out =
          p.out + (chunk.query_begin + row) * int64_t{spec.value_width()} + head * value_dim;
      float sum = 0.0f;
      for (int c = lane; c < value_dim; c += 32) {
        sum = fmaf(tile.o[warp][c], tile.o[warp][c], sum);
      }
      const float factor =
          1.0f / sqrtf(SumOfWarp(sum) / static_cast<float>(value_dim) + p.norm_epsilon);
      for (int c = lane; c < value_dim; c += 32) {
        const float y = tile.o[warp][c] * factor * p.norm[c] * Silu(z[c]);
        out[c] = __bfloat16_as_ushort(__float2bfloat16_rn(y));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const bool inside = column < value_dim && first_key + 16 * i < key_dim;
    if (inside) __stcs(reinterpret_cast<float4*>(mine + 16 * i * value_dim), s[i]);
  }
}

}  // namespace

Status LaunchStates(const StateArguments& args, uint32_t* arrivals, Bf16* out, Stream stream) {
  if (args.batch <= 0) return {};
  StateParams params{args.spec,
                     args.weights.conv,
                     args.weights.decay_rate,
                     args.weights.step_bias,
                     args.weights.norm,
                     args.norm_epsilon,
                     args.inputs,
                     args.arena,
                     args.place_bytes,
                     args.layer_offset,
                     args.states,
                     args.chunks,
                     arrivals,
                     reinterpret_cast<uint16_t*>(out)};
  void* kernel_args[] = {&params};
  return LaunchOverlapping(reinterpret_cast<const void*>(&StateKernel),
                           {args.batch * args.spec.value_heads, kThreads}, kernel_args, stream,
                           "launching linear attention");
}

}  // namespace oscar::cuda
