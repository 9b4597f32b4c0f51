// What prefill attention makes of q and of weights before they meet a page: 16-bit numbers, whole
// or as planes of bytes, BF16, or what they are. Included once per target.
#if defined(OSCAR_SIMD_ATTENTION_ROUNDING_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OSCAR_SIMD_ATTENTION_ROUNDING_INL_H_
#undef OSCAR_SIMD_ATTENTION_ROUNDING_INL_H_
#else
#define OSCAR_SIMD_ATTENTION_ROUNDING_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cstring>

#include "simd/attention_codes-inl.h"
#include "simd/attention_scratch-inl.h"

#if OSCAR_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX3
// Tokens or dims of a right operand in the order of its bytes, 16 at a time.
template <int kBits>
constexpr int ByteOrder(int i) {
  const int width = kBits == 4 ? 8 : 16;
  return i / width * width + i % width / 2 + i % 2 * (width / 2);
}

// q in 16 bits as two planes.
template <int kBits>
HWY_INLINE void StoreBytePlanes(const F16x& x, uint8_t* hi, uint8_t* lo) {
  alignas(16) static constexpr auto kOrder = [] {
    std::array<uint8_t, 16> order{};
    for (int i = 0; i < 16; ++i) order[static_cast<size_t>(i)] = ByteOrder<kBits>(i);
    return order;
  }();
  const __m512i n = _mm512_cvtps_epi32(x.v[0].raw);
  const __m128i order = _mm_load_si128(reinterpret_cast<const __m128i*>(kOrder.data()));
  const __m128i high = _mm512_cvtepi32_epi8(_mm512_srai_epi32(n, 8));
  const __m128i low = _mm512_cvtepi32_epi8(n);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(hi), _mm_shuffle_epi8(high, order));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(lo), _mm_shuffle_epi8(low, order));
}

// Where the bytes of 64 tokens are after the packs of StoreWeightPlanes, in byte order.
template <int kBits>
inline constexpr auto kPackedOrder = [] {
  std::array<uint8_t, kPageTokens> order{};
  for (int i = 0; i < kPageTokens; ++i) {
    const int token = i / 16 * 16 + ByteOrder<kBits>(i % 16);
    order[static_cast<size_t>(i)] =
        static_cast<uint8_t>(token % 16 / 4 * 16 + token / 16 * 4 + token % 4);
  }
  return order;
}();

// p s of a page's 64 tokens in steps, rounded to 15 bits, as two planes: out[64] hi, then lo.
HWY_INLINE void StoreWeightPlanes(const F16x (&steps)[4], const uint8_t* order, uint8_t* out) {
  const auto pack = [](const F16x& a, const F16x& b) HWY_ATTR {
    return _mm512_packs_epi32(_mm512_cvtps_epi32(a.v[0].raw), _mm512_cvtps_epi32(b.v[0].raw));
  };
  const __m512i first = pack(steps[0], steps[1]), second = pack(steps[2], steps[3]);
  const __m512i index = _mm512_loadu_si512(order);
  const __m512i mask = _mm512_set1_epi16(0xff);
  const __m512i high =
      _mm512_packus_epi16(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
  const __m512i low =
      _mm512_packus_epi16(_mm512_and_si512(first, mask), _mm512_and_si512(second, mask));
  _mm512_storeu_si512(out, LookUp(index, high));
  _mm512_storeu_si512(out + 64, LookUp(index, low));
}
#endif  // HWY_AVX3

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
template <QueryPart kPart, bool kPlanes>
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
      uint16_t* const to = out.codes + row * layout.head_dim();
#if HWY_TARGET == HWY_AVX3
      if constexpr (kPlanes) {
        auto* const hi = reinterpret_cast<uint8_t*>(to) + d;
        if (layout.k_bits() == 4) {
          StoreBytePlanes<4>(n, hi, hi + layout.head_dim());
        } else {
          StoreBytePlanes<2>(n, hi, hi + layout.head_dim());
        }
      }
#endif
      if constexpr (!kPlanes) StoreInt16(n, to + d);
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

enum class Weights : uint8_t { kFloat, kBf16, kPairs, kCodes, kPlanes };

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

// kRows numbers, one per row, of which there are four at most.
using FourRows = hn::Vec<hn::Full128<float>>;
template <int kRows>
HWY_INLINE FourRows LoadRows(const float* p) {
  alignas(16) float x[kMaxBlockHeads] = {};
  std::memcpy(x, p, kRows * sizeof(float));
  return hn::Load(hn::Full128<float>(), x);
}
template <int kRows>
HWY_INLINE void StoreRows(FourRows rows, float* p) {
  alignas(16) float x[kMaxBlockHeads];
  hn::Store(rows, hn::Full128<float>(), x);
  std::memcpy(p, x, kRows * sizeof(float));
}
template <int kRows>
HWY_INLINE FourRows MaxOfRows(const F16x (&x)[kRows]) {
  return MaxFour(x[0], x[kRows > 1 ? 1 : 0], x[kRows > 2 ? 2 : 0], x[kRows > 3 ? 3 : 0]);
}
template <int kRows>
HWY_INLINE FourRows SumOfRows(const F16x (&x)[kRows]) {
  return SumFour(x[0], x[kRows > 1 ? 1 : 0], x[kRows > 2 ? 2 : 0], x[kRows > 3 ? 3 : 0]);
}

#if HWY_TARGET == HWY_AVX3
// Rounds 64 weights to BF16, stores them, and gives back their sums.
HWY_INLINE F16x RoundToPairs(const F16x (&x)[4], uint16_t* out) {
  const __m512i ones = _mm512_set1_epi32(0x3f803f80);
  __m512 sum = _mm512_setzero_ps();
  OSCAR_UNROLL
  for (int i = 0; i < 2; ++i) {
    __m512i pair;
    asm("vcvtne2ps2bf16 %1, %2, %0"
        : "=v"(pair)
        : "v"(x[2 * i].v[0].raw), "v"(x[2 * i + 1].v[0].raw));
    _mm512_storeu_si512(out + i * 32, pair);
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(pair), "v"(ones));
  }
  return F16x{{VF{sum}}};
}
#endif

// The online softmax of kRows rows from `row` on, whose chains overlap: logits become weights in
// the form that the product with V wants. A row's numbers depend on that row alone.
template <Weights kForm, int kRows>
HWY_INLINE void SoftmaxRows(const Scratch& s, int row, int num_groups,
                            [[maybe_unused]] const uint8_t* order) {
  static_assert(kRows <= kMaxBlockHeads);
  constexpr int kVectors = kPageTokens / 16;
  const hn::Full128<float> d4;
  float* const p = s.p + row * kPageTokens;
  F16x largest[kRows];
  OSCAR_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const float* l = p + r * kPageTokens;
    largest[r] = Max(Max(Load(l), Load(l + 16)), Max(Load(l + 32), Load(l + 48)));
  }
  // Where one is not a number, the second counts.
  const FourRows before = LoadRows<kRows>(s.m + row);
  const FourRows top = hn::Max(before, MaxOfRows(largest));
  StoreRows<kRows>(top, s.m + row);
  alignas(64) float shift[kMaxBlockHeads], change[16] = {};
  hn::Store(top, d4, shift);
  hn::Store(hn::Sub(before, top), d4, change);
  Store(Exp2NotAbove0(Load(change)), change);
  F16x weights[kRows][kVectors], sum[kRows];
  OSCAR_UNROLL
  for (int r = 0; r < kRows; ++r) {
    sum[r] = Set(0.0f);
    OSCAR_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      float* const at = p + r * kPageTokens + i * 16;
      F16x weight = Exp2NotAbove0(Sub(Load(at), Set(shift[r])));
#if HWY_TARGET == HWY_AVX3
      if constexpr (kForm == Weights::kBf16) {
        weight = RoundToBf16(weight, s.weights + (row + r) * kPageTokens + i * 16);
      }
#endif
      if constexpr (kForm == Weights::kFloat || kForm == Weights::kCodes) Store(weight, at);
      if constexpr (kForm == Weights::kPlanes || kForm == Weights::kPairs) weights[r][i] = weight;
      if constexpr (kForm != Weights::kPairs) sum[r] = Add(sum[r], weight);
    }
#if HWY_TARGET == HWY_AVX3
    if constexpr (kForm == Weights::kPairs) {
      sum[r] = RoundToPairs(weights[r], s.weights + (row + r) * kPageTokens);
    }
#endif
  }
  const FourRows alpha = hn::Load(d4, change);
  StoreRows<kRows>(alpha, s.alpha + row);
  StoreRows<kRows>(hn::Add(hn::Mul(LoadRows<kRows>(s.d + row), alpha), SumOfRows(sum)), s.d + row);
  if constexpr (kForm != Weights::kCodes && kForm != Weights::kPlanes) return;
  for (int g = 0; g < num_groups; ++g) {
    const auto weight_of = [&](int r, int i) HWY_ATTR {
      return kForm == Weights::kPlanes ? weights[r][i] : Load(p + r * kPageTokens + i * 16);
    };
    F16x scale[kVectors], minimum[kRows];
    OSCAR_UNROLL
    for (int i = 0; i < kVectors; ++i) scale[i] = Load(s.meta.v_scale + g * kPageTokens + i * 16);
    OSCAR_UNROLL
    for (int r = 0; r < kRows; ++r) largest[r] = minimum[r] = Set(0.0f);
    OSCAR_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      const F16x min = Load(s.meta.v_min + g * kPageTokens + i * 16);
      OSCAR_UNROLL
      for (int r = 0; r < kRows; ++r) {
        largest[r] = Max(largest[r], Mul(weight_of(r, i), scale[i]));
        minimum[r] = MulAdd(weight_of(r, i), min, minimum[r]);
      }
    }
    const FourRows bound = hn::Max(hn::Set(d4, 1e-30f), MaxOfRows(largest));
    const FourRows limit = hn::Set(d4, kInt16Limit);
    const int at = g * kMaxRows + row;
    StoreRows<kRows>(hn::Div(bound, limit), s.weight_step + at);
    StoreRows<kRows>(SumOfRows(minimum), s.weight_min + at);
    alignas(16) float inverses[kMaxBlockHeads];
    hn::Store(hn::Div(limit, bound), d4, inverses);
    OSCAR_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const F16x inverse = Set(inverses[r]);
      uint16_t* const to = s.weights + (at + r) * kPageTokens;
      F16x steps[kVectors];
      OSCAR_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        steps[i] = Mul(Mul(weight_of(r, i), scale[i]), inverse);
        if constexpr (kForm == Weights::kCodes) StoreInt16(steps[i], to + i * 16);
      }
#if HWY_TARGET == HWY_AVX3
      if constexpr (kForm == Weights::kPlanes) {
        StoreWeightPlanes(steps, order, reinterpret_cast<uint8_t*>(to));
      }
#endif
    }
  }
}

// `order`: of the bytes of kPlanes.
template <Weights kForm>
HWY_NOINLINE void Softmax(const Scratch& s, int first, int end, int num_groups,
                          const uint8_t* order = nullptr) {
  int r = first;
  for (; r + 4 <= end; r += 4) SoftmaxRows<kForm, 4>(s, r, num_groups, order);
  for (; r < end; ++r) SoftmaxRows<kForm, 1>(s, r, num_groups, order);
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OSCAR_SIMD_TARGET

#endif  // per-target include guard
