// FP8 E4M3 (the "fn" variant: no infinities, 0x7f and 0xff are NaN, largest value 448) as a storage
// type of weights, and the order in which four codes share a word on the GPU. Host and device.
//
// A word holds the codes of four consecutive inputs so that two masks and two shifts turn it into
// two pairs of BF16: sign and magnitude of codes 0 and 1 lie where BF16 has its sign and the low
// end of its exponent, codes 2 and 3 fill the bits between. What comes out is 2^120 too small,
// subnormal codes included, because the exponent's bias is BF16's.
#pragma once

#include <bit>
#include <cstdint>

#include "base/half.h"

namespace oscar {

inline constexpr float kF8E4M3Max = 448.0f;
inline constexpr uint8_t kF8E4M3Nan = 0x7f;

// Nearest, ties to even; beyond 448 saturates.
OSCAR_HD constexpr uint8_t ToF8E4M3(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const auto sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | kF8E4M3Nan);
  if (magnitude >= std::bit_cast<uint32_t>(kF8E4M3Max)) return static_cast<uint8_t>(sign | 0x7e);
  if (magnitude < 0x3c800000u) {  // below 2^-6: multiples of 2^-9
    // Adding 1.5 * 2^14 leaves the multiple, rounded, in the low bits of the sum.
    const float sum = std::bit_cast<float>(magnitude) + 24576.0f;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(sum) & 0x0fu));
  }
  const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return static_cast<uint8_t>(sign | ((rounded >> 20) - (120u << 3)));
}

// Codes of inputs k ... k + 3, code k in the low byte, to a word and back to two BF16 pairs, k in
// the low half of the first; each 2^120 too small.
OSCAR_HD constexpr uint32_t PackFp8(uint32_t codes) {
  const auto half = [](uint32_t a, uint32_t b) {
    return (a & 0x80u) << 8 | (a & 0x7fu) << 4 | (b & 0x80u) << 4 | (b & 0x70u) << 8 | (b & 0x0fu);
  };
  return half(codes & 0xffu, (codes >> 16) & 0xffu) | half((codes >> 8) & 0xffu, codes >> 24) << 16;
}
OSCAR_HD constexpr uint32_t FirstPair(uint32_t word) { return word & 0x87f087f0u; }
OSCAR_HD constexpr uint32_t SecondPair(uint32_t word) {
  return ((word << 4) & 0x80f080f0u) | ((word >> 4) & 0x07000700u);
}

}  // namespace oscar
