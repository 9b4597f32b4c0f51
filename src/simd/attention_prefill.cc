#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd/attention_prefill.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h

#include <algorithm>
#include <cstring>
#include <utility>

#include "simd/attention.h"
#include "simd/attention_codes-inl.h"
#include "simd/attention_products-inl.h"
#include "simd/attention_tiles-inl.h"

#if OSCAR_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {
namespace {

// Query rows (token, head) that share a decoded page: 64 tokens of 4 heads repay the decoding 256
// times over, and states and operands (about 450 KiB at D 128) stay in 1 MiB of L2.
constexpr int kMaxRows = 256;
// Of those, the ones that go from q to o together: their logits and weights stay in L1 between the
// products. A multiple of kBlockRows.
constexpr int kRowsAtOnce = 48;
constexpr float kInt16Limit = 32767.0f;
// Logit of a row that a token sees in the page's other form. Finite, because a token may see none
// of a form: what that adds is gone as soon as a real logit comes, of which the other form has one.
constexpr float kUnseen = -1e30f;

// q in 16 bits, or what rounding left of it, for a pass over packed pages.
struct RowCodes {
  uint16_t* codes;  // [rows, D] int16, in steps
  float* step;      // [rows, groups], times softmax scale and log2 e
  float* sum;       // [rows, groups] of q, in steps
  float* centre;    // [rows, groups]: what rounding took from sum, times the middle code
};

// One thread's memory. Rows are (token, head), head the faster index.
struct Scratch {
  int32_t* k_pairs;  // [D / 2, 64]
  int32_t* v_pairs;  // [32, D]
  float* k;          // [D, 64]
  float* v;          // [64, D]
  Bf16* page;        // [2, 64, D]: a page that is not yet full, padded
  TileMeta meta;
  float* q;          // [rows, D], times softmax scale and log2 e
  uint16_t* q_bf16;  // [rows, D], the same rounded
  RowCodes rounded;
  RowCodes rest;       // of the rows that some page needs it for
  float* scale_limit;  // [rows, groups]: the largest K scale for which `rounded` is enough
  float* o;            // [rows, D]
  float* p;            // [rows, 64]: logits, then weights
  uint16_t* weights;   // [groups, rows, 64]: p s int16 in steps; or p in BF16
  float* weight_step;  // [groups, rows]
  float* weight_min;   // [groups, rows]: sum of p min
  float* m;            // [rows]
  float* d;
  float* alpha;
  size_t floats;  // in all

  // Null pointers where `memory` is null: for the size alone.
  Scratch(float* memory, int head_dim, int num_groups) {
    const auto dims = static_cast<size_t>(head_dim), rows = static_cast<size_t>(kMaxRows);
    const auto groups = static_cast<size_t>(std::max(num_groups, 1));
    constexpr size_t kTokens = kPageTokens;
    floats = 0;
    const auto take = [&](size_t count) {
      const size_t at = std::exchange(floats, floats + (count + 15) / 16 * 16);
      return memory == nullptr ? nullptr : memory + at;
    };
    k_pairs = reinterpret_cast<int32_t*>(take(dims / 2 * kTokens));
    v_pairs = reinterpret_cast<int32_t*>(take(dims / 2 * kTokens));
    k = take(dims * kTokens);
    v = take(dims * kTokens);
    page = reinterpret_cast<Bf16*>(take(dims * kTokens));
    meta = {take(groups * kTokens), take(groups * kTokens), take(groups * kTokens),
            take(groups * kTokens)};
    q = take(rows * dims);
    q_bf16 = reinterpret_cast<uint16_t*>(take(rows * dims / 2));
    for (RowCodes* part : {&rounded, &rest}) {
      *part = {reinterpret_cast<uint16_t*>(take(rows * dims / 2)), take(rows * groups),
               take(rows * groups), take(rows * groups)};
    }
    scale_limit = take(rows * groups);
    o = take(rows * dims);
    p = take(rows * kTokens);
    weights = reinterpret_cast<uint16_t*>(take(groups * rows * kTokens / 2));
    weight_step = take(groups * rows);
    weight_min = take(groups * rows);
    m = take(rows);
    d = take(rows);
    alpha = take(rows);
  }
};

// Round to 16 bits and store 16 of them.
HWY_INLINE void StoreInt16(const F16x& x, uint16_t* out) {
  const I16x n = NearestInt(x);
  for (int i = 0; i < kParts; ++i) {
    const hn::Rebind<int16_t, DI> d16;
    hn::StoreU(hn::DemoteTo(d16, n.v[i]), d16, reinterpret_cast<int16_t*>(out) + i * kWidth);
  }
}

// q of one row in 16 bits, each group by its own step: a large dim coarsens its group alone.
// kRemainder: what the 16 bits left, likewise.
template <QueryPart kPart>
HWY_INLINE void QueryToInt16(const float* q, const BlockLayout& layout, float factor, int row,
                             const Scratch& s) {
  constexpr bool kRest = kPart == QueryPart::kRemainder;
  const CodeStatistics statistics = StatisticsOf(layout);
  const RowCodes& out = kRest ? s.rest : s.rounded;
  alignas(64) float rest[kMaxPageDims];
  for (int g = 0; g < layout.num_groups(); ++g) {
    const int first = g * layout.group_dims(), end = first + layout.group_dims();
    if constexpr (kRest) {
      const RoundedSteps steps(q, first, end, kInt16Limit);
      for (int d = first; d < end; d += 16) Store(steps.Left(q + d), rest + d);
    }
    const float* x = kRest ? rest : q;
    const RoundedSteps steps(x, first, end, kInt16Limit);
    F16x sum = Set(0.0f), rounded = Set(0.0f);
    for (int d = first; d < end; d += 16) {
      const F16x n = steps.Of(x + d);
      sum = Add(sum, Load(x + d));
      rounded = Add(rounded, n);
      StoreInt16(n, out.codes + row * layout.head_dim() + d);
    }
    const int at = row * layout.num_groups() + g;
    out.step[at] = steps.step * factor;
    out.sum[at] = kRest ? 0.0f : ReduceSum(sum) * steps.inverse;
    out.centre[at] = statistics.middle * (out.sum[at] - ReduceSum(rounded));
    if constexpr (!kRest) {
      s.scale_limit[at] = ScaleLimit(layout, out.step[at] * statistics.Noise(layout.group_dims()));
    }
  }
}

template <int kRows, int kVectors>
HWY_INLINE void Clear(I16x (&sum)[kRows][kVectors]) {
  OSCAR_UNROLL
  for (int r = 0; r < kRows; ++r) {
    OSCAR_UNROLL
    for (int v = 0; v < kVectors; ++v) sum[r][v] = SetInt(0);
  }
}

// Logits in base 2 of rows [first, end) against a packed page: s_t (q . code_t) + min_t sum(q). A
// remainder adds to the logits of the rows that need it.
template <PairOp kOp, QueryPart kPart>
HWY_NOINLINE void PackedLogits(const BlockLayout& layout, const Scratch& s, const bool* needed,
                               int first, int end) {
  constexpr bool kRest = kPart == QueryPart::kRemainder;
  const RowCodes& q = kRest ? s.rest : s.rounded;
  const int dims = layout.head_dim(), width = layout.group_dims(), groups = layout.num_groups();
  ForRowBlocks(end - first, [&]<int kRows>(int block) HWY_ATTR {
    const int row = first + block;
    if (kRest && std::none_of(needed + row, needed + row + kRows, [](bool x) { return x; })) return;
    for (int t = 0; t < kPageTokens; t += 16 * kBlockVectors) {
      for (int g = 0; g < groups; ++g) {
        I16x sum[kRows][kBlockVectors];
        Clear(sum);
        PairProduct<kOp>(q.codes + row * dims + g * width, static_cast<size_t>(dims / 2),
                         s.k_pairs + g * width / 2 * kPageTokens + t, kPageTokens, width / 2, sum);
        OSCAR_UNROLL
        for (int v = 0; v < kBlockVectors; ++v) {
          const F16x scale = Load(s.meta.k_scale + g * kPageTokens + t + v * 16);
          const F16x min = Load(s.meta.k_min + g * kPageTokens + t + v * 16);
          OSCAR_UNROLL
          for (int r = 0; r < kRows; ++r) {
            if (kRest && !needed[row + r]) continue;
            const int at = (row + r) * groups + g;
            const F16x dot = Add(ToFloat(sum[r][v]), Set(q.centre[at]));
            const F16x value = MulAdd(dot, scale, Mul(min, Set(q.sum[at])));
            float* out = s.p + (row + r) * kPageTokens + t + v * 16;
            const F16x before = g == 0 && !kRest ? Set(0.0f) : Load(out);
            Store(MulAdd(value, Set(q.step[at]), before), out);
          }
        }
      }
    }
  });
}

// o = alpha o + sum (p_t s_t) code_t + sum p_t min_t, the dims of one group.
template <PairOp kOp, int kVectors>
HWY_NOINLINE void PackedValues(const BlockLayout& layout, int group, const Scratch& s, int first,
                               int end) {
  const int dims = layout.head_dim(), width = layout.group_dims();
  const uint16_t* weights = s.weights + group * kMaxRows * kPageTokens;
  for (int d = group * width; d < (group + 1) * width; d += 16 * kVectors) {
    ForRowBlocks(end - first, [&]<int kRows>(int block) HWY_ATTR {
      const int row = first + block;
      I16x sum[kRows][kVectors];
      Clear(sum);
      PairProduct<kOp>(weights + row * kPageTokens, kPageTokens / 2, s.v_pairs + d,
                       static_cast<size_t>(dims), kPageTokens / 2, sum);
      OSCAR_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const F16x step = Set(s.weight_step[group * kMaxRows + row + r]);
        const F16x min = Set(s.weight_min[group * kMaxRows + row + r]);
        const F16x alpha = Set(s.alpha[row + r]);
        OSCAR_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          float* out = s.o + (row + r) * dims + d + v * 16;
          const F16x value = MulAdd(ToFloat(sum[r][v]), step, min);
          Store(MulAdd(Load(out), alpha, value), out);
        }
      }
    });
  }
}

// Rows against a page of BF16 rows, in pairs of BF16 or in fp32.
template <bool kBf16>
HWY_NOINLINE void PlainLogits(int dims, const Scratch& s, int first, int end) {
  ForRowBlocks(end - first, [&]<int kRows>(int block) HWY_ATTR {
    const int row = first + block;
    for (int t = 0; t < kPageTokens; t += 16 * kBlockVectors) {
      F16x logits[kRows][kBlockVectors];
#if HWY_TARGET == HWY_AVX3
      if constexpr (kBf16) {
        I16x sum[kRows][kBlockVectors];
        Clear(sum);
        PairProduct<PairOp::kBf16>(s.q_bf16 + row * dims, static_cast<size_t>(dims / 2),
                                   s.k_pairs + t, kPageTokens, dims / 2, sum);
        OSCAR_UNROLL
        for (int r = 0; r < kRows; ++r) {
          OSCAR_UNROLL
          for (int v = 0; v < kBlockVectors; ++v) logits[r][v] = BitsToFloat(sum[r][v]);
        }
      }
#endif
      if constexpr (!kBf16) {
        OSCAR_UNROLL
        for (int r = 0; r < kRows; ++r) {
          OSCAR_UNROLL
          for (int v = 0; v < kBlockVectors; ++v) logits[r][v] = Set(0.0f);
        }
        FloatProduct(s.q + row * dims, static_cast<size_t>(dims), s.k + t, kPageTokens, dims,
                     logits);
      }
      OSCAR_UNROLL
      for (int r = 0; r < kRows; ++r) {
        OSCAR_UNROLL
        for (int v = 0; v < kBlockVectors; ++v) {
          Store(logits[r][v], s.p + (row + r) * kPageTokens + t + v * 16);
        }
      }
    }
  });
}

template <bool kBf16>
HWY_NOINLINE void PlainValues(int dims, const Scratch& s, int first, int end) {
  for (int d = 0; d < dims; d += 16 * kBlockVectors) {
    ForRowBlocks(end - first, [&]<int kRows>(int block) HWY_ATTR {
      const int row = first + block;
      F16x out[kRows][kBlockVectors];
      OSCAR_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const F16x alpha = Set(s.alpha[row + r]);
        OSCAR_UNROLL
        for (int v = 0; v < kBlockVectors; ++v) {
          out[r][v] = Mul(Load(s.o + (row + r) * dims + d + v * 16), alpha);
        }
      }
#if HWY_TARGET == HWY_AVX3
      if constexpr (kBf16) {
        I16x sum[kRows][kBlockVectors];
        OSCAR_UNROLL
        for (int r = 0; r < kRows; ++r) {
          OSCAR_UNROLL
          for (int v = 0; v < kBlockVectors; ++v) sum[r][v] = FloatBits(out[r][v]);
        }
        PairProduct<PairOp::kBf16>(s.weights + row * kPageTokens, kPageTokens / 2, s.v_pairs + d,
                                   static_cast<size_t>(dims), kPageTokens / 2, sum);
        OSCAR_UNROLL
        for (int r = 0; r < kRows; ++r) {
          OSCAR_UNROLL
          for (int v = 0; v < kBlockVectors; ++v) out[r][v] = BitsToFloat(sum[r][v]);
        }
      }
#endif
      if constexpr (!kBf16) {
        FloatProduct(s.p + row * kPageTokens, kPageTokens, s.v + d, static_cast<size_t>(dims),
                     kPageTokens, out);
      }
      OSCAR_UNROLL
      for (int r = 0; r < kRows; ++r) {
        OSCAR_UNROLL
        for (int v = 0; v < kBlockVectors; ++v) {
          Store(out[r][v], s.o + (row + r) * dims + d + v * 16);
        }
      }
    });
  }
}

enum class Weights : uint8_t { kFloat, kBf16, kCodes };
enum class PageRows : uint8_t { kAll, kBeforeWindow, kInWindow };

#if HWY_TARGET == HWY_AVX3
// Rounds to BF16, stores, and gives back what was stored.
HWY_INLINE F16x RoundToBf16(const F16x& x, uint16_t* out) {
  __m256i half;
  asm("vcvtneps2bf16 %1, %0" : "=v"(half) : "v"(x.v[0].raw));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), half);
  const VI words{_mm512_cvtepu16_epi32(half)};
  return F16x{{hn::BitCast(DF(), hn::ShiftLeft<16>(words))}};
}
#endif

// The online softmax of kRows rows from `row` on, whose chains overlap: logits become weights in
// the form that the product with V wants. A row's numbers depend on that row alone.
template <Weights kForm, int kRows>
HWY_INLINE void SoftmaxRows(const Scratch& s, int row, int num_groups) {
  static_assert(kRows <= kMaxBlockHeads);
  float* const p = s.p + row * kPageTokens;
  F16x largest[kRows];
  OSCAR_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const float* l = p + r * kPageTokens;
    largest[r] = Max(Max(Load(l), Load(l + 16)), Max(Load(l + 32), Load(l + 48)));
  }
  float top[kMaxBlockHeads], sums[kMaxBlockHeads];
  MaxHeads<kRows>(largest, top);
  alignas(64) float change[16] = {};
  OSCAR_UNROLL
  for (int r = 0; r < kRows; ++r) {
    top[r] = std::max(top[r], s.m[row + r]);
    change[r] = s.m[row + r] - top[r];
    s.m[row + r] = top[r];
  }
  Store(Exp2NotAbove0(Load(change)), change);
  F16x sum[kRows];
  OSCAR_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const F16x shift = Set(top[r]);
    sum[r] = Set(0.0f);
    for (int i = 0; i < kPageTokens; i += 16) {
      F16x weight = Exp2NotAbove0(Sub(Load(p + r * kPageTokens + i), shift));
#if HWY_TARGET == HWY_AVX3
      if constexpr (kForm == Weights::kBf16) {
        weight = RoundToBf16(weight, s.weights + (row + r) * kPageTokens + i);
      }
#endif
      if constexpr (kForm != Weights::kBf16) Store(weight, p + r * kPageTokens + i);
      sum[r] = Add(sum[r], weight);
    }
  }
  SumHeads<kRows>(sum, sums);
  OSCAR_UNROLL
  for (int r = 0; r < kRows; ++r) {
    s.alpha[row + r] = change[r];
    s.d[row + r] = s.d[row + r] * change[r] + sums[r];
  }
  if constexpr (kForm != Weights::kCodes) return;
  for (int g = 0; g < num_groups; ++g) {
    const float* scale = s.meta.v_scale + g * kPageTokens;
    const float* min = s.meta.v_min + g * kPageTokens;
    F16x minimum[kRows];
    OSCAR_UNROLL
    for (int r = 0; r < kRows; ++r) {
      largest[r] = minimum[r] = Set(0.0f);
      for (int i = 0; i < kPageTokens; i += 16) {
        const F16x weight = Load(p + r * kPageTokens + i);
        largest[r] = Max(largest[r], Mul(weight, Load(scale + i)));
        minimum[r] = MulAdd(weight, Load(min + i), minimum[r]);
      }
    }
    MaxHeads<kRows>(largest, top);
    SumHeads<kRows>(minimum, sums);
    OSCAR_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float bound = std::max(top[r], 1e-30f);
      const int at = g * kMaxRows + row + r;
      s.weight_step[at] = bound / kInt16Limit;
      s.weight_min[at] = sums[r];
      const F16x inverse = Set(kInt16Limit / bound);
      for (int i = 0; i < kPageTokens; i += 16) {
        StoreInt16(Mul(Mul(Load(p + r * kPageTokens + i), Load(scale + i)), inverse),
                   s.weights + at * kPageTokens + i);
      }
    }
  }
}

template <Weights kForm>
HWY_NOINLINE void Softmax(const Scratch& s, int first, int end, int num_groups) {
  int r = first;
  for (; r + 4 <= end; r += 4) SoftmaxRows<kForm, 4>(s, r, num_groups);
  for (; r < end; ++r) SoftmaxRows<kForm, 1>(s, r, num_groups);
}

}  // namespace

// Floats of scratch that one thread needs.
size_t PrefillScratchSize(int dims, int num_groups) {
  return Scratch(nullptr, dims, num_groups).floats;
}
int PrefillTokensPerTask(int heads) { return std::max(1, kMaxRows / heads); }

// Query tokens [first, first + count) of `query`, heads [head, head + heads) of one KV head.
template <PairOp kOp, bool kBf16>
void PrefillBlock(const AttentionLayer& layer, const PrefillQuery& query, int kv_head, int head,
                  int heads, int first, int count, float* memory) {
  constexpr float kLog2E = 1.4426950408889634f;
  const int dims = layer.head_dim(), rows = heads * count;
  const BlockLayout& stored = layer.Stored(kv_head);
  const int groups = stored.num_groups();
  const float factor = layer.softmax_scale * kLog2E;
  const Scratch s(memory, dims, groups);
  const auto query_of = [&](int r) {
    return query.q + static_cast<size_t>(first + r / heads) * query.q_stride +
           (head + r % heads) * dims;
  };
  for (int r = 0; r < rows; ++r) {
    const float* source = query_of(r);
    for (int j = 0; j < dims; j += 16) {
      const F16x scaled = Mul(Load(source + j), Set(factor));
      if constexpr (kBf16) {
        StoreBf16(scaled, reinterpret_cast<Bf16*>(s.q_bf16) + r * dims + j);
      }
      if (!kBf16 || !stored.is_rows()) Store(scaled, s.q + r * dims + j);
    }
    if (stored.is_rows()) QueryToInt16<QueryPart::kRounded>(source, stored, factor, r, s);
  }
  // Rows for which 16 bits of q are not enough on a page, and those whose remainder is ready. Each
  // row for itself: its numbers depend on no other.
  bool needed[kMaxRows], ready[kMaxRows] = {};
  const auto find_needed = [&](int first_row) HWY_ATTR {
    bool any = false;
    for (int g = 0; g < groups; ++g) {
      const float* k_scale = s.meta.k_scale + g * kPageTokens;
      const float largest = ReduceMax(
          Max(Max(Load(k_scale), Load(k_scale + 16)), Max(Load(k_scale + 32), Load(k_scale + 48))));
      for (int r = first_row; r < rows; ++r) {
        const bool exceeds = largest > s.scale_limit[r * groups + g];
        needed[r] = g == 0 ? exceeds : needed[r] || exceeds;
        any = any || exceeds;
      }
    }
    for (int r = first_row; any && r < rows; ++r) {
      if (!needed[r] || ready[r]) continue;
      QueryToInt16<QueryPart::kRemainder>(query_of(r), stored, factor, r, s);
      ready[r] = true;
    }
    return any;
  };
  std::fill_n(s.m, rows, kEmptyMax);
  std::fill_n(s.d, rows, 0.0f);
  std::fill_n(s.o, rows * dims, 0.0f);

  const int64_t block_start = query.first_position + first;
  const int64_t last_position = block_start + count - 1;
  // Rows of one page, in one of its forms. Token p sees positions of it up to p, less those that
  // `window` gives to the other form.
  const auto read_page = [&](int64_t page, const SealedBlock& from, const BlockLayout& layout,
                             PageRows seen) HWY_ATTR {
    const std::byte* const block = from.block;
    const int64_t page_start = page * kPageTokens;
    // Tokens before this page's start see nothing of it.
    const int skip = static_cast<int>(std::clamp<int64_t>(page_start - block_start, 0, count));
    const int first_row = skip * heads;
    // Nor do those whose window begins behind it; a row of any other sees some of it.
    const int end_row =
        layer.window == 0
            ? rows
            : heads * static_cast<int>(std::clamp<int64_t>(
                          page_start + kPageTokens + layer.window - 1 - block_start, 0, count));
    // What a row does not see of it, where there is a window.
    const auto for_unseen = [&](int r, const auto& body) {
      const int64_t position = block_start + r / heads;
      const int64_t begin = std::min<int64_t>(layer.FirstSeen(position) - page_start, kPageTokens);
      for (int64_t t = 0; t < begin; ++t) body(t);
      for (int64_t t = position + 1 - page_start; t < kPageTokens; ++t) body(t);
    };
    // Tokens before its end see a part of it.
    const auto mask = [&](int row, int end) {
      for (int r = row; r < end; ++r) {
        const int64_t visible = block_start + r / heads + 1 - page_start;
        float* const p = s.p + r * kPageTokens;
        if (layer.window > 0) {
          for_unseen(r, [&](int64_t t) { p[t] = kEmptyMax; });
          continue;
        }
        if (seen == PageRows::kAll) {
          if (visible >= kPageTokens) return;
          for (int64_t t = visible; t < kPageTokens; ++t) p[t] = kEmptyMax;
          continue;
        }
        const auto end_of_page = static_cast<int>(std::min<int64_t>(visible, kPageTokens));
        const auto end_of_old =
            static_cast<int>(std::clamp<int64_t>(visible - query.window.tokens, 0, kPageTokens));
        const auto end_of_sink =
            static_cast<int>(std::clamp<int64_t>(query.window.sink - page_start, 0, end_of_old));
        const bool is_old = seen == PageRows::kBeforeWindow;
        for (int t = 0; t < kPageTokens; ++t) {
          const bool old = t >= end_of_sink && t < end_of_old;
          if (old != is_old || t >= end_of_page) p[t] = kUnseen;
        }
      }
    };
    if (layout.is_bf16()) {
      const auto* k = reinterpret_cast<const Bf16*>(block);
      const auto* v = reinterpret_cast<const Bf16*>(block + layout.v_codes_offset());
      if (last_position + 1 - page_start < kPageTokens) {
        // What lies behind the last token is not a number yet.
        const auto used =
            static_cast<size_t>(last_position + 1 - page_start) * static_cast<size_t>(dims);
        const auto all = static_cast<size_t>(kPageTokens * dims);
        std::memset(s.page, 0, 2 * all * sizeof(Bf16));
        k = std::copy_n(k, used, s.page) - used;
        v = std::copy_n(v, used, s.page + all) - used;
      }
      if constexpr (kBf16) {
        PairRows(k, v, dims, s.k_pairs, s.v_pairs);
      } else {
        FloatRows(k, v, dims, s.k_pairs, s.k, s.v);
      }
      for (int row = first_row; row < end_row; row += kRowsAtOnce) {
        const int end = std::min(end_row, row + kRowsAtOnce);
        PlainLogits<kBf16>(dims, s, row, end);
        mask(row, end);
        Softmax<kBf16 ? Weights::kBf16 : Weights::kFloat>(s, row, end, 0);
        // Their weights are 2^-126 so far, of rows that other chunks may not have read.
        for (int r = row; layer.window > 0 && r < end; ++r) {
          for_unseen(r, [&](int64_t t) {
            if constexpr (kBf16) {
              s.weights[r * kPageTokens + t] = 0;
            } else {
              s.p[r * kPageTokens + t] = 0.0f;
            }
          });
        }
        PlainValues<kBf16>(dims, s, row, end);
      }
      return;
    }
    UnpackValues(layout, block, s.v_pairs, s.meta);
    bool any_needed = false;
    if (layout.is_rows()) {
      UnpackKeys(layout, block, s.k_pairs);
      any_needed = find_needed(first_row);
    } else {
      FloatKeys(layout, from, s.k_pairs, s.k);
    }
    for (int row = first_row; row < rows; row += kRowsAtOnce) {
      const int end = std::min(rows, row + kRowsAtOnce);
      if (layout.is_rows()) {
        PackedLogits<kOp, QueryPart::kRounded>(layout, s, needed, row, end);
      } else {
        PlainLogits<false>(dims, s, row, end);
      }
      if (any_needed) PackedLogits<kOp, QueryPart::kRemainder>(layout, s, needed, row, end);
      mask(row, end);
      Softmax<Weights::kCodes>(s, row, end, groups);
      for (int g = 0; g < groups; ++g) {
        if (layout.group_dims() % (16 * kBlockVectors) == 0) {
          PackedValues<kOp, kBlockVectors>(layout, g, s, row, end);
        } else {
          PackedValues<kOp, 2>(layout, g, s, row, end);
        }
      }
    }
  };
  for (int64_t page = layer.FirstSeen(block_start) / kPageTokens;
       page * kPageTokens <= last_position; ++page) {
    const bool sealed = query.sequence.is_sealed[page] != 0;
    const BlockLayout& layout = sealed ? stored : layer.open;
    const SealedBlock block =
        sealed ? layer.Sealed(query.sequence.pages, page, kv_head)
               : SealedBlock{.block = layer.Block(query.sequence.pages[page], false, kv_head)};
    const std::byte* const twin = page < query.window.count ? query.window.pages[page] : nullptr;
    if (twin == nullptr) {
      read_page(page, block, layout, PageRows::kAll);
      continue;
    }
    const size_t in_twin =
        layer.sealed[static_cast<size_t>(kv_head)].offset - layer.sealed[0].offset;
    SealedBlock old{.block = twin + in_twin};
    if (stored.pages_together() > 1) {
      const std::byte* const first =
          old.block - static_cast<size_t>(layer.IndexInRun(page)) * query.window.stride;
      old.pair[0] = first;
      old.pair[1] = first + query.window.stride;
    }
    if (layer.has_norms) old.norms = twin + (layer.norm_offset - layer.sealed[0].offset);
    read_page(page, old, stored, PageRows::kBeforeWindow);
    read_page(page, block, layout, PageRows::kInWindow);
  }
  for (int r = 0; r < rows; ++r) {
    float* target = query.out + static_cast<size_t>(first + r / heads) * query.out_stride +
                    (head + r % heads) * dims;
    const float sink = layer.sinks == nullptr ? kEmptyMax : layer.sinks[head + r % heads];
    const F16x inverse = Set(AttentionState::InverseOf(s.m[r], s.d[r], sink));
    for (int j = 0; j < dims; j += 16) Store(Mul(Load(s.o + r * dims + j), inverse), target + j);
  }
}

using PrefillFunction = void (*)(const AttentionLayer&, const PrefillQuery&, int, int, int, int,
                                 int, float*);
PrefillFunction ChoosePrefill([[maybe_unused]] bool vnni, [[maybe_unused]] bool bf16) {
#if HWY_TARGET == HWY_AVX3
  if (vnni) {
    return bf16 ? &PrefillBlock<PairOp::kVnni, true> : &PrefillBlock<PairOp::kVnni, false>;
  }
#endif
  return &PrefillBlock<PairOp::kMadd, false>;
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OSCAR_SIMD_TARGET

#if HWY_ONCE
#include <vector>

#include "base/check.h"
#include "simd/dispatch.h"
#include "simd/gemm_kernels.h"

namespace oscar::simd {

void PrefillAttention(ThreadPool& pool, AttentionWorkspace& workspace, const AttentionLayer& layer,
                      std::span<const PrefillQuery> batch) {
  OSCAR_CHECK(layer.IsValid());
  const int dims = layer.head_dim(), g = layer.q_heads / layer.kv_heads;
  const Target target = ActiveTarget();
  const bool avx2 = target == Target::kAvx2;
  const auto run =
      avx2 ? N_AVX2::ChoosePrefill(false, false)
           : N_AVX3::ChoosePrefill(HasVnni(target), layer.bf16_products && HasAvx512Bf16());
  const int tokens_per_task =
      avx2 ? N_AVX2::PrefillTokensPerTask(g) : N_AVX3::PrefillTokensPerTask(g);
  struct Task {
    const PrefillQuery* query;
    int kv_head, first, count;
  };
  std::vector<Task> tasks;
  for (const PrefillQuery& query : batch) {
    // The last tokens see most; taking them first keeps the threads busy to the end. Fewer tokens
    // a task where the chunk alone would not occupy the threads: rows do not depend on it.
    const int wanted =
        (query.num_tokens * layer.kv_heads + pool.num_threads() * 2 - 1) / (pool.num_threads() * 2);
    const int step = std::clamp(wanted, 1, tokens_per_task);
    const int blocks = (query.num_tokens + step - 1) / step;
    for (int b = blocks - 1; b >= 0; --b) {
      for (int h = 0; h < layer.kv_heads; ++h) {
        tasks.push_back({&query, h, b * step, std::min(step, query.num_tokens - b * step)});
      }
    }
  }
  const int groups = layer.num_groups();
  const size_t scratch =
      avx2 ? N_AVX2::PrefillScratchSize(dims, groups) : N_AVX3::PrefillScratchSize(dims, groups);
  workspace.scratch.Grow(scratch * static_cast<size_t>(pool.num_threads()));
  pool.ParallelFor(static_cast<int64_t>(tasks.size()), [&](int64_t i, int thread) {
    const Task& task = tasks[static_cast<size_t>(i)];
    run(layer, *task.query, task.kv_head, task.kv_head * g, g, task.first, task.count,
        workspace.scratch.data() + static_cast<size_t>(thread) * scratch);
  });
}

}  // namespace oscar::simd
#endif  // HWY_ONCE
