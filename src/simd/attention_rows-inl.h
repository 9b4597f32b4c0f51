// Attention of up to four query heads over one page of BF16 rows, [64, D] K then [64, D] V, in
// fp32 multiply-adds. Included once per target.
//
// 32 BF16 numbers load as 16 words; the even dims are the low halves shifted up, the odd dims the
// high halves masked, so q is kept in that order (even 16, odd 16, ...) and so is the output tile.
#if defined(OSCAR_SIMD_ATTENTION_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OSCAR_SIMD_ATTENTION_ROWS_INL_H_
#undef OSCAR_SIMD_ATTENTION_ROWS_INL_H_
#else
#define OSCAR_SIMD_ATTENTION_ROWS_INL_H_
#endif

#include "simd/attention_codes-inl.h"

#if OSCAR_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {

// [heads][D], each run of 32 dims as 16 even then 16 odd ones, times softmax scale and log2 e.
struct QueryRows {
  alignas(64) float q[kMaxBlockHeads][kMaxPageDims];
};

HWY_INLINE void PrepareQueryRows(const float* q, int dims, float scale, int head, QueryRows& out) {
  for (int d = 0; d < dims; d += 32) {
    for (int i = 0; i < 16; ++i) {
      out.q[head][d + i] = q[d + 2 * i] * scale;
      out.q[head][d + 16 + i] = q[d + 2 * i + 1] * scale;
    }
  }
}

HWY_INLINE F16x EvenBf16(const I16x& words) { return BitsToFloat(Shl<16>(words)); }
HWY_INLINE F16x OddBf16(const I16x& words) {
  return BitsToFloat(And(words, SetInt(static_cast<int32_t>(0xffff0000u))));
}

// Into L2, ahead of its use: values while keys are read, the next keys while values are.
HWY_INLINE void PrefetchRows(const Bf16* p, int count) {
  for (int i = 0; i < count; i += 32) __builtin_prefetch(p + i, 0, 2);
}

// Logits of `visible` tokens (rounded up to 4) for kHeads heads.
template <int kHeads>
HWY_INLINE void RowLogits(const Bf16* HWY_RESTRICT k, const Bf16* v, int dims, int visible,
                          const QueryRows& query, float (&logits)[kMaxBlockHeads][kPageTokens]) {
  constexpr int kTokens = 4;  // kTokens x kHeads accumulators
  for (int t = 0; t < visible; t += kTokens) {
    F16x sum[kTokens][kHeads];
    for (int i = 0; i < kTokens; ++i) {
      for (int h = 0; h < kHeads; ++h) sum[i][h] = Set(0.0f);
    }
    PrefetchRows(v + t * dims, kTokens * dims);
    for (int d = 0; d < dims; d += 32) {
      F16x even[kTokens], odd[kTokens];
      for (int i = 0; i < kTokens; ++i) {
        const I16x words = LoadInt(reinterpret_cast<const int32_t*>(k + (t + i) * dims + d));
        even[i] = EvenBf16(words);
        odd[i] = OddBf16(words);
      }
      for (int h = 0; h < kHeads; ++h) {
        const F16x qe = Load(query.q[h] + d), qo = Load(query.q[h] + d + 16);
        for (int i = 0; i < kTokens; ++i) {
          sum[i][h] = MulAdd(odd[i], qo, MulAdd(even[i], qe, sum[i][h]));
        }
      }
    }
    for (int h = 0; h < kHeads; ++h) {
      hn::StoreU(SumFour(sum[0][h], sum[1][h], sum[2][h], sum[3][h]), hn::Full128<float>(),
                 logits[h] + t);
    }
  }
}

// o[h, :] = alpha[h] o[h, :] + sum over visible tokens of p[h, t] v[t, :], tokens ascending.
template <int kHeads>
HWY_INLINE void RowValues(const Bf16* HWY_RESTRICT v, const Bf16* next_k, int dims, int visible,
                          const float* alpha, const float (&p)[kMaxBlockHeads][kPageTokens],
                          float* HWY_RESTRICT o) {
  // 4 heads x 2 words x (even, odd) = 16 accumulators.
  constexpr int kWords = kParts == 1 ? 2 : 1;
  for (int d = 0; d < dims; d += 32 * kWords) {
    F16x sum[kHeads][kWords][2];
    for (int h = 0; h < kHeads; ++h) {
      for (int w = 0; w < kWords; ++w) sum[h][w][0] = sum[h][w][1] = Set(0.0f);
    }
    for (int t = 0; t < visible; ++t) {
      if (next_k != nullptr) PrefetchRows(next_k + t * dims + d, 32 * kWords);
      F16x value[kWords][2];
      for (int w = 0; w < kWords; ++w) {
        const I16x words = LoadInt(reinterpret_cast<const int32_t*>(v + t * dims + d + w * 32));
        value[w][0] = EvenBf16(words);
        value[w][1] = OddBf16(words);
      }
      for (int h = 0; h < kHeads; ++h) {
        const F16x weight = Set(p[h][t]);
        for (int w = 0; w < kWords; ++w) {
          sum[h][w][0] = MulAdd(weight, value[w][0], sum[h][w][0]);
          sum[h][w][1] = MulAdd(weight, value[w][1], sum[h][w][1]);
        }
      }
    }
    for (int h = 0; h < kHeads; ++h) {
      for (int w = 0; w < kWords; ++w) {
        float* out = o + h * dims + d + w * 32;
        alignas(64) float even[16], odd[16];
        Store(sum[h][w][0], even);
        Store(sum[h][w][1], odd);
        for (int i = 0; i < 16; ++i) {
          out[2 * i] = out[2 * i] * alpha[h] + even[i];
          out[2 * i + 1] = out[2 * i + 1] * alpha[h] + odd[i];
        }
      }
    }
  }
}

template <int kHeads>
HWY_NOINLINE void RowPage(const Bf16* k, const Bf16* v, const Bf16* next_k, int dims, int visible,
                          const QueryRows& query, float* m, float* d, float* o) {
  alignas(64) float p[kMaxBlockHeads][kPageTokens];
  RowLogits<kHeads>(k, v, dims, (visible + 3) / 4 * 4, query, p);
  float alpha[kMaxBlockHeads];
  if (!SoftmaxTiles<kHeads>(p, visible, m, d, alpha)) return;
  RowValues<kHeads>(v, next_k, dims, visible, alpha, p, o);
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OSCAR_SIMD_TARGET

#endif  // per-target include guard
