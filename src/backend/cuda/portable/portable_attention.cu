// Built without contraction of products and sums (--fmad=false): a line of arithmetic here is the
// same line of simd/attention_prefill.cc, which is the specification.
//
// Grid       (query tokens / tokens a block, KV heads, chunks). A block takes up to 32 rows (token,
//            head) of one KV head past each page; a warp takes four of them in turn, a lane two of
//            a page's tokens in the logits and every 32nd dim in the outputs.
// Shared     one side of a page at a time, unpacked; the rows' queries in fp32 and 16 bits.
// Sums       "16 lanes" below are the CPU's: number i belongs to lane i % 16, a lane adds its
//            numbers in ascending order, lanes fold 8 apart first.
#include <algorithm>
#include <string>

#include "base/softmax_sink.h"
#include "cache/query_rounding.h"
#include "cuda/attention/head_blocks.h"
#include "cuda/device/cuda_status.h"
#include "cuda/device/launch.h"
#include "cuda/device/ptx.cuh"
#include "cuda/portable/portable_attention.h"
#include "quant/turboquant.h"

namespace oscar::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kMaxGroups = 8;
constexpr float kInt16Limit = 32767.0f;

struct Params {
  CacheView cache;
  const SequenceView* sequences;
  const PrefillChunk* chunks;
  const float* q;
  int64_t q_stride;
  float* out;
  float factor;        // softmax scale times log2 e
  const float* sinks;  // or null
  int32_t heads, kv_heads, tokens;
  int32_t sliding_window;       // 0: none
  BlockLayout history, window;  // history: of blocks that are alike
  HeadBlock blocks[kMaxMixedHeads];
  uint32_t norm_offset;  // FormBlocks
};

template <int kDim>
struct Shared {
  static constexpr int kRows = kDim > 128 ? 16 : 32;
  // q in steps, or what rounding left of it likewise.
  struct Part {
    int16_t codes[kRows][kDim];
    float step[kRows][kMaxGroups], sum[kRows][kMaxGroups], centre[kRows][kMaxGroups];
  };
  float q[kRows][kDim];  // times factor
  Part rounded, rest;
  float limit[kRows][kMaxGroups];
  // Of the side that is being read: scale and min of its tokens; BF16 rows or codes. Rows are
  // padded so that the same dim of 32 tokens lies in 32 banks.
  float scale[kMaxGroups][kPageTokens], min[kMaxGroups][kPageTokens];
  union {
    uint16_t rows[kPageTokens][kDim + 2];
    uint8_t codes[kPageTokens][kDim + 4];
  } page;
};

__device__ float MaxOfWarp(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  return x;
}
// ReduceSum of 16 lanes (a warp holds them twice).
__device__ float FoldLanes(float x) {
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}
// SumHeads of 16 lanes: eights, then neighbours.
__device__ float FoldHeads(float x) {
  x += __shfl_xor_sync(~0u, x, 8);
  x += __shfl_xor_sync(~0u, x, 1);
  x += __shfl_xor_sync(~0u, x, 2);
  return x + __shfl_xor_sync(~0u, x, 4);
}
// Exp2NotAbove0.
__device__ float Exp2(float x) {
  const float clamped = fmaxf(x, -126.0f);
  const float magic = 12582912.0f;
  const float shifted = clamped + magic;
  const float f = clamped - (shifted - magic);
  float p = 1.3264727246960714e-3f;
  p = fmaf(p, f, 9.67151268820033e-3f);
  p = fmaf(p, f, 5.550733743575124e-2f);
  p = fmaf(p, f, 2.402224208463437e-1f);
  p = fmaf(p, f, 6.93146977598715e-1f);
  p = fmaf(p, f, 1.0f);
  return __int_as_float(__float_as_int(p) + (__float_as_int(shifted) << 23));
}

// Numbers l, l + 16, l + 32, l + 48 of a page's 64, in lane l of both halves of a warp, from lanes
// that hold numbers (lane, lane + 32).
struct Four {
  float x[4];
};
__device__ Four ByLanes(float low, float high, int lane) {
  const float other_low = __shfl_xor_sync(~0u, low, 16);
  const float other_high = __shfl_xor_sync(~0u, high, 16);
  return lane < 16 ? Four{{low, other_low, high, other_high}}
                   : Four{{other_low, low, other_high, high}};
}

// The largest number's share of `limit` steps, as RoundedSteps.
struct Steps {
  float step, inverse;
  __device__ explicit Steps(float largest) {
    const float top = fmaxf(largest, 1e-30f);
    step = top / kInt16Limit;
    inverse = kInt16Limit / top;
  }
};

// QueryToInt16 of group [first, end): codes, step, sum, centre.
template <int kDim, typename Value>
__device__ void RoundQuery(const Params& p, const BlockLayout& history,
                           typename Shared<kDim>::Part& out, int row, int group, int lane,
                           bool is_rest, const Value& value) {
  const int first = group * history.group_dims(), end = first + history.group_dims();
  float largest = 0.0f;
  for (int d = first + lane; d < end; d += 32) largest = fmaxf(largest, fabsf(value(d)));
  const Steps steps(MaxOfWarp(largest));
  float sum = 0.0f, rounded = 0.0f;
  for (int d = first + lane % 16; d < end; d += 16) {
    const float x = value(d), n = rintf(x * steps.inverse);
    sum += x;
    rounded += n;
    out.codes[row][d] = static_cast<int16_t>(n);
  }
  sum = FoldLanes(sum) * steps.inverse;
  rounded = FoldLanes(rounded);
  if (is_rest) sum = 0.0f;
  out.step[row][group] = steps.step * p.factor;
  out.sum[row][group] = sum;
  out.centre[row][group] = StatisticsOf(history).middle * (sum - rounded);
}

template <int kDim>
__device__ void PrepareQuery(const Params& p, const BlockLayout& history, Shared<kDim>& s, int row,
                             const float* q, int lane) {
  for (int d = lane; d < kDim; d += 32) s.q[row][d] = q[d] * p.factor;
  const float noise = StatisticsOf(history).Noise(history.group_dims());
  for (int g = 0; g < history.num_groups(); ++g) {
    RoundQuery<kDim>(p, history, s.rounded, row, g, lane, false, [&](int d) { return q[d]; });
    s.limit[row][g] = ScaleLimit(history, s.rounded.step[row][g] * noise);
    const int first = g * history.group_dims(), end = first + history.group_dims();
    float largest = 0.0f;
    for (int d = first + lane; d < end; d += 32) largest = fmaxf(largest, fabsf(q[d]));
    const Steps steps(MaxOfWarp(largest));
    RoundQuery<kDim>(p, history, s.rest, row, g, lane, true,
                     [&](int d) { return fmaf(rintf(q[d] * steps.inverse), -steps.step, q[d]); });
  }
}

// One code of a side whose bits are data.
template <bool kValues>
__device__ uint32_t MixedCode(const BlockLayout& layout, const std::byte* block, int token,
                              int dim) {
  const auto read = [&](CodePosition at, int bits) {
    const uint32_t word = *reinterpret_cast<const uint32_t*>(block + at.offset);
    return word >> at.shift & ((1u << bits) - 1);
  };
  const int bits = kValues ? layout.v_bits() : layout.k_bits();
  const uint32_t low =
      read(kValues ? layout.VCode(token, dim) : layout.KCode(token, dim), bits == 3 ? 2 : bits);
  if (bits != 3) return low;
  return low | read(kValues ? layout.VHighBit(token, dim) : layout.KHighBit(token, dim), 1) << 2;
}

// One side of a page, tokens [0, valid) of it; the rest is zero. `history`: of packed pages.
// kMixed: its bits are data, and kKind means nothing.
template <BlockKind kKind, int kDim, bool kValues, bool kMixed = false>
__device__ void LoadSide(const BlockLayout& history, Shared<kDim>& s, const std::byte* block,
                         int valid) {
  constexpr BlockLayout kLayout(kKind, CodeOrder::kTensorCore, kDim, kDim);
  for (int i = static_cast<int>(threadIdx.x); i < kPageTokens * kDim; i += kWarps * 32) {
    const int token = i / kDim, dim = i % kDim;
    if constexpr (kMixed) {
      const uint32_t code = token < valid ? MixedCode<kValues>(history, block, token, dim) : 0u;
      s.page.codes[token][dim] = static_cast<uint8_t>(code);
      continue;
    }
    const CodePosition at = kValues ? kLayout.VCode(token, dim) : kLayout.KCode(token, dim);
    uint32_t word = 0;
    if (token < valid) {
      word = *reinterpret_cast<const uint32_t*>(block + at.offset) >> at.shift;
    }
    if constexpr (kKind == BlockKind::kBf16) {
      s.page.rows[token][dim] = static_cast<uint16_t>(word);
    } else {
      s.page.codes[token][dim] = static_cast<uint8_t>(word & ((1u << kLayout.bits()) - 1));
    }
  }
  if constexpr (kKind == BlockKind::kBf16) return;
  const BlockLayout& layout = history;
  for (int i = static_cast<int>(threadIdx.x); i < layout.num_groups() * kPageTokens;
       i += kWarps * 32) {
    const int g = i / kPageTokens, t = i % kPageTokens;
    const auto read = [&](uint32_t offset) {
      return ToFloat(Fp16{*reinterpret_cast<const uint16_t*>(block + offset)});
    };
    s.scale[g][t] = read(kValues ? layout.VScale(t, g) : layout.KScale(t, g));
    s.min[g][t] = read(kValues ? layout.VMin(t, g) : layout.KMin(t, g));
  }
}

// Keys that are not rows as floats, in [64][kDim + 1] (FloatKeys of simd/attention_tiles-inl.h).
template <int kDim>
__device__ void LoadFormKeys(const SealedBlock& from, const BlockLayout& layout, int valid,
                             float* keys) {
  const auto fp16 = [](const std::byte* at) {
    return ToFloat(Fp16{*reinterpret_cast<const uint16_t*>(at)});
  };
  const std::byte* const norms = from.Norms(layout);
  const float unit = CodebookFactor(layout.k_bits(), kDim, 1.0f);
  const int group_tokens = min(layout.group_tokens(), kPageTokens);
  for (int i = static_cast<int>(threadIdx.x); i < kPageTokens * kDim; i += kWarps * 32) {
    const int token = i / kDim, dim = i % kDim;
    float key = 0.0f;
    if (token < valid) {
      uint32_t code = MixedCode<false>(layout, from.block, token, dim);
      if (layout.k_form() == SideForm::kCodebook) {
        key = static_cast<float>(ByteLevel(layout.k_bits(), static_cast<int>(code))) *
              (fp16(from.block + layout.KRowNorm(token)) * unit);
      } else {
        const std::byte* const meta = from.MetaBlock(layout, dim);
        const int at = dim % layout.channel_dims(), group = token / group_tokens;
        if (layout.k_form() == SideForm::kMixed) {
          const int plane = static_cast<int>(meta[layout.KIndex(at)]);
          if (plane < layout.boosted_dims()) {
            const auto bits = static_cast<uint32_t>(
                from.block[layout.KBoost(plane) + static_cast<uint32_t>(token / 4)]);
            code += (bits >> token % 4 * 2 & 3u) << 2;
          }
        }
        key = fmaf(static_cast<float>(code), fp16(meta + layout.KChannelScale(group, at)),
                   fp16(meta + layout.KChannelMin(group, at)));
        if (norms != nullptr) key *= reinterpret_cast<const float*>(norms)[token];
      }
    }
    keys[token * (kDim + 1) + dim] = key;
  }
}
template <int kDim>
__device__ float2 FormLogits(const Shared<kDim>& s, const float* keys, int row, int lane) {
  float2 sum{0.0f, 0.0f};
#pragma unroll 16
  for (int d = 0; d < kDim; ++d) {
    sum.x = fmaf(s.q[row][d], keys[lane * (kDim + 1) + d], sum.x);
    sum.y = fmaf(s.q[row][d], keys[(lane + 32) * (kDim + 1) + d], sum.y);
  }
  return sum;
}

__device__ float Bf16At(const uint16_t* x) { return __uint_as_float(uint32_t{*x} << 16); }

// Logits of tokens lane and lane + 32, in base 2.
template <int kDim>
__device__ float2 PlainLogits(const Shared<kDim>& s, int row, int lane) {
  float2 sum{0.0f, 0.0f};
#pragma unroll 16
  for (int d = 0; d < kDim; ++d) {
    const float q = s.q[row][d];
    sum.x = fmaf(q, Bf16At(&s.page.rows[lane][d]), sum.x);
    sum.y = fmaf(q, Bf16At(&s.page.rows[lane + 32][d]), sum.y);
  }
  return sum;
}

template <int kDim>
__device__ float2 PackedLogits(const BlockLayout& history, const Shared<kDim>& s,
                               const typename Shared<kDim>::Part& q, int row, int lane,
                               float2 before) {
  const int width = history.group_dims();
  for (int g = 0; g < history.num_groups(); ++g) {
    int a = 0, b = 0;
#pragma unroll 4
    for (int d = g * width; d < (g + 1) * width; d += 4) {
      const int2 pairs = *reinterpret_cast<const int2*>(&q.codes[row][d]);
      const auto low = *reinterpret_cast<const uint32_t*>(&s.page.codes[lane][d]);
      const auto high = *reinterpret_cast<const uint32_t*>(&s.page.codes[lane + 32][d]);
      // Codes are below 16, so their bytes are the same with a sign.
      a = __dp2a_hi(pairs.y, static_cast<int>(low), __dp2a_lo(pairs.x, static_cast<int>(low), a));
      b = __dp2a_hi(pairs.y, static_cast<int>(high), __dp2a_lo(pairs.x, static_cast<int>(high), b));
    }
    const float centre = q.centre[row][g], sum = q.sum[row][g], step = q.step[row][g];
    const auto value = [&](int dot, int token, float from) {
      const float with_min =
          fmaf(static_cast<float>(dot) + centre, s.scale[g][token], s.min[g][token] * sum);
      return fmaf(with_min, step, from);
    };
    before.x = value(a, lane, before.x);
    before.y = value(b, lane + 32, before.y);
  }
  return before;
}

// kForms: keys of packed pages are not rows, and V's bits are data; kKind means nothing.
template <BlockKind kKind, int kDim, bool kMixed, bool kForms>
__global__ void __launch_bounds__(kWarps * 32) PortableKernel(const Params p) {
  using S = Shared<kDim>;
  constexpr int kRowsPerWarp = S::kRows / kWarps, kDims = kDim / 32;
  extern __shared__ uint4 memory[];
  S& s = *reinterpret_cast<S*>(memory);
  [[maybe_unused]] auto* const keys = reinterpret_cast<float*>(&s + 1);  // of kForms
  const SequenceView view = p.sequences[blockIdx.z];
  const PrefillChunk chunk =
      p.chunks != nullptr ? p.chunks[blockIdx.z] : PrefillChunk{static_cast<int>(blockIdx.z), 1};
  const int first = static_cast<int>(blockIdx.x) * p.tokens;
  const int count = min(p.tokens, chunk.query_tokens - first);
  if (count <= 0 || view.length() == 0) return;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int group = p.heads / p.kv_heads, rows = count * group;
  const int kv_head = static_cast<int>(blockIdx.y);
  const BlockLayout history =
      kMixed ? p.blocks[kv_head].Layout(kDim, p.history.group_dims()) : p.history;
  const int64_t start = view.length() - chunk.query_tokens + first;  // position of row 0's token
  const auto place = [&](int row) {                                  // token and head of a row
    return int2{chunk.query_begin + first + row / group, kv_head * group + row % group};
  };

  float m[kRowsPerWarp], d[kRowsPerWarp], alpha[kRowsPerWarp], o[kRowsPerWarp][kDims];
  float2 weight[kRowsPerWarp];
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    m[i] = -INFINITY;
    d[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < kDims; ++j) o[i][j] = 0.0f;
    const int row = warp + i * kWarps;
    if (row >= rows) continue;
    const int2 at = place(row);
    const float* const q = p.q + at.x * p.q_stride + int64_t{at.y} * kDim;
    if constexpr (kForms) {
      for (int j = lane; j < kDim; j += 32) s.q[row][j] = q[j] * p.factor;
    } else {
      PrepareQuery<kDim>(p, history, s, row, q, lane);
    }
  }

  const int sink_pages = (view.sink_tokens + kPageTokens - 1) / kPageTokens;
  const int64_t last = start + count - 1;
  // The first position that a token sees.
  const auto first_seen = [&](int64_t position) {
    const int64_t window = p.sliding_window;
    return window == 0 || position < window ? int64_t{0} : position - window + 1;
  };
  for (auto page = static_cast<int>(first_seen(start) / kPageTokens);
       int64_t{page} * kPageTokens <= last; ++page) {
    const int64_t begin = int64_t{page} * kPageTokens;
    const bool is_history = page >= sink_pages && page < sink_pages + view.history_pages;
    const bool packed = is_history && kKind != BlockKind::kBf16;
    const std::byte* block;
    [[maybe_unused]] SealedBlock from;
    if (is_history) {
      const int32_t* const ids =
          p.cache.history_table + int64_t{view.table_row} * p.cache.history_table_stride;
      const int32_t id = ids[page - sink_pages];
      block =
          p.cache.history_pool + id * p.cache.history_page_stride +
          (kMixed ? int64_t{p.blocks[kv_head].offset} : int64_t{kv_head} * p.history.block_bytes());
      if constexpr (kForms) {
        from.block = block;
        for (int i = 0; i < 2 && history.pages_together() > 1; ++i) {
          const int64_t of_pair = ids[(page - sink_pages) / 2 * 2 + i];
          from.pair[i] = p.cache.history_pool + of_pair * p.cache.history_page_stride +
                         int64_t{kv_head} * history.block_bytes();
        }
        if (p.norm_offset != 0) {
          from.norms = block - int64_t{kv_head} * history.block_bytes() + p.norm_offset;
        }
      }
    } else {
      const int entry =
          page < p.cache.sink_pages ? page : p.cache.sink_pages + page % p.cache.ring_pages;
      const int32_t id =
          p.cache.window_table[int64_t{view.table_row} * p.cache.window_table_stride + entry];
      block = p.cache.window_pool + id * p.cache.window_page_stride +
              int64_t{kv_head} * p.window.block_bytes();
    }
    const int valid = static_cast<int>(min(last + 1 - begin, int64_t{kPageTokens}));
    __syncthreads();
    if (packed && kForms) {
      LoadFormKeys<kDim>(from, history, valid, keys);
    } else if (packed) {
      LoadSide<kKind, kDim, false, kMixed>(history, s, block, valid);
    } else {
      LoadSide<BlockKind::kBf16, kDim, false>(history, s, block, valid);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      const int row = warp + i * kWarps;
      const int64_t visible = start + row / group + 1 - begin;
      const int64_t unseen = first_seen(start + row / group) - begin;  // of a window, before it
      if (row >= rows || visible <= 0 || unseen >= kPageTokens) continue;
      float2 logit{0.0f, 0.0f};
      if (packed && kForms) {
        logit = FormLogits<kDim>(s, keys, row, lane);
      } else if (packed) {
        logit = PackedLogits<kDim>(history, s, s.rounded, row, lane, logit);
        bool needed = false;
        for (int g = 0; g < history.num_groups(); ++g) {
          const float largest = MaxOfWarp(fmaxf(s.scale[g][lane], s.scale[g][lane + 32]));
          needed = needed || largest > s.limit[row][g];
        }
        if (needed) logit = PackedLogits<kDim>(history, s, s.rest, row, lane, logit);
      } else {
        logit = PlainLogits<kDim>(s, row, lane);
      }
      const bool sees_x = lane < visible && lane >= unseen;
      const bool sees_y = lane + 32 < visible && lane + 32 >= unseen;
      if (!sees_x) logit.x = -INFINITY;
      if (!sees_y) logit.y = -INFINITY;
      const float top = fmaxf(MaxOfWarp(fmaxf(logit.x, logit.y)), m[i]);
      alpha[i] = Exp2(m[i] - top);
      m[i] = top;
      weight[i] = {Exp2(logit.x - top), Exp2(logit.y - top)};
      const Four w = ByLanes(weight[i].x, weight[i].y, lane);
      d[i] = d[i] * alpha[i] + FoldHeads(((w.x[0] + w.x[1]) + w.x[2]) + w.x[3]);
      // They are 2^-126 so far, of rows that may be nowhere.
      if (p.sliding_window > 0 && !sees_x) weight[i].x = 0.0f;
      if (p.sliding_window > 0 && !sees_y) weight[i].y = 0.0f;
    }
    __syncthreads();
    if (packed) {
      LoadSide<kKind, kDim, true, kMixed || kForms>(history, s, block, valid);
    } else {
      LoadSide<BlockKind::kBf16, kDim, true>(history, s, block, valid);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      const int row = warp + i * kWarps;
      if (row >= rows || start + row / group < begin) continue;
      if (first_seen(start + row / group) - begin >= kPageTokens) continue;
      if (!packed) {
#pragma unroll
        for (int j = 0; j < kDims; ++j) o[i][j] *= alpha[i];
        for (int t = 0; t < kPageTokens; ++t) {
          const float w = __shfl_sync(~0u, t < 32 ? weight[i].x : weight[i].y, t % 32);
#pragma unroll
          for (int j = 0; j < kDims; ++j) {
            o[i][j] = fmaf(w, Bf16At(&s.page.rows[t][lane + 32 * j]), o[i][j]);
          }
        }
        continue;
      }
      const Four w = ByLanes(weight[i].x, weight[i].y, lane);
      const int width = history.group_dims() / 32;
      for (int g = 0; g < history.num_groups(); ++g) {
        const float2 scaled{weight[i].x * s.scale[g][lane], weight[i].y * s.scale[g][lane + 32]};
        float minimum = 0.0f;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          minimum = fmaf(w.x[k], s.min[g][lane % 16 + 16 * k], minimum);
        }
        minimum = FoldHeads(minimum);
        const Steps steps(fmaxf(MaxOfWarp(fmaxf(scaled.x, scaled.y)), 0.0f));
        const int low = min(__float2int_rn(scaled.x * steps.inverse), 32767);
        const int high = min(__float2int_rn(scaled.y * steps.inverse), 32767);
        int sum[kDims] = {};
        for (int t = 0; t < kPageTokens; ++t) {
          const int code = __shfl_sync(~0u, t < 32 ? low : high, t % 32);
#pragma unroll
          for (int j = 0; j < kDims; ++j) {
            if (j / width == g) sum[j] += code * s.page.codes[t][lane + 32 * j];
          }
        }
#pragma unroll
        for (int j = 0; j < kDims; ++j) {
          if (j / width != g) continue;
          o[i][j] = fmaf(o[i][j], alpha[i], fmaf(static_cast<float>(sum[j]), steps.step, minimum));
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int row = warp + i * kWarps;
    if (row >= rows) continue;
    const int2 at = place(row);
    const float inverse =
        p.sinks == nullptr ? 1.0f / d[i] : InverseWithSink(m[i], d[i], p.sinks[at.y]);
    float* out = p.out + (int64_t{at.x} * p.heads + at.y) * kDim;
#pragma unroll
    for (int j = 0; j < kDims; ++j) out[lane + 32 * j] = o[i][j] * inverse;
  }
}

struct Kernel {
  BlockKind kind;
  bool mixed, forms;
  int head_dim, rows, shared_bytes;
  const void* function;
};
template <BlockKind kKind, int kDim, bool kMixed = false, bool kForms = false>
constexpr Kernel KernelOf() {
  return {kKind,
          kMixed,
          kForms,
          kDim,
          Shared<kDim>::kRows,
          static_cast<int>(sizeof(Shared<kDim>)) + (kForms ? kPageTokens * (kDim + 1) * 4 : 0),
          reinterpret_cast<const void*>(&PortableKernel<kKind, kDim, kMixed, kForms>)};
}

}  // namespace

Result<PortableAttention> PortableAttention::Create(const AttentionShape& shape, bool mixed) {
#define OSCAR_X(dim)                                                              \
  KernelOf<BlockKind::kInt2, dim>(), KernelOf<BlockKind::kInt4, dim>(),           \
      KernelOf<BlockKind::kBf16, dim>(), KernelOf<BlockKind::kInt4, dim, true>(), \
      KernelOf<BlockKind::kInt4, dim, false, true>(),
  static const Kernel kKernels[] = {OSCAR_HEAD_DIMS(OSCAR_X)};
#undef OSCAR_X
  for (const Kernel& kernel : kKernels) {
    const bool forms = shape.form.has_value();
    const bool fits = kernel.forms == forms && kernel.mixed == mixed &&
                      (forms || mixed || kernel.kind == shape.history_kind);
    if (!fits || kernel.head_dim != shape.head_dim) continue;
    if (shape.group_size() > kernel.rows) break;
    PortableAttention self;
    self.shape_ = shape;
    self.mixed_ = mixed;
    self.kernel_ = kernel.function;
    self.shared_bytes_ = kernel.shared_bytes;
    self.tokens_ = kernel.rows / shape.group_size();
    OSCAR_RETURN_IF_ERROR(
        AllowSharedMemory(kernel.function, kernel.shared_bytes, "preparing portable attention"));
    return self;
  }
  return Unexpected(Unimplemented("no portable attention for head dim " +
                                  std::to_string(shape.head_dim) + " with " +
                                  std::to_string(shape.group_size()) + " query heads per KV head"));
}

Status PortableAttention::Launch(const PortableArguments& args, Stream stream) const {
  // What a launch's third dimension takes.
  constexpr int kMostChunks = 65535;
  Params params{args.cache,
                args.sequences,
                args.chunks,
                args.q,
                args.q_stride,
                args.out,
                args.softmax_scale * 1.4426950408889634f,
                args.sinks,
                shape_.num_q_heads,
                shape_.num_kv_heads,
                tokens_,
                shape_.sliding_window,
                shape_.history_layout(),
                shape_.window_layout(),
                {},
                shape_.form.has_value() ? shape_.form->norm_offset : 0};
  if (shape_.has_sinks != (args.sinks != nullptr)) {
    return InvalidArgument("portable attention: sinks that the shape does not have, or none");
  }
  if (mixed_) {
    OSCAR_RETURN_IF_ERROR(CheckHeads(shape_, args.heads));
    std::ranges::copy(args.heads, params.blocks);
  }
  if (args.batch == 0) return {};
  if (args.batch < 0 || args.batch > kMostChunks || args.max_query_tokens < 1) {
    return InvalidArgument("portable attention of more chunks than a launch takes");
  }
  const dim3 grid(static_cast<unsigned>((args.max_query_tokens + tokens_ - 1) / tokens_),
                  static_cast<unsigned>(shape_.num_kv_heads), static_cast<unsigned>(args.batch));
  void* kernel_args[] = {&params};
  return CudaStatus(cudaLaunchKernel(kernel_, grid, dim3(kWarps * 32), kernel_args,
                                     static_cast<size_t>(shared_bytes_), stream),
                    "launching portable attention");
}

}  // namespace oscar::cuda
