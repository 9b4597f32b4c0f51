// MXFP4 as a storage type of weights: blocks of 32 numbers of one row, each 4 bits (E2M1: sign, two
// bits of exponent, one of mantissa; 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), times one
// power of two per block (E8M0: 2^(byte - 127), 255 is not a number). Element 2i of a block lies in
// the low half of its byte i, element 2i + 1 in the high one. Host and device.
//
// Every such number whose block scale is between kMxfp4MinScale and kMxfp4MaxScale is a normal
// BF16: the code's BF16 with (scale - 127) added to its exponent.
#pragma once

#include <cstdint>

#include "base/half.h"

namespace oscar {

inline constexpr int kMxfp4Block = 32;
inline constexpr uint8_t kMxfp4MinScale = 2, kMxfp4MaxScale = 252, kMxfp4NanScale = 255;

// Bits of a code's BF16, before its scale.
OSCAR_HD constexpr uint16_t E2M1ToBf16(uint8_t code) {
  // 0.5 is the one subnormal: an exponent of 126 without mantissa. From 1 on, exponent and mantissa
  // are the code's with 126 added to the exponent.
  const auto magnitude = static_cast<uint16_t>(code & 7u);
  const auto sign = static_cast<uint16_t>((code & 8u) << 12);
  if (magnitude == 0) return sign;
  if (magnitude == 1) return static_cast<uint16_t>(sign | 0x3f00u);
  return static_cast<uint16_t>(sign | ((magnitude << 6) + (126u << 7)));
}

// REQUIRES: a scale in the range above, or a code of zero.
OSCAR_HD constexpr Bf16 Mxfp4ToBf16(uint8_t code, uint8_t scale) {
  const uint16_t bits = E2M1ToBf16(code);
  if ((code & 7u) == 0) return Bf16{bits};
  return Bf16{static_cast<uint16_t>(bits + ((static_cast<unsigned>(scale) - 127u) << 7))};
}

}  // namespace oscar
