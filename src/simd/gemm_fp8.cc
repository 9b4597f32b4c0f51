// FP8 weights on their way into the BF16 kernels, and what their scales do to the sums.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd/gemm_fp8.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h

#include "simd/lanes16-inl.h"

#if OSCAR_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {

// A BF16 is the code's magnitude in four more bits with 120 added to the exponent: its high byte is
// 0x3c + (magnitude >> 4), its low one (magnitude & 15) << 4. Codes below 16 are looked up, because
// those below 8 are subnormal, which BF16 has as normal numbers.
void ExpandFp8(const uint8_t* HWY_RESTRICT codes, uint16_t* HWY_RESTRICT out, size_t count) {
  const hn::ScalableTag<uint8_t> d;
  const hn::ScalableTag<uint16_t> d16;
  const size_t width = hn::Lanes(d);
  static constexpr uint8_t kLow[16] = {0x00, 0x00, 0x80, 0xc0, 0x00, 0x20, 0x40, 0x60,
                                       0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0};
  static constexpr uint8_t kHigh[16] = {0x00, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c,
                                        0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c};
  const auto low_table = hn::LoadDup128(d, kLow), high_table = hn::LoadDup128(d, kHigh);
  for (size_t i = 0; i < count; i += width) {
    const auto code = hn::LoadU(d, codes + i);
    const auto magnitude = hn::And(code, hn::Set(d, uint8_t{0x7f}));
    const auto small = hn::Lt(magnitude, hn::Set(d, uint8_t{16}));
    // Of large magnitudes the lookup's index has bits that it ignores or answers with zero.
    const auto index = hn::And(magnitude, hn::Set(d, uint8_t{15}));
    const auto shifted_down = hn::And(
        hn::BitCast(d, hn::ShiftRight<4>(hn::BitCast(d16, magnitude))), hn::Set(d, uint8_t{7}));
    const auto shifted_up = hn::BitCast(d, hn::ShiftLeft<4>(hn::BitCast(d16, index)));
    const auto low = hn::IfThenElse(small, hn::TableLookupBytes(low_table, index), shifted_up);
    const auto high = hn::IfThenElse(small, hn::TableLookupBytes(high_table, index),
                                     hn::Add(shifted_down, hn::Set(d, uint8_t{0x3c})));
    const auto sign = hn::And(code, hn::Set(d, uint8_t{0x80}));
    hn::StoreInterleaved2(low, hn::Or(high, sign), d, reinterpret_cast<uint8_t*>(out + i));
  }
}

void AddScaled(const float* HWY_RESTRICT parts, const float* HWY_RESTRICT scales, int rows,
               float* HWY_RESTRICT sums, bool first) {
  const F16x scale0 = Load(scales), scale1 = Load(scales + 16);
  for (int r = 0; r < rows; ++r, parts += 32, sums += 32) {
    const F16x sum0 = first ? Set(0.0f) : Load(sums), sum1 = first ? Set(0.0f) : Load(sums + 16);
    Store(MulAdd(scale0, Load(parts), sum0), sums);
    Store(MulAdd(scale1, Load(parts + 16), sum1), sums + 16);
  }
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OSCAR_SIMD_TARGET

#if HWY_ONCE
#include "simd/dispatch.h"
#include "simd/gemm_kernels.h"

namespace oscar::simd {

const Fp8Kernels& ActiveFp8Kernels() {
  static constexpr Fp8Kernels kAvx2 = {&N_AVX2::ExpandFp8, &N_AVX2::AddScaled};
  static constexpr Fp8Kernels kAvx512 = {&N_AVX3::ExpandFp8, &N_AVX3::AddScaled};
  return ActiveTarget() == Target::kAvx2 ? kAvx2 : kAvx512;
}

}  // namespace oscar::simd
#endif  // HWY_ONCE
