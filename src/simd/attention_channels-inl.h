// Attention of up to four query heads over one packed page whose keys are not rows: groups along
// tokens, with two more bits for some dims or none, or a codebook. Values are rows and go as in
// attention_codes-inl.h. Included once per target.
//
//   logit_t = n_t (sum_d (q_d s_d) code_td + sum_d q_d min_d)        n_t: the norm of the token, or
//   1
//
// The scale of a dim folds into q for each group of tokens, the mins into one number; what is left
// is the integer dot product of rows, by the same routine. q s is rounded to 15 bits in steps of
// its largest number; where that could move a logit by more than kLogitNoise, the group is met a
// second time by what rounding left. A codebook is the same without scales: a shuffle brings the
// level in place of its code (on processors without VNNI its keys become floats first).
#if defined(OSCAR_SIMD_ATTENTION_CHANNELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OSCAR_SIMD_ATTENTION_CHANNELS_INL_H_
#undef OSCAR_SIMD_ATTENTION_CHANNELS_INL_H_
#else
#define OSCAR_SIMD_ATTENTION_CHANNELS_INL_H_
#endif

#include "simd/attention_codes-inl.h"
#include "simd/attention_products-inl.h"
#include "simd/attention_tiles-inl.h"

#if OSCAR_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {

// [heads][D], times softmax scale and log2 e.
struct ScaledQuery {
  alignas(64) float q[kMaxBlockHeads][kMaxPageDims];
};

// q times the scales of one group of tokens, whole and rounded.
template <int kHeads>
struct FoldedQuery {
  alignas(64) float q[kHeads][kMaxPageDims];
  Planes planes[kHeads];
  // One per head.
  float low[kMaxBlockHeads];     // what every token of the group gets besides
  float sum[kMaxBlockHeads];     // of q
  float top[kMaxBlockHeads];     // its largest number
  float step[kMaxBlockHeads];    // of `planes`
  float centre[kMaxBlockHeads];  // what rounding took from the sum, times the middle code, in steps
};

template <int kHeads>
HWY_INLINE void FoldScales(const BlockLayout& layout, const SealedBlock& from, int group,
                           const ScaledQuery& query, FoldedQuery<kHeads>& out) {
  const int dims = layout.channel_dims();
  F16x low[kHeads], sum[kHeads], top[kHeads];
  OSCAR_UNROLL
  for (int h = 0; h < kHeads; ++h) low[h] = sum[h] = top[h] = Set(0.0f);
  for (int first = 0; first < layout.head_dim(); first += dims) {
    const std::byte* const block = from.MetaBlock(layout, first);
    const auto* scales = reinterpret_cast<const uint16_t*>(block + layout.KChannelScale(group, 0));
    const auto* mins = reinterpret_cast<const uint16_t*>(block + layout.KChannelMin(group, 0));
    for (int d = 0; d < dims; d += 16) {
      const F16x scale = LoadFp16(scales + d), min = LoadFp16(mins + d);
      OSCAR_UNROLL
      for (int h = 0; h < kHeads; ++h) {
        const F16x q = Load(query.q[h] + first + d), folded = Mul(q, scale);
        Store(folded, out.q[h] + first + d);
        low[h] = MulAdd(q, min, low[h]);
        sum[h] = Add(sum[h], folded);
        top[h] = Max(top[h], Abs(folded));
      }
    }
  }
  SumHeads<kHeads>(low, out.low);
  SumHeads<kHeads>(sum, out.sum);
  MaxHeads<kHeads>(top, out.top);
}

// Levels are met with 128 added, and have one scale per token.
template <int kHeads>
HWY_INLINE void FoldNothing(int dims, const ScaledQuery& query, FoldedQuery<kHeads>& out) {
  F16x sum[kHeads], top[kHeads];
  for (int h = 0; h < kHeads; ++h) sum[h] = top[h] = Set(0.0f);
  for (int h = 0; h < kHeads; ++h) {
    for (int d = 0; d < dims; d += 16) {
      const F16x q = Load(query.q[h] + d);
      Store(q, out.q[h] + d);
      sum[h] = Add(sum[h], q);
      top[h] = Max(top[h], Abs(q));
    }
  }
  SumHeads<kHeads>(sum, out.sum);
  MaxHeads<kHeads>(top, out.top);
  for (int h = 0; h < kHeads; ++h) out.low[h] = -128.0f * out.sum[h];
}

template <int kBits, int kHeads>
HWY_INLINE void RoundFolded(int dims, float middle, FoldedQuery<kHeads>& out) {
  F16x totals[kHeads];
  for (int h = 0; h < kHeads; ++h) {
    const float top = std::max(out.top[h], 1e-30f);
    const F16x inverse = Set(kPlaneLimit / top);
    out.step[h] = top / kPlaneLimit;
    I16x total = SetInt(0);
    for (int d = 0; d < dims; d += 16) {
      const I16x n = NearestInt(Mul(Load(out.q[h] + d), inverse));
      StoreIntPlanes<kBits>(n, out.planes[h].hi + d, out.planes[h].lo + d);
      total = Add(total, n);
    }
    totals[h] = ToFloat(total);
  }
  float rounded[kMaxBlockHeads];
  SumHeads<kHeads>(totals, rounded);
  for (int h = 0; h < kHeads; ++h) {
    const float top = std::max(out.top[h], 1e-30f);
    out.centre[h] = middle * (out.sum[h] * (kPlaneLimit / top) - rounded[h]);
  }
}

// Takes away what the planes have, so that they can be made of the rest.
template <int kHeads>
HWY_NOINLINE void KeepRest(int dims, FoldedQuery<kHeads>& out) {
  for (int h = 0; h < kHeads; ++h) {
    const float top = std::max(out.top[h], 1e-30f);
    const F16x inverse = Set(kPlaneLimit / top), step = Set(-out.step[h]);
    F16x largest = Set(0.0f);
    for (int d = 0; d < dims; d += 16) {
      const F16x q = Load(out.q[h] + d);
      const F16x rest = MulAdd(ToFloat(NearestInt(Mul(q, inverse))), step, q);
      Store(rest, out.q[h] + d);
      largest = Max(largest, Abs(rest));
    }
    out.top[h] = ReduceMax(largest);
  }
}

// What the upper bits of the dims that have four add: 4 q s code.
template <int kHeads>
HWY_NOINLINE void BoostedKeys(const BlockLayout& layout, const SealedBlock& from,
                              const FoldedQuery<kHeads>& folded,
                              float (&logits)[kMaxBlockHeads][kPageTokens]) {
  int dims[kMaxPageDims], boosts[kMaxPageDims], count = 0;
  for (int first = 0; first < layout.head_dim(); first += layout.channel_dims()) {
    const std::byte* const index = from.MetaBlock(layout, first) + layout.KIndex(0);
    for (int i = 0; i < layout.channel_dims(); ++i) {
      // Any byte may be there.
      if (static_cast<int>(index[i]) >= layout.boosted_dims()) continue;
      dims[count] = first + i;
      boosts[count++] = static_cast<int>(index[i]);
    }
  }
  for (int t = 0; t < kPageTokens; t += 16) {
    F16x sum[kHeads];
    for (int h = 0; h < kHeads; ++h) sum[h] = Set(0.0f);
    for (int i = 0; i < count; ++i) {
      const F16x code = ToFloat(ExpandBoost(BoostWord(layout, from.block, boosts[i], t)));
      OSCAR_UNROLL
      for (int h = 0; h < kHeads; ++h) {
        sum[h] = MulAdd(code, Set(folded.q[h][dims[i]]), sum[h]);
      }
    }
    for (int h = 0; h < kHeads; ++h) Store(Mul(sum[h], Set(4.0f)), logits[h] + t);
  }
}

// kBook: keys of a codebook, as groups of a page without scales.
template <int kBits, int kHeads, bool kVnni, bool kBook>
HWY_NOINLINE void ChannelKeys(const BlockLayout& layout, const SealedBlock& from,
                              const ScaledQuery& query, BlockPrefetch& prefetch,
                              float (&logits)[kMaxBlockHeads][kPageTokens]) {
  const int dims = layout.head_dim(), vectors = dims * TileCodes::LowBits(kBits) / 32;
  const size_t tile_bytes = layout.k_tile_bytes();
  const CodeStatistics statistics =
      kBook ? CodeStatistics{128.0f, ByteLevelUnit(kBits)} : StatisticsOf(layout);
  const float noise = statistics.Noise(dims);
  const bool is_mixed = layout.k_form() == SideForm::kMixed;
  const int groups = kBook ? 1 : layout.channel_groups(), group_tiles = 4 / groups;
  // Of every token; norms alone are looked at where there are none.
  const float* norms = kBook ? nullptr : NormsOf(layout, from);
  alignas(64) float factors[kPageTokens];
  if constexpr (kBook) {
    const F16x unit = Set(CodebookFactor(kBits, dims, 1.0f));
    for (int t = 0; t < kPageTokens; t += 16) {
      const std::byte* stored = from.block + layout.KRowNorm(t);
      Store(Mul(LoadFp16(reinterpret_cast<const uint16_t*>(stored)), unit), factors + t);
    }
    norms = factors;
  }
  FoldedQuery<kHeads> folded;
  for (int group = 0; group < groups; ++group) {
    const int first_tile = group * group_tiles;
    float longest = 1.0f;
    if (norms != nullptr) {
      F16x all = Load(norms + first_tile * 16);
      for (int i = 1; i < group_tiles; ++i) all = Max(all, Load(norms + (first_tile + i) * 16));
      longest = ReduceMax(all);
    }
    if constexpr (kBook) {
      FoldNothing<kHeads>(dims, query, folded);
    } else {
      FoldScales<kHeads>(layout, from, group, query, folded);
    }
    if (is_mixed) BoostedKeys<kHeads>(layout, from, folded, logits);
    RoundFolded<kBits, kHeads>(dims, statistics.middle, folded);
    bool has_rest = false;
    for (int h = 0; h < kHeads; ++h) {
      has_rest = has_rest || folded.step[h] * noise * longest > kLogitNoise;
    }
    for (int tile = first_tile; tile < first_tile + group_tiles; tile += kTilesAtOnce) {
      I16x dots[kTilesAtOnce][kHeads];
      const size_t at = static_cast<size_t>(tile) * tile_bytes;
      DotTiles<kBits, kTilesAtOnce, kHeads, kVnni, kBook>(
          {from.block + at, tile_bytes, from.block + layout.k_high_offset() + at / 2}, vectors,
          folded.planes, 0, prefetch, dots);
      for (int t = 0; t < kTilesAtOnce; ++t) {
        const int token = (tile + t) * 16;
        const F16x norm = norms != nullptr ? Load(norms + token) : Set(1.0f);
        for (int h = 0; h < kHeads; ++h) {
          float* const out = logits[h] + token;
          // The rest has all of what rounding took, not its mean alone.
          const F16x dot = Add(ToFloat(dots[t][h]), Set(has_rest ? 0.0f : folded.centre[h]));
          F16x value = MulAdd(dot, Set(folded.step[h]), Set(folded.low[h]));
          if (is_mixed) value = Add(value, Load(out));
          Store(Mul(value, norm), out);
        }
      }
    }
    if (!has_rest) continue;
    KeepRest<kHeads>(dims, folded);
    RoundFolded<kBits, kHeads>(dims, statistics.middle, folded);
    for (int tile = first_tile; tile < first_tile + group_tiles; tile += kTilesAtOnce) {
      I16x dots[kTilesAtOnce][kHeads];
      const size_t at = static_cast<size_t>(tile) * tile_bytes;
      DotTiles<kBits, kTilesAtOnce, kHeads, kVnni, kBook>(
          {from.block + at, tile_bytes, from.block + layout.k_high_offset() + at / 2}, vectors,
          folded.planes, 0, prefetch, dots);
      for (int t = 0; t < kTilesAtOnce; ++t) {
        const int token = (tile + t) * 16;
        const F16x norm = norms != nullptr ? Load(norms + token) : Set(1.0f);
        for (int h = 0; h < kHeads; ++h) {
          float* const out = logits[h] + token;
          const F16x dot = Mul(ToFloat(dots[t][h]), Set(folded.step[h]));
          Store(MulAdd(dot, norm, Load(out)), out);
        }
      }
    }
  }
}

// Keys as floats: any form, several times the work.
template <int kHeads>
HWY_NOINLINE void FormKeys(const BlockLayout& layout, const SealedBlock& from,
                           const ScaledQuery& query, float (&logits)[kMaxBlockHeads][kPageTokens]) {
  const int dims = layout.head_dim();
  alignas(64) int32_t pairs[kMaxPageDims / 2 * kPageTokens];
  alignas(64) float k[kMaxPageDims * kPageTokens];
  FloatKeys(layout, from, pairs, k);
  for (int t = 0; t < kPageTokens; t += 16 * kBlockVectors) {
    F16x sum[kHeads][kBlockVectors];
    for (int h = 0; h < kHeads; ++h) {
      for (int v = 0; v < kBlockVectors; ++v) sum[h][v] = Set(0.0f);
    }
    FloatProduct(query.q[0], kMaxPageDims, k + t, kPageTokens, dims, sum);
    for (int h = 0; h < kHeads; ++h) {
      for (int v = 0; v < kBlockVectors; ++v) Store(sum[h][v], logits[h] + t + v * 16);
    }
  }
}

template <int kHeads, bool kVnni>
HWY_NOINLINE void FormPage(const BlockLayout& layout, const SealedBlock& from, int visible,
                           const std::byte* next, const ScaledQuery& query, float* m, float* d,
                           float* o) {
  const int k_bits = layout.k_bits(), v_bits = layout.v_bits();
  const int steps = layout.head_dim() * (TileCodes::LowBits(k_bits) + TileCodes::LowBits(v_bits)) /
                    8 / kTilesAtOnce;
  const auto lines = static_cast<int>(layout.block_bytes() / 64);
  BlockPrefetch prefetch{next, next == nullptr ? nullptr : next + layout.block_bytes(),
                         (lines + steps - 1) / steps};
  alignas(64) float p[kMaxBlockHeads][kPageTokens];
  const auto keys = [&]<bool kBook>() HWY_ATTR {
    const auto of_bits = k_bits == 2   ? &ChannelKeys<2, kHeads, kVnni, kBook>
                         : k_bits == 3 ? &ChannelKeys<3, kHeads, kVnni, kBook>
                                       : &ChannelKeys<4, kHeads, kVnni, kBook>;
    of_bits(layout, from, query, prefetch, p);
  };
  if (layout.k_form() != SideForm::kCodebook) {
    keys.template operator()<false>();
  } else if constexpr (kVnni) {
    keys.template operator()<true>();
  } else {
    FormKeys<kHeads>(layout, from, query, p);
  }
  float alpha[kMaxBlockHeads];
  if (!SoftmaxTiles<kHeads>(p, visible, m, d, alpha)) return;
  const auto values = v_bits == 2   ? &CodeValues<2, kHeads, kVnni>
                      : v_bits == 3 ? &CodeValues<3, kHeads, kVnni>
                                    : &CodeValues<4, kHeads, kVnni>;
  values(layout, from.block, p, alpha, prefetch, o);
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OSCAR_SIMD_TARGET

#endif  // per-target include guard
