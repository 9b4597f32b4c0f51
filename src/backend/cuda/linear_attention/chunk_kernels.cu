// The chunked form, on tensor cores, for heads of 128 key and 128 value dims: tiles of at most 64
// tokens on the grid of positions. With G the running sum of a tile's log decays, beta_i how much a
// token writes, and S the state before the tile:
//
//   A_ij = beta_i (k_i . k_j) exp(G_i - G_j) for j < i,   T = (I + A)^-1
//   U = T diag(beta) V,   W = T diag(beta exp G) K,   P_ij = (q_i . k_j) exp(G_i - G_j), j <= i
//   V' = U - W S,   O = diag(exp G) Q S + P V',   S <- exp(G_n) S + (diag(exp(G_n - G)) K)^T V'
//
// Three launches, for as many tiles at a time as fit the workspace, which the L2 holds:
//
//   prepare  a block per (tile, value head): convolution, norms, gates, T; U, W and P to the
//   workspace scan     a warp per 16 value dims of a (sequence, head), tile after tile: S stays in
//   registers norm     a warp per (row, head)
//
// The scan has everything transposed, S^T [value dims, key dims] and V'^T, O^T [value dims,
// tokens]: then what one product gives is, in the same registers, the left operand of the next, and
// warps need nothing of each other. The workspace holds right operands as mma.sync takes them, 8 or
// 16 bytes per lane.
//
// q, k and v are rounded to BF16 once. Everything else that enters a product (T, W, P, S, V') does
// so as two BF16 numbers, high and low, and leaves out low times low: 2^-16 of it. A rounded key
// is a key, but a rounded state would be wrong by as much wherever a token writes the difference of
// two values that are close.
#include <algorithm>

#include "cuda/device/cuda_status.h"
#include "cuda/device/ptx.cuh"
#include "cuda/linear_attention/linear_attention.h"
#include "cuda/linear_attention/state_math.cuh"

namespace oscar::cuda {
namespace {

constexpr int kTokens = kStateTileTokens, kDim = kChunkDim, kTaps = kChunkTaps;
constexpr int kPrepareWarps = 8, kScanWarps = 4, kNormWarps = 4;
constexpr int kRowStride = kDim + 8;  // BF16 elements in shared memory: ldmatrix without conflicts
constexpr int kSquareStride = kTokens + 4;  // floats

// Right operands (k, n) of a tile: [n / 8][k / 16][lane], two BF16 pairs, or high and low.
constexpr int kTokenTiles = kTokens / 8, kDimTiles = kDim / 8;
constexpr int kTokenSteps = kTokens / 16, kDimSteps = kDim / 16;

// Of a (tile, value head).
struct alignas(16) HeadWork {
  uint4 minus_w[kTokenTiles][kDimSteps][32];
  uint4 p[kTokenTiles][kTokenSteps][32];
  float4 u[kDim / 16][kTokenTiles][32];  // U^T as sums of mma.sync lie: [value dims, tokens]
  float decay[kTokens];                  // exp(G_i)
  float left[kTokens];                   // exp(G_n - G_i)
};
// Of a (tile, key head).
struct alignas(16) KeyWork {
  uint2 q[kTokenTiles][kDimSteps][32];
  uint2 k[kDimTiles][kTokenSteps][32];
};

struct ChunkParams {
  StateArguments args;
  const StateTile* tiles;
  const TileRange* ranges;
  HeadWork* head_work;  // [tiles at once, value heads]
  KeyWork* key_work;    // [tiles at once, key heads]
  float* ungated;       // [rows at once, value_width]
  uint16_t* out;
  int32_t first_tile, num_tiles, num_all;
  int32_t first_row, num_rows;
};

__device__ __forceinline__ float* StateOf(const StateArguments& args, int item) {
  return reinterpret_cast<float*>(args.arena + args.states[item] * args.place_bytes +
                                  args.layer_offset);
}

__device__ __forceinline__ float SumOfWarp(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// A pair of numbers as two pairs of BF16.
struct Split {
  uint32_t high, low;
};
__device__ __forceinline__ Split SplitPair(float x, float y) {
  const uint32_t high = PackBf16(x, y);
  return {high, PackBf16(x - Bf16Low(high), y - Bf16High(high))};
}

// A left operand of 16 rows and 16 k.
struct Left {
  uint32_t a[4];
};
__device__ __forceinline__ void Multiply(float (&c)[4], const Left& a, uint32_t b0, uint32_t b1) {
  MmaBf16(c, a.a[0], a.a[1], a.a[2], a.a[3], b0, b1);
}
// Two sums beside each other, 16 rows by 8 columns each, as a left operand of 16 k.
__device__ __forceinline__ void SplitSums(const float (&x)[4], const float (&y)[4], Left& high,
                                          Left& low) {
  const Split parts[4] = {SplitPair(x[0], x[1]), SplitPair(x[2], x[3]), SplitPair(y[0], y[1]),
                          SplitPair(y[2], y[3])};
#pragma unroll
  for (int i = 0; i < 4; ++i) high.a[i] = parts[i].high, low.a[i] = parts[i].low;
}
// Two sums (rows n, columns k: 8 each) as a right operand: for row half `half` of both.
__device__ __forceinline__ uint4 RightOf(const float (&x)[4], const float (&y)[4], int half) {
  const Split b0 = SplitPair(x[2 * half], x[2 * half + 1]);
  const Split b1 = SplitPair(y[2 * half], y[2 * half + 1]);
  return {b0.high, b1.high, b0.low, b1.low};
}

struct Prepared {
  uint16_t q[kTokens][kRowStride], k[kTokens][kRowStride], v[kTokens][kRowStride];
  float a[kTokens][kSquareStride], t[kTokens][kSquareStride];
  float product[3][16][17];
  float sums[kTokens], beta[kTokens], written[kTokens];  // G, beta, beta exp(G)
};

// q, k and v of the tile: convolution, SiLU, and the length of q and k; zeros behind its end.
__device__ void Convolve(const ChunkParams& p, const StateTile& tile, int head, Prepared& s) {
  const LinearAttentionSpec& spec = p.args.spec;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  constexpr int kEach = kTokens / kPrepareWarps;
  const int64_t width = spec.input_width();
  const int channels = spec.conv_channels();
  const int before = tile.row - p.args.chunks[tile.item].query_begin;  // rows of the sequence
  const float* const kept = StateOf(p.args, tile.item) + spec.matrix_floats();
  for (int part = 0; part < 3; ++part) {
    const HeadChannels at = ChannelsOf(spec, head, part);
    float4 weights[kTaps], window[kTaps];
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      weights[j] = *reinterpret_cast<const float4*>(p.args.weights.conv + j * channels +
                                                    at.channel + lane * 4);
    }
    const auto input_of = [&](int token) {
      const float* const from =
          before + token >= 0
              ? p.args.inputs + (tile.row + token) * width + at.input
              : kept + (kTaps - 1 + before + token) * int64_t{channels} + at.channel;
      return *reinterpret_cast<const float4*>(from + lane * 4);
    };
    const int first = warp * kEach;
#pragma unroll
    for (int j = 1; j < kTaps; ++j) {
      window[j] = first < tile.tokens ? input_of(first - kTaps + j) : make_float4(0, 0, 0, 0);
    }
    uint16_t* const to = (part == 0 ? s.q : part == 1 ? s.k : s.v)[first] + lane * 4;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      float4 x = make_float4(0, 0, 0, 0);
      if (first + i < tile.tokens) {
#pragma unroll
        for (int j = 0; j + 1 < kTaps; ++j) window[j] = window[j + 1];
        window[kTaps - 1] = input_of(first + i);
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
          x.x = fmaf(weights[j].x, window[j].x, x.x), x.y = fmaf(weights[j].y, window[j].y, x.y);
          x.z = fmaf(weights[j].z, window[j].z, x.z), x.w = fmaf(weights[j].w, window[j].w, x.w);
        }
        x = {Silu(x.x), Silu(x.y), Silu(x.z), Silu(x.w)};
        if (part < 2) {
          const float squares =
              SumOfWarp(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w) + kLengthEpsilon;
          const float factor =
              1.0f / sqrtf(part == 0 ? squares * static_cast<float>(kDim) : squares);
          x = {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
        }
      }
      *reinterpret_cast<uint2*>(to + i * kRowStride) = {PackBf16(x.x, x.y), PackBf16(x.z, x.w)};
    }
  }
}

// Gates of the tile's tokens: a warp. Tokens behind its end decay nothing and write nothing.
__device__ void Gates(const ChunkParams& p, const StateTile& tile, int head, int lane, Prepared& s,
                      HeadWork& work) {
  const LinearAttentionSpec& spec = p.args.spec;
  float sums[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = half * 32 + lane;
    float sum = 0.0f, beta = 0.0f;
    if (token < tile.tokens) {
      const float* const row = p.args.inputs + (tile.row + token) * int64_t{spec.input_width()};
      sum = -p.args.weights.decay_rate[head] *
            Softplus(row[spec.AOf(head)] + p.args.weights.step_bias[head]);
      beta = SigmoidOf(row[spec.BOf(head)]);
    }
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float other = __shfl_up_sync(~0u, sum, offset);
      if (lane >= offset) sum += other;
    }
    if (half == 1) sum += __shfl_sync(~0u, sums[0], 31);
    sums[half] = sum;
    s.sums[token] = sum;
    s.beta[token] = beta;
    s.written[token] = beta * Exp(sum);
    work.decay[token] = Exp(sum);
  }
  const float last = __shfl_sync(~0u, sums[1], 31);
#pragma unroll
  for (int half = 0; half < 2; ++half) work.left[half * 32 + lane] = Exp(last - sums[half]);
}

// A to shared memory and P to the workspace: warp (16 rows, 32 columns).
__device__ void Products(int warp, int lane, Prepared& s, HeadWork& work) {
  const int row_tile = warp / 2, column_half = warp % 2;
  if (column_half * 32 > row_tile * 16 + 15) return;  // above the diagonal; nobody reads it
  float kk[4][4] = {}, qk[4][4] = {};
#pragma unroll
  for (int step = 0; step < kDimSteps; ++step) {
    Left k, q;
    const int row = row_tile * 16 + lane % 16, at = step * 16 + lane / 16 * 8;
    LoadMatrix4(k.a, SharedAddress(&s.k[row][at]));
    LoadMatrix4(q.a, SharedAddress(&s.q[row][at]));
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t b[4];
      LoadMatrix4(b, SharedAddress(&s.k[column_half * 32 + pair * 16 + lane / 16 * 8 + lane % 8]
                                       [step * 16 + lane / 8 % 2 * 8]));
      Multiply(kk[2 * pair], k, b[0], b[1]);
      Multiply(kk[2 * pair + 1], k, b[2], b[3]);
      Multiply(qk[2 * pair], q, b[0], b[1]);
      Multiply(qk[2 * pair + 1], q, b[2], b[3]);
    }
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int i = row_tile * 16 + lane / 4 + c / 2 * 8;
      const int j = column_half * 32 + n * 8 + lane % 4 * 2 + c % 2;
      const float decay = j <= i ? Exp(s.sums[i] - s.sums[j]) : 0.0f;
      s.a[i][j] = j < i ? s.beta[i] * kk[n][c] * decay : 0.0f;
      qk[n][c] *= decay;
    }
  }
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      work.p[row_tile * 2 + half][column_half * 2 + pair][lane] =
          RightOf(qk[2 * pair], qk[2 * pair + 1], half);
    }
  }
}

// T = (I + A)^-1 in blocks of 16 x 16, those on the diagonal first; T is not written above them.
__device__ void Invert(int thread, Prepared& s) {
  if (thread < kTokens) {
    const int first = thread / 16 * 16, column = thread % 16;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < i; ++k) sum = fmaf(s.a[first + i][first + k], x[k], sum);
      x[i] = i == column ? 1.0f : -sum;  // sums above the diagonal are of zeros
      s.t[first + i][first + column] = x[i];
    }
  }
  __syncthreads();
  const int r = thread / 16, c = thread % 16;
  for (int distance = 1; distance < kTokens / 16; ++distance) {
    const int pairs = kTokens / 16 - distance;
    for (int b = 0; b < pairs; ++b) {
      const int row = (b + distance) * 16 + r, column = b * 16 + c;
      float sum = 0.0f;
      for (int k = b * 16; k < (b + distance) * 16; ++k) {
        sum = fmaf(s.a[row][k], s.t[k][column], sum);
      }
      s.product[b][r][c] = sum;
    }
    __syncthreads();
    for (int b = 0; b < pairs; ++b) {
      const int first = (b + distance) * 16;
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < 16; ++k) sum = fmaf(s.t[first + r][first + k], s.product[b][k][c], sum);
      s.t[first + r][b * 16 + c] = -sum;
    }
    __syncthreads();
  }
}

// -W: warp (16 tokens, 64 key dims).
__device__ void Keys(int warp, int lane, const Prepared& s, HeadWork& work) {
  const int row_tile = warp / 2, column_half = warp % 2;
  float w[8][4] = {};
  for (int step = 0; step <= row_tile; ++step) {
    Left high, low;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row_tile * 16 + lane / 4 + i % 2 * 8,
                j = step * 16 + lane % 4 * 2 + i / 2 * 8;
      const Split both =
          SplitPair(-s.t[row][j] * s.written[j], -s.t[row][j + 1] * s.written[j + 1]);
      high.a[i] = both.high;
      low.a[i] = both.low;
    }
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint32_t b[4];
      LoadMatrix4Transposed(
          b,
          SharedAddress(&s.k[step * 16 + lane % 16][column_half * 64 + pair * 16 + lane / 16 * 8]));
      Multiply(w[2 * pair], high, b[0], b[1]);
      Multiply(w[2 * pair], low, b[0], b[1]);
      Multiply(w[2 * pair + 1], high, b[2], b[3]);
      Multiply(w[2 * pair + 1], low, b[2], b[3]);
    }
  }
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      work.minus_w[row_tile * 2 + half][column_half * 4 + pair][lane] =
          RightOf(w[2 * pair], w[2 * pair + 1], half);
    }
  }
}

// U^T: warp (16 value dims).
__device__ void Values(int warp, int lane, const Prepared& s, HeadWork& work) {
  float u[kTokenTiles][4] = {};
#pragma unroll
  for (int step = 0; step < kTokenSteps; ++step) {
    Left v;
    LoadMatrix4Transposed(
        v.a,
        SharedAddress(&s.v[step * 16 + lane / 16 * 8 + lane % 8][warp * 16 + lane / 8 % 2 * 8]));
    const int j = step * 16 + lane % 4 * 2;
#pragma unroll
    for (int n = 2 * step; n < kTokenTiles; ++n) {
      const float* const row = s.t[n * 8 + lane / 4];
      const Split b0 = SplitPair(row[j] * s.beta[j], row[j + 1] * s.beta[j + 1]);
      const Split b1 = SplitPair(row[j + 8] * s.beta[j + 8], row[j + 9] * s.beta[j + 9]);
      Multiply(u[n], v, b0.high, b1.high);
      Multiply(u[n], v, b0.low, b1.low);
    }
  }
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    work.u[warp][n][lane] = {u[n][0], u[n][1], u[n][2], u[n][3]};
  }
}

__global__ void __launch_bounds__(kPrepareWarps * 32, 2) PrepareKernel(const ChunkParams p) {
  extern __shared__ __align__(16) std::byte shared[];
  Prepared& s = *reinterpret_cast<Prepared*>(shared);
  const LinearAttentionSpec& spec = p.args.spec;
  const int local = static_cast<int>(blockIdx.x) / spec.value_heads;
  const int head = static_cast<int>(blockIdx.x) % spec.value_heads;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const StateTile tile = p.tiles[p.first_tile + local];
  HeadWork& work = p.head_work[int64_t{local} * spec.value_heads + head];
  Convolve(p, tile, head, s);
  if (warp == 0) Gates(p, tile, head, lane, s, work);
  __syncthreads();
  Products(warp, lane, s, work);
  if (const int each = spec.values_per_key_head(); head % each == 0) {
    KeyWork& keys = p.key_work[int64_t{local} * spec.key_heads + head / each];
    for (int i = warp; i < kTokenTiles * kDimSteps; i += kPrepareWarps) {
      const int n = i / kDimSteps, step = i % kDimSteps;
      const uint16_t* const from = &s.q[n * 8 + lane / 4][step * 16 + lane % 4 * 2];
      keys.q[n][step][lane] = {*reinterpret_cast<const uint32_t*>(from),
                               *reinterpret_cast<const uint32_t*>(from + 8)};
    }
    for (int i = warp; i < kDimTiles / 2 * kTokenSteps; i += kPrepareWarps) {
      const int pair = i / kTokenSteps, step = i % kTokenSteps;
      uint32_t b[4];
      LoadMatrix4Transposed(b,
                            SharedAddress(&s.k[step * 16 + lane % 16][pair * 16 + lane / 16 * 8]));
      keys.k[2 * pair][step][lane] = {b[0], b[1]};
      keys.k[2 * pair + 1][step][lane] = {b[2], b[3]};
    }
  }
  __syncthreads();
  Invert(thread, s);
  Keys(warp, lane, s, work);
  Values(warp, lane, s, work);
}

// The inputs that the next tokens' convolutions see, when every tile of the sequence has read those
// of before: channels of a value head, and by the first of a key head those.
__device__ void KeepInputs(const ChunkParams& p, int item, int head) {
  const LinearAttentionSpec& spec = p.args.spec;
  const PrefillChunk chunk = p.args.chunks[item];
  const int channels = spec.conv_channels();
  const int64_t width = spec.input_width();
  float* const kept = StateOf(p.args, item) + spec.matrix_floats();
  for (int part = head % spec.values_per_key_head() == 0 ? 0 : 2; part < 3; ++part) {
    const HeadChannels at = ChannelsOf(spec, head, part);
    for (int i = static_cast<int>(threadIdx.x); i < kDim; i += kScanWarps * 32) {
      // From the oldest on: none is overwritten before it is moved.
      for (int j = 0; j < kTaps - 1; ++j) {
        const int from = chunk.query_tokens - (kTaps - 1) + j;
        kept[j * int64_t{channels} + at.channel + i] =
            from >= 0 ? p.args.inputs[(chunk.query_begin + from) * width + at.input + i]
                      : kept[(kTaps - 1 + from) * int64_t{channels} + at.channel + i];
      }
    }
  }
}

__global__ void __launch_bounds__(kScanWarps * 32) ScanKernel(const ChunkParams p) {
  const LinearAttentionSpec& spec = p.args.spec;
  const int part = static_cast<int>(blockIdx.x) % 2;
  const int head = static_cast<int>(blockIdx.x) / 2 % spec.value_heads;
  const int item = static_cast<int>(blockIdx.x) / 2 / spec.value_heads;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int dim_tile = part * kScanWarps + static_cast<int>(threadIdx.x) / 32;
  const TileRange range = p.ranges[item];
  const int begin = max(range.first, p.first_tile);
  const int end = min(range.first + range.count, p.first_tile + p.num_tiles);
  if (begin >= end) return;
  // S^T: rows are this warp's value dims.
  const int value = dim_tile * 16 + lane / 4, key = lane % 4 * 2;
  float* const state = StateOf(p.args, item) + int64_t{head} * kDim * kDim + value;
  float s[kDimTiles][4];
#pragma unroll
  for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) s[n][c] = state[(n * 8 + key + c % 2) * kDim + c / 2 * 8];
  }
  for (int t = begin; t < end; ++t) {
    const StateTile tile = p.tiles[t];
    const HeadWork& work = p.head_work[int64_t{t - p.first_tile} * spec.value_heads + head];
    const KeyWork& keys =
        p.key_work[int64_t{t - p.first_tile} * spec.key_heads + head / spec.values_per_key_head()];
    float v[kTokenTiles][4], o[kTokenTiles][4];
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const float4 u = __ldg(&work.u[dim_tile][n][lane]);
      v[n][0] = u.x, v[n][1] = u.y, v[n][2] = u.z, v[n][3] = u.w;
      o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
    }
#pragma unroll
    for (int step = 0; step < kDimSteps; ++step) {
      Left high, low;
      SplitSums(s[2 * step], s[2 * step + 1], high, low);
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        const uint4 w = __ldg(&work.minus_w[n][step][lane]);
        const uint2 q = __ldg(&keys.q[n][step][lane]);
        Multiply(v[n], high, w.x, w.y);
        Multiply(o[n], high, q.x, q.y);
        Multiply(v[n], low, w.x, w.y);
        Multiply(o[n], low, q.x, q.y);
        Multiply(v[n], high, w.z, w.w);
      }
    }
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const float2 decay = __ldg(reinterpret_cast<const float2*>(&work.decay[n * 8 + key]));
      o[n][0] *= decay.x, o[n][1] *= decay.y, o[n][2] *= decay.x, o[n][3] *= decay.y;
    }
#pragma unroll
    for (int step = 0; step < kTokenSteps; ++step) {
      Left high, low;
      SplitSums(v[2 * step], v[2 * step + 1], high, low);
#pragma unroll
      for (int n = 2 * step; n < kTokenTiles; ++n) {
        const uint4 w = __ldg(&work.p[n][step][lane]);
        Multiply(o[n], high, w.x, w.y);
        Multiply(o[n], low, w.x, w.y);
        Multiply(o[n], high, w.z, w.w);
      }
    }
    // Of the whole tile: tokens behind its end decay nothing.
    const float whole = __ldg(&work.decay[kTokens - 1]);
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) s[n][c] *= whole;
    }
#pragma unroll
    for (int step = 0; step < kTokenSteps; ++step) {
#pragma unroll
      for (int n = 2 * step; n < 2 * step + 2; ++n) {
        const float2 left = __ldg(reinterpret_cast<const float2*>(&work.left[n * 8 + key]));
        v[n][0] *= left.x, v[n][1] *= left.y, v[n][2] *= left.x, v[n][3] *= left.y;
      }
      Left high, low;
      SplitSums(v[2 * step], v[2 * step + 1], high, low);
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n) {
        const uint2 k = __ldg(&keys.k[n][step][lane]);
        Multiply(s[n], high, k.x, k.y);
        Multiply(s[n], low, k.x, k.y);
      }
    }
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int token = n * 8 + key + c % 2;
        if (token >= tile.tokens) continue;
        p.ungated[(tile.row + token - p.first_row) * int64_t{spec.value_width()} + head * kDim +
                  value + c / 2 * 8] = o[n][c];
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) state[(n * 8 + key + c % 2) * kDim + c / 2 * 8] = s[n][c];
  }
  if (part == 0 && end == range.first + range.count) KeepInputs(p, item, head);
}

__global__ void __launch_bounds__(kNormWarps * 32) NormKernel(const ChunkParams p) {
  const LinearAttentionSpec& spec = p.args.spec;
  const int64_t unit = int64_t{blockIdx.x} * kNormWarps + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row = unit / spec.value_heads;
  const int head = static_cast<int>(unit % spec.value_heads);
  if (row >= p.num_rows) return;
  const float4 o = *reinterpret_cast<const float4*>(p.ungated + unit * kDim + lane * 4);
  const float4 z = *reinterpret_cast<const float4*>(
      p.args.inputs + (p.first_row + row) * spec.input_width() + spec.ZOf(head) + lane * 4);
  const float4 norm = *reinterpret_cast<const float4*>(p.args.weights.norm + lane * 4);
  const float squares = SumOfWarp(o.x * o.x + o.y * o.y + o.z * o.z + o.w * o.w);
  const float factor = 1.0f / sqrtf(squares / static_cast<float>(kDim) + p.args.norm_epsilon);
  *reinterpret_cast<uint2*>(p.out + (p.first_row + row) * int64_t{spec.value_width()} +
                            head * kDim + lane * 4) = {
      PackBf16(o.x * factor * norm.x * Silu(z.x), o.y * factor * norm.y * Silu(z.y)),
      PackBf16(o.z * factor * norm.z * Silu(z.z), o.w * factor * norm.w * Silu(z.w))};
}

}  // namespace

bool HasStateChunks(const LinearAttentionSpec& spec) {
  return spec.key_dim == kDim && spec.value_dim == kDim && spec.conv_kernel == kTaps &&
         spec.input_width() % 4 == 0;
}

size_t StateChunkWorkspace(const LinearAttentionSpec& spec, int max_rows) {
  if (!HasStateChunks(spec)) return 0;
  const auto tiles = static_cast<size_t>(std::min(kStateTilesAtOnce, max_rows));
  const auto rows = static_cast<size_t>(std::min(kStateTilesAtOnce * kTokens, max_rows));
  return tiles * (static_cast<size_t>(spec.value_heads) * sizeof(HeadWork) +
                  static_cast<size_t>(spec.key_heads) * sizeof(KeyWork)) +
         rows * static_cast<size_t>(spec.value_width()) * sizeof(float);
}

Status LaunchStateChunks(const StateArguments& args, std::span<const StateTile> host_tiles,
                         const StateTile* tiles, const TileRange* ranges, void* workspace,
                         Bf16* out, Stream stream) {
  if (args.batch <= 0) return {};
  const LinearAttentionSpec& spec = args.spec;
  const auto heads = static_cast<unsigned>(spec.value_heads);
  OSCAR_RETURN_IF_ERROR(
      CudaStatus(cudaFuncSetAttribute(PrepareKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      sizeof(Prepared)),
                 "preparing linear attention"));
  ChunkParams params;
  params.args = args;
  params.tiles = tiles;
  params.ranges = ranges;
  params.out = reinterpret_cast<uint16_t*>(out);
  const int all = static_cast<int>(host_tiles.size());
  for (int first = 0; first < all; first += kStateTilesAtOnce) {
    const int count = std::min(kStateTilesAtOnce, all - first);
    const StateTile& last = host_tiles[static_cast<size_t>(first + count - 1)];
    params.first_tile = first;
    params.num_tiles = count;
    params.first_row = host_tiles[static_cast<size_t>(first)].row;
    params.num_rows = last.row + last.tokens - params.first_row;
    params.head_work = static_cast<HeadWork*>(workspace);
    params.key_work =
        reinterpret_cast<KeyWork*>(params.head_work + static_cast<size_t>(count) * heads);
    params.ungated = reinterpret_cast<float*>(
        params.key_work + static_cast<size_t>(count) * static_cast<size_t>(spec.key_heads));
    PrepareKernel<<<static_cast<unsigned>(count) * heads, kPrepareWarps * 32, sizeof(Prepared),
                    stream>>>(params);
    ScanKernel<<<static_cast<unsigned>(args.batch) * heads * 2, kScanWarps * 32, 0, stream>>>(
        params);
    const int64_t units = int64_t{params.num_rows} * spec.value_heads;
    NormKernel<<<static_cast<unsigned>((units + kNormWarps - 1) / kNormWarps), kNormWarps * 32, 0,
                 stream>>>(params);
    OSCAR_RETURN_IF_ERROR(CudaStatus(cudaGetLastError(), "launching linear attention"));
  }
  return {};
}

}  // namespace oscar::cuda
