// BF16 and IEEE binary16 as storage types, with the conversions that the cache format is defined
// by. Round to nearest, ties to even; all functions are constexpr and usable in device code, so
// that host, SIMD tests and kernels share one specification.
#pragma once

#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define OSCAR_HD __host__ __device__
#else
#define OSCAR_HD
#endif

namespace oscar {

struct Bf16 {
  uint16_t bits = 0;
  friend constexpr bool operator==(Bf16, Bf16) = default;  // of bits: NaN == NaN, +0 != -0
};

struct Fp16 {
  uint16_t bits = 0;
  friend constexpr bool operator==(Fp16, Fp16) = default;
};

inline constexpr float kFp16Max = 65504.0f;
inline constexpr float kFp16MinSubnormal = 5.9604644775390625e-08f;  // 2^-24

OSCAR_HD constexpr float ToFloat(Bf16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

// NaN stays a (quiet) NaN; values beyond the largest finite BF16 round to infinity.
OSCAR_HD constexpr Bf16 ToBf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x0040u)};
  const uint32_t rounding = 0x7fffu + ((u >> 16) & 1u);
  return {static_cast<uint16_t>((u + rounding) >> 16)};
}

OSCAR_HD constexpr float ToFloat(Fp16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t exponent = (x.bits >> 10) & 0x1fu;
  const uint32_t mantissa = x.bits & 0x3ffu;
  if (exponent == 0x1fu) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24 is exact in binary32
    const float magnitude = static_cast<float>(mantissa) * kFp16MinSubnormal;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

// Values at or beyond 65520 round to infinity, as IEEE asks; SaturateToFp16 below does not.
OSCAR_HD constexpr Fp16 ToFp16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};   // NaN
  if (a >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // >= 65520
  if (a < 0x33000001u) return {static_cast<uint16_t>(sign)};             // <= 2^-25: zero
  const int exponent = static_cast<int>(a >> 23) - 127;
  const uint32_t mantissa = (a & 0x7fffffu) | 0x800000u;
  // Bits to drop: 13 for normals, more as the value sinks below 2^-14.
  const int shift = exponent >= -14 ? 13 : 13 + (-14 - exponent);
  uint32_t kept = mantissa >> shift;
  const uint32_t dropped = mantissa & ((1u << shift) - 1u);
  const uint32_t half = 1u << (shift - 1);
  if (dropped > half || (dropped == half && (kept & 1u))) ++kept;
  // A carry out of the mantissa moves into the exponent field by itself.
  const uint32_t biased =
      exponent >= -14 ? (static_cast<uint32_t>(exponent + 14) << 10) + kept : kept;
  return {static_cast<uint16_t>(sign | biased)};
}

// The rule for cache metadata: beyond +-65504 saturate; NaN becomes 0.
OSCAR_HD constexpr Fp16 SaturateToFp16(float x) {
  if (!(x == x)) return {0};
  if (x > kFp16Max) x = kFp16Max;
  if (x < -kFp16Max) x = -kFp16Max;
  return ToFp16(x);
}

}  // namespace oscar
