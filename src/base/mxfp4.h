// MXFP4 as a storage type of weights: blocks of 32 numbers of one row, each 4 bits (E2M1: sign, two
// bits of exponent, one of mantissa; 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), times one
// power of two per block (E8M0: 2^(byte - 127), 255 is not a number). Element 2i of a block lies in
// the low half of its byte i, element 2i + 1 in the high one. Host and device.
//
// Every such number whose block scale is between kMxfp4MinScale and kMxfp4MaxScale is a normal
// BF16: the code's BF16 with (scale - 127) added to its exponent.
#pragma once

#include <cstddef>
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

// The GPU's order of eight codes of a row in a word, code k in nibble k, so that few masks and
// shifts give pairs of BF16 (codes 2p and 2p + 1 in the low and the high half) that are 2^126 too
// small, which is exact: 0.5 is a subnormal there. In a half, the code of pair p < 3 has its sign
// at bit 15 - 3p and the rest at bits 8 - 3p to 6 - 3p; that of pair 3 fills what is left: 14, 13,
// 10, 11.
OSCAR_HD constexpr uint32_t PackMxfp4(uint32_t codes) {
  uint32_t word = 0;
  for (int p = 0; p < 4; ++p) {
    for (int h = 0; h < 2; ++h) {
      const uint32_t code = codes >> (8 * p + 4 * h) & 15u, sign = code >> 3, rest = code & 7u;
      const uint32_t half =
          p < 3 ? sign << (15 - 3 * p) | rest << (6 - 3 * p)
                : sign << 14 | (rest & 4u) << 11 | (rest & 2u) << 9 | (rest & 1u) << 11;
      word |= half << (16 * h);
    }
  }
  return word;
}
template <int kPair>
OSCAR_HD constexpr uint32_t Mxfp4Pair(uint32_t word) {
  if constexpr (kPair < 3) {
    return word << (3 * kPair) & 0x81c081c0u;
  } else {
    return (word << 1 & 0x80008000u) | (word >> 5 & 0x01400140u) | (word >> 3 & 0x00800080u);
  }
}
// Rows of the GPU's matrices: for every 512 inputs, the scales of their 16 blocks (0 of blocks that
// are not there: what is read in place of their codes is finite), then their codes, 16 bytes for
// each block that there is. 17 bytes for 32 weights, and every piece begins at a multiple of 16
// bytes. REQUIRES: inputs a multiple of 32.
inline constexpr int kMxfp4Run = 16 * kMxfp4Block, kMxfp4RunBytes = 16 * 17;
OSCAR_HD constexpr int64_t Mxfp4RowBytes(int64_t inputs) {
  return (inputs + kMxfp4Run - 1) / kMxfp4Run * 16 + inputs / 2;
}
// Where a block's codes and its scale lie in a row.
OSCAR_HD constexpr int64_t Mxfp4CodesAt(int64_t block) {
  return block / 16 * kMxfp4RunBytes + 16 + block % 16 * 16;
}
OSCAR_HD constexpr int64_t Mxfp4ScaleAt(int64_t block) {
  return block / 16 * kMxfp4RunBytes + block % 16;
}

}  // namespace oscar
