// Register-blocked fp32 multiply-add tiles, included once per target.
//
// AVX-512: 12 rows x 32 columns = 24 accumulators, 2 weight vectors, 1 broadcast: 27 of 32
// registers, 24 multiply-adds for 2 conversions. AVX2 has 16 registers: 6 rows x 16 columns = 12
// accumulators, and the panel's two halves are two passes over a slice that stays in L1.
#if defined(OSCAR_SIMD_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OSCAR_SIMD_GEMM_INL_H_
#undef OSCAR_SIMD_GEMM_INL_H_
#else
#define OSCAR_SIMD_GEMM_INL_H_
#endif

#include "simd/lanes16-inl.h"

#if OSCAR_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {

inline constexpr int kTileRows = kParts == 1 ? 12 : 6;

// Half 0 holds outputs 0-15 of the panel in the low 16 bits, half 1 outputs 16-31 in the high ones.
template <int kHalf>
HWY_INLINE F16x PanelHalf(const I16x& words) {
  if constexpr (kHalf == 0) {
    return BitsToFloat(Shl<16>(words));
  } else {
    return BitsToFloat(And(words, SetInt(static_cast<int32_t>(0xffff0000u))));
  }
}

template <int kRows, int kFirstHalf, int kHalves>
HWY_INLINE void FmaTileHalves(const float* HWY_RESTRICT x, int x_stride,
                              const uint16_t* HWY_RESTRICT w, int k_count, float* HWY_RESTRICT c,
                              size_t c_stride, bool first) {
  F16x sum[kRows][kHalves];
  for (int r = 0; r < kRows; ++r) {
    for (int h = 0; h < kHalves; ++h) {
      sum[r][h] =
          first ? Set(0.0f) : Load(c + static_cast<size_t>(r) * c_stride + (kFirstHalf + h) * 16);
    }
  }
  for (int k = 0; k < k_count; ++k) {
    const I16x words = LoadInt(reinterpret_cast<const int32_t*>(w) + k * 16);
    F16x weight[kHalves];
    weight[0] = PanelHalf<kFirstHalf>(words);
    if constexpr (kHalves == 2) weight[1] = PanelHalf<1>(words);
    const float* row = x + static_cast<ptrdiff_t>(k) * x_stride;
    for (int r = 0; r < kRows; ++r) {
      const F16x factor = Set(row[r]);
      for (int h = 0; h < kHalves; ++h) sum[r][h] = MulAdd(factor, weight[h], sum[r][h]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int h = 0; h < kHalves; ++h) {
      Store(sum[r][h], c + static_cast<size_t>(r) * c_stride + (kFirstHalf + h) * 16);
    }
  }
}

template <int kRows>
HWY_NOINLINE void FmaTileRows(const float* x, int x_stride, const uint16_t* w, int k_count,
                              float* c, size_t c_stride, bool first) {
  if constexpr (kParts == 1) {
    FmaTileHalves<kRows, 0, 2>(x, x_stride, w, k_count, c, c_stride, first);
  } else {
    FmaTileHalves<kRows, 0, 1>(x, x_stride, w, k_count, c, c_stride, first);
    FmaTileHalves<kRows, 1, 1>(x, x_stride, w, k_count, c, c_stride, first);
  }
}

template <int kRows = kTileRows>
inline void FmaTile(const float* x, int x_stride, int rows, const uint16_t* w, int k_count,
                    float* c, size_t c_stride, bool first) {
  if (rows == kRows) {
    FmaTileRows<kRows>(x, x_stride, w, k_count, c, c_stride, first);
  } else if constexpr (kRows > 1) {
    FmaTile<kRows - 1>(x, x_stride, rows, w, k_count, c, c_stride, first);
  }
}

// `rounds` x 384 multiply-adds (12 chains of 16 lanes, twice) from registers: the machine's peak.
inline float FmaPeakLoop(int64_t rounds) {
  constexpr int kChains = 12 / kParts;  // AVX2 lanes come in pairs
  F16x sum[kChains];
  for (int i = 0; i < kChains; ++i) sum[i] = Set(static_cast<float>(i));
  F16x factor = Set(0.5f);
  for (int64_t r = 0; r < rounds; ++r) {
    asm volatile("" : "+v"(factor.v[0].raw));  // keeps the loop from being folded
    for (int repeat = 0; repeat < 2 * kParts; ++repeat) {
      for (int i = 0; i < kChains; ++i) sum[i] = MulAdd(sum[i], factor, factor);
    }
  }
  F16x total = sum[0];
  for (int i = 1; i < kChains; ++i) total = Add(total, sum[i]);
  return ReduceSum(total);
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OSCAR_SIMD_TARGET

#endif  // per-target include guard
