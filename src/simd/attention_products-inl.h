// Register-blocked products of prefill attention. Included once per target.
//
// 6 rows x 4 vectors = 24 accumulators (AVX2: 3 x 2 pairs of registers), each one chain over the
// summed index in ascending order, so a row's result does not depend on the rows beside it.
#if defined(OSCAR_SIMD_ATTENTION_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OSCAR_SIMD_ATTENTION_PRODUCTS_INL_H_
#undef OSCAR_SIMD_ATTENTION_PRODUCTS_INL_H_
#else
#define OSCAR_SIMD_ATTENTION_PRODUCTS_INL_H_
#endif

#include <cstring>

#include "simd/lanes16-inl.h"

#if OSCAR_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {

inline constexpr int kBlockRows = kParts == 1 ? 6 : 3;
inline constexpr int kBlockVectors = kParts == 1 ? 4 : 2;

// How two 16-bit products are added to a 32-bit sum. The integer ones are exact, hence equal.
enum class PairOp : uint8_t {
  kMadd,  // int16: VPMADDWD and an addition
  kVnni,  // int16: VPDPWSSD (AVX512-VNNI)
  kBf16,  // BF16 into fp32: VDPBF16PS (AVX512-BF16)
};

template <PairOp kOp>
HWY_INLINE VI AddPairs(VI sum, VI a, VI b) {
#if HWY_TARGET == HWY_AVX3
  // By name, as DotBytes: the attributes that allow the intrinsics allow too much else.
  if constexpr (kOp == PairOp::kVnni) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
    return sum;
  } else if constexpr (kOp == PairOp::kBf16) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
    return sum;
  } else {
    return hn::Add(sum, VI{_mm512_madd_epi16(a.raw, b.raw)});
  }
#else
  static_assert(kOp == PairOp::kMadd);
  return hn::Add(sum, VI{_mm256_madd_epi16(a.raw, b.raw)});
#endif
}

HWY_INLINE int32_t LoadWord(const void* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

// sum[r, v] += a[r, 0..pairs) b[0..pairs, v]. Strides in words of a pair.
template <PairOp kOp, int kRows, int kVectors>
HWY_INLINE void PairProduct(const uint16_t* HWY_RESTRICT a, size_t a_stride,
                            const int32_t* HWY_RESTRICT b, size_t b_stride, int pairs,
                            I16x (&sum)[kRows][kVectors]) {
  for (int k = 0; k < pairs; ++k) {
    I16x right[kVectors];
    OSCAR_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      right[v] = LoadInt(b + static_cast<size_t>(k) * b_stride + v * 16);
    }
    OSCAR_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const VI left = hn::Set(
          DI(), LoadWord(a + 2 * (static_cast<size_t>(r) * a_stride + static_cast<size_t>(k))));
      OSCAR_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        OSCAR_UNROLL
        for (int i = 0; i < kParts; ++i) {
          sum[r][v].v[i] = AddPairs<kOp>(sum[r][v].v[i], left, right[v].v[i]);
        }
      }
    }
  }
}

// The same in fp32 multiply-adds; strides in elements.
template <int kRows>
HWY_INLINE void FloatProduct(const float* HWY_RESTRICT a, size_t a_stride,
                             const float* HWY_RESTRICT b, size_t b_stride, int depth,
                             F16x (&sum)[kRows][kBlockVectors]) {
  for (int k = 0; k < depth; ++k) {
    F16x right[kBlockVectors];
    OSCAR_UNROLL
    for (int v = 0; v < kBlockVectors; ++v) {
      right[v] = Load(b + static_cast<size_t>(k) * b_stride + v * 16);
    }
    OSCAR_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const F16x left = Set(a[static_cast<size_t>(r) * a_stride + static_cast<size_t>(k)]);
      OSCAR_UNROLL
      for (int v = 0; v < kBlockVectors; ++v) sum[r][v] = MulAdd(left, right[v], sum[r][v]);
    }
  }
}

// Calls body<kRows>(first row) for blocks that cover `rows` rows.
template <typename Body>
HWY_INLINE void ForRowBlocks(int rows, const Body& body) {
  int r = 0;
  for (; r + kBlockRows <= rows; r += kBlockRows) body.template operator()<kBlockRows>(r);
  for (; r + 2 <= rows; r += 2) body.template operator()<2>(r);
  if (r < rows) body.template operator()<1>(r);
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OSCAR_SIMD_TARGET

#endif  // per-target include guard
