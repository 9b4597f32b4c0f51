// MXFP4 weights (base/mxfp4.h) on their way into the BF16 kernels.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd/gemm_mxfp4.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h

#include "simd/lanes16-inl.h"

#if OSCAR_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {

// 64 words at a time, of two inputs: words 0 to 31 are the low halves of 32 bytes, the others the
// high ones. Of a code's BF16 both bytes are looked up; a block's scale adds to the exponent of
// what is not zero, for each word its output's.
void ExpandMxfp4(const uint8_t* HWY_RESTRICT codes, const uint8_t* HWY_RESTRICT scales,
                 bool in_pairs, uint16_t* HWY_RESTRICT out) {
  const hn::CappedTag<uint8_t, 32> d;
  const hn::CappedTag<uint16_t, 16> d16;
  static constexpr uint8_t kLow[16] = {0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0,
                                       0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0};
  static constexpr uint8_t kHigh[16] = {0x00, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                                        0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
  HWY_ALIGN uint16_t exponents[64];
  for (int i = 0; i < 64; ++i) {
    const int output = in_pairs ? i / 2 : i % 32 / 2 + i % 2 * 16;
    exponents[i] = static_cast<uint16_t>((static_cast<unsigned>(scales[output]) - 127u) << 7);
  }
  const auto low_table = hn::LoadDup128(d, kLow), high_table = hn::LoadDup128(d, kHigh);
  const auto nibble = hn::Set(d, uint8_t{15});
  const auto magnitude = hn::Set(d16, uint16_t{0x7fff});
  for (int inputs = 0; inputs < 32; inputs += 2, codes += 32, out += 64) {
    const auto both = hn::LoadU(d, codes);
    const auto low_codes = hn::And(both, nibble);
    const auto high_codes = hn::And(
        hn::BitCast(d,
                    hn::ShiftRight<4>(hn::BitCast(hn::Repartition<uint16_t, decltype(d)>(), both))),
        nibble);
    HWY_ALIGN uint16_t words[64];
    hn::StoreInterleaved2(hn::TableLookupBytes(low_table, low_codes),
                          hn::TableLookupBytes(high_table, low_codes), d,
                          reinterpret_cast<uint8_t*>(words));
    hn::StoreInterleaved2(hn::TableLookupBytes(low_table, high_codes),
                          hn::TableLookupBytes(high_table, high_codes), d,
                          reinterpret_cast<uint8_t*>(words + 32));
    for (int i = 0; i < 64; i += 16) {
      const auto word = hn::Load(d16, words + i);
      const auto scaled = hn::Add(word, hn::Load(d16, exponents + i));
      const auto zero = hn::Eq(hn::And(word, magnitude), hn::Zero(d16));
      hn::StoreU(hn::IfThenElse(zero, word, scaled), d16, out + i);
    }
  }
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // OSCAR_SIMD_TARGET

#if HWY_ONCE
#include "simd/dispatch.h"
#include "simd/gemm_kernels.h"

namespace oscar::simd {

Mxfp4Expander ActiveMxfp4Expander() {
  return ActiveTarget() == Target::kAvx2 ? &N_AVX2::ExpandMxfp4 : &N_AVX3::ExpandMxfp4;
}

}  // namespace oscar::simd
#endif  // HWY_ONCE
