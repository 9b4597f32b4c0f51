// The GEMMs of prefill attention on vectors. Included once per target.
#if defined(OSCAR_SIMD_ATTENTION_PREFILL_VECTORS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OSCAR_SIMD_ATTENTION_PREFILL_VECTORS_INL_H_
#undef OSCAR_SIMD_ATTENTION_PREFILL_VECTORS_INL_H_
#else
#define OSCAR_SIMD_ATTENTION_PREFILL_VECTORS_INL_H_
#endif

#include <algorithm>

#include "simd/attention_products-inl.h"
#include "simd/attention_rounding-inl.h"
#include "simd/attention_scratch-inl.h"
#include "simd/attention_tiles-inl.h"

#if OSCAR_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {

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

// How PrefillBlock reads pages; kBf16: BF16 rows with BF16 numbers.
template <PairOp kOp, bool kBf16>
struct VectorPath {
  static constexpr bool kRoundsRows = kBf16;  // q goes to `q_bf16` for BF16 rows

  static void Begin(int /*rows*/) {}
  static void End() {}

  static void PrepareRows(const Bf16* k, const Bf16* v, int dims, const Scratch& s) {
    if constexpr (kBf16) {
      PairRows(k, v, dims, s.k_pairs, s.v_pairs);
    } else {
      FloatRows(k, v, dims, s.k_pairs, s.k, s.v);
    }
  }
  // Rows [first, end) against a page. mask(rows): of logits; clear(rows): of weights.
  template <typename Mask, typename Clear>
  static void ReadRows(int dims, const Scratch& s, int first, int end, const Mask& mask,
                       const Clear& clear) {
    for (int row = first; row < end; row += kRowsAtOnce) {
      const int stop = std::min(end, row + kRowsAtOnce);
      PlainLogits<kBf16>(dims, s, row, stop);
      mask(row, stop);
      Softmax<kBf16 ? Weights::kBf16 : Weights::kFloat>(s, row, stop, 0);
      clear(row, stop);
      PlainValues<kBf16>(dims, s, row, stop);
    }
  }
  // The weight of token t, for a row that does not see it.
  static void ClearWeight(const Scratch& s, int row, int64_t t) {
    if constexpr (kBf16) {
      s.weights[row * kPageTokens + t] = 0;
    } else {
      s.p[row * kPageTokens + t] = 0.0f;
    }
  }

  template <QueryPart kPart>
  static void PrepareQuery(const float* q, const BlockLayout& layout, float factor, int row,
                           const Scratch& s) {
    QueryToInt16<kPart, false>(q, layout, factor, row, s);
  }
  // For keys that are not rows, after Scratch::q and Scratch::k.
  static void PrepareFloatQuery(int /*dims*/, int /*row*/, const Scratch&) {}
  static void PrepareFloatKeys(int /*dims*/, const Scratch&) {}
  static void PrepareKeys(const BlockLayout& layout, const std::byte* block, const Scratch& s) {
    UnpackKeys(layout, block, s.k_pairs);
  }
  static void PrepareValues(const BlockLayout& layout, const std::byte* block, const Scratch& s) {
    UnpackValues(layout, block, s.v_pairs);
  }
  // `needed`: rows that want a remainder, or null.
  template <typename Mask>
  static void ReadCodes(const BlockLayout& layout, const Scratch& s, const bool* needed, int first,
                        int end, const Mask& mask) {
    for (int row = first; row < end; row += kRowsAtOnce) {
      const int stop = std::min(end, row + kRowsAtOnce);
      if (layout.is_rows()) {
        PackedLogits<kOp, QueryPart::kRounded>(layout, s, needed, row, stop);
      } else {
        PlainLogits<false>(layout.head_dim(), s, row, stop);
      }
      if (needed != nullptr) {
        PackedLogits<kOp, QueryPart::kRemainder>(layout, s, needed, row, stop);
      }
      mask(row, stop);
      Softmax<Weights::kCodes>(s, row, stop, layout.num_groups());
      for (int g = 0; g < layout.num_groups(); ++g) {
        if (layout.group_dims() % (16 * kBlockVectors) == 0) {
          PackedValues<kOp, kBlockVectors>(layout, g, s, row, stop);
        } else {
          PackedValues<kOp, 2>(layout, g, s, row, stop);
        }
      }
    }
  }
};

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OSCAR_SIMD_TARGET

#endif  // per-target include guard
