// Attention of up to four query heads over one page of BF16 rows, [64, D] K then [64, D] V.
// Included once per target.
//
// In fp32 multiply-adds: 32 BF16 numbers load as 16 words; the even dims are the low halves shifted
// up, the odd dims the high halves masked, so q is kept in that order (even 16, odd 16, ...). With
// BF16 products q is rounded to BF16 and K is not converted at all (VDPBF16PS); P and V meet in
// fp32 either way.
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
  alignas(64) Bf16 rounded[kMaxBlockHeads][kMaxPageDims];  // in the order of dims
};

HWY_INLINE void PrepareQueryRows(const float* q, int dims, float scale, int head, QueryRows& out) {
  for (int d = 0; d < dims; d += 32) {
    for (int i = 0; i < 16; ++i) {
      out.q[head][d + i] = q[d + 2 * i] * scale;
      out.q[head][d + 16 + i] = q[d + 2 * i + 1] * scale;
    }
  }
  for (int d = 0; d < dims; d += 16) {
    StoreBf16(Mul(Load(q + d), Set(scale)), out.rounded[head] + d);
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
  // kTokens x kAtOnce accumulators; AVX2 has registers for one head, and converts K anew for each.
  constexpr int kTokens = 4, kAtOnce = kParts == 1 ? kHeads : 1;
  for (int t = 0; t < visible; t += kTokens) {
    PrefetchRows(v + t * dims, kTokens * dims);
    for (int head = 0; head < kHeads; head += kAtOnce) {
      F16x sum[kTokens][kAtOnce];
      OSCAR_UNROLL
      for (int i = 0; i < kTokens; ++i) {
        OSCAR_UNROLL
        for (int h = 0; h < kAtOnce; ++h) sum[i][h] = Set(0.0f);
      }
      for (int d = 0; d < dims; d += 32) {
        F16x qe[kAtOnce], qo[kAtOnce];
        OSCAR_UNROLL
        for (int h = 0; h < kAtOnce; ++h) {
          qe[h] = Load(query.q[head + h] + d);
          qo[h] = Load(query.q[head + h] + d + 16);
        }
        OSCAR_UNROLL
        for (int i = 0; i < kTokens; ++i) {
          const I16x words = LoadInt(reinterpret_cast<const int32_t*>(k + (t + i) * dims + d));
          const F16x even = EvenBf16(words), odd = OddBf16(words);
          OSCAR_UNROLL
          for (int h = 0; h < kAtOnce; ++h) {
            sum[i][h] = MulAdd(odd, qo[h], MulAdd(even, qe[h], sum[i][h]));
          }
        }
      }
      OSCAR_UNROLL
      for (int h = 0; h < kAtOnce; ++h) {
        hn::StoreU(SumFour(sum[0][h], sum[1][h], sum[2][h], sum[3][h]), hn::Full128<float>(),
                   logits[head + h] + t);
      }
    }
  }
}

#if HWY_TARGET == HWY_AVX3
// RowLogits with q in BF16.
template <int kHeads>
HWY_INLINE void Bf16RowLogits(const Bf16* HWY_RESTRICT k, const Bf16* v, int dims, int visible,
                              const QueryRows& query,
                              float (&logits)[kMaxBlockHeads][kPageTokens]) {
  for (int t = 0; t < visible; t += 4) {
    __m512 sum[16];  // [head][token]
    OSCAR_UNROLL
    for (int i = 0; i < 16; ++i) sum[i] = _mm512_setzero_ps();
    PrefetchRows(v + t * dims, 4 * dims);
    for (int d = 0; d < dims; d += 32) {
      __m512i row[4];
      OSCAR_UNROLL
      for (int i = 0; i < 4; ++i) row[i] = _mm512_loadu_si512(k + (t + i) * dims + d);
      OSCAR_UNROLL
      for (int h = 0; h < kHeads; ++h) {
        const __m512i q = _mm512_load_si512(query.rounded[h] + d);
        OSCAR_UNROLL
        for (int i = 0; i < 4; ++i) {
          asm("vdpbf16ps %2, %1, %0" : "+v"(sum[h * 4 + i]) : "v"(row[i]), "v"(q));
        }
      }
    }
    alignas(64) float sums[16];
    _mm512_store_ps(sums, SumSixteen(sum));
    for (int h = 0; h < kHeads; ++h) std::memcpy(logits[h] + t, sums + h * 4, 4 * sizeof(float));
  }
}
#endif  // HWY_AVX3

// Sixteen even and sixteen odd elements as 32 in order.
HWY_INLINE void Interleave(const F16x& even, const F16x& odd, F16x& first, F16x& second) {
#if HWY_TARGET == HWY_AVX2
  const auto merge = [](VF a, VF b, F16x& out) HWY_ATTR {
    const __m256 low = _mm256_unpacklo_ps(a.raw, b.raw), high = _mm256_unpackhi_ps(a.raw, b.raw);
    out.v[0] = VF{_mm256_permute2f128_ps(low, high, 0x20)};
    out.v[1] = VF{_mm256_permute2f128_ps(low, high, 0x31)};
  };
  merge(even.v[0], odd.v[0], first);
  merge(even.v[1], odd.v[1], second);
#else
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  first.v[0] = VF{_mm512_permutex2var_ps(even.v[0].raw, low, odd.v[0].raw)};
  second.v[0] = VF{_mm512_permutex2var_ps(even.v[0].raw, high, odd.v[0].raw)};
#endif
}

// o[h, :] = alpha[h] o[h, :] + sum over visible tokens of p[h, t] v[t, :], tokens ascending.
template <int kHeads>
HWY_INLINE void RowValues(const Bf16* HWY_RESTRICT v, const Bf16* next_k, int dims, int visible,
                          const float* alpha, const float (&p)[kMaxBlockHeads][kPageTokens],
                          float* HWY_RESTRICT o) {
  // 4 heads x 2 words x (even, odd) = 16 accumulators; 2 x 1 x 2 pairs on AVX2.
  constexpr int kWords = kParts == 1 ? 2 : 1;
  constexpr int kAtOnce = kParts == 1 ? kHeads : kHeads % 2 == 0 ? 2 : 1;
  for (int d = 0; d < dims; d += 32 * kWords) {
    for (int head = 0; head < kHeads; head += kAtOnce) {
      F16x sum[kAtOnce][kWords][2];
      OSCAR_UNROLL
      for (int h = 0; h < kAtOnce; ++h) {
        OSCAR_UNROLL
        for (int w = 0; w < kWords; ++w) sum[h][w][0] = sum[h][w][1] = Set(0.0f);
      }
      for (int t = 0; t < visible; ++t) {
        if (next_k != nullptr && head == 0) PrefetchRows(next_k + t * dims + d, 32 * kWords);
        F16x value[kWords][2];
        OSCAR_UNROLL
        for (int w = 0; w < kWords; ++w) {
          const I16x words = LoadInt(reinterpret_cast<const int32_t*>(v + t * dims + d + w * 32));
          value[w][0] = EvenBf16(words);
          value[w][1] = OddBf16(words);
        }
        OSCAR_UNROLL
        for (int h = 0; h < kAtOnce; ++h) {
          const F16x weight = Set(p[head + h][t]);
          OSCAR_UNROLL
          for (int w = 0; w < kWords; ++w) {
            sum[h][w][0] = MulAdd(weight, value[w][0], sum[h][w][0]);
            sum[h][w][1] = MulAdd(weight, value[w][1], sum[h][w][1]);
          }
        }
      }
      OSCAR_UNROLL
      for (int h = 0; h < kAtOnce; ++h) {
        const F16x factor = Set(alpha[head + h]);
        OSCAR_UNROLL
        for (int w = 0; w < kWords; ++w) {
          float* out = o + (head + h) * dims + d + w * 32;
          F16x first, second;
          Interleave(sum[h][w][0], sum[h][w][1], first, second);
          Store(MulAdd(Load(out), factor, first), out);
          Store(MulAdd(Load(out + 16), factor, second), out + 16);
        }
      }
    }
  }
}

template <int kHeads, bool kBf16>
HWY_NOINLINE void RowPage(const Bf16* k, const Bf16* v, const Bf16* next_k, int dims, int visible,
                          const QueryRows& query, float* m, float* d, float* o) {
  alignas(64) float p[kMaxBlockHeads][kPageTokens];
#if HWY_TARGET == HWY_AVX3
  if constexpr (kBf16) Bf16RowLogits<kHeads>(k, v, dims, visible, query, p);
#endif
  if constexpr (!kBf16) RowLogits<kHeads>(k, v, dims, visible, query, p);
  float alpha[kMaxBlockHeads];
  if (!SoftmaxTiles<kHeads>(p, visible, m, d, alpha)) return;
  RowValues<kHeads>(v, next_k, dims, visible, alpha, p, o);
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OSCAR_SIMD_TARGET

#endif  // per-target include guard
