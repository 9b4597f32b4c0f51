#include "base/fp8.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "base/rng.h"

namespace oscar {
namespace {

// By definition, from the bits.
double ValueOf(int code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

// The nearest value, of two the one with an even mantissa.
int NearestCode(double x) {
  int best = 0;
  for (int code = 0; code < 0x7f; ++code) {
    const double d = std::fabs(std::fabs(x) - ValueOf(code));
    const double b = std::fabs(std::fabs(x) - ValueOf(best));
    if (d < b || (d == b && code % 2 == 0)) best = code;
  }
  return best | (std::signbit(x) ? 0x80 : 0);
}

TEST(Fp8, EveryValueComesBack) {
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7f) == 0x7f) continue;
    EXPECT_EQ(ToF8E4M3(static_cast<float>(ValueOf(code))), code);
  }
  EXPECT_EQ(ToF8E4M3(NAN) & 0x7f, kF8E4M3Nan);
  EXPECT_EQ(ToF8E4M3(1e9f), 0x7e);
  EXPECT_EQ(ToF8E4M3(-INFINITY), 0xfe);
  EXPECT_EQ(ToF8E4M3(-0.0f), 0x80);
}

TEST(Fp8, RoundsToNearestEven) {
  std::vector<double> numbers;
  for (int code = 0; code < 0x7e; ++code) {
    const double middle = (ValueOf(code) + ValueOf(code + 1)) / 2;
    for (const double x : {middle, std::nextafterf(static_cast<float>(middle), 0.0f) + 0.0,
                           std::nextafterf(static_cast<float>(middle), 1e9f) + 0.0}) {
      numbers.push_back(x);
      numbers.push_back(-x);
    }
  }
  const Philox rng(1, 0);
  for (uint64_t i = 0; i < 2000; ++i) {
    numbers.push_back(std::ldexp(static_cast<float>(rng.Bits(2 * i)) * 0x1p-31f - 1.0f,
                                 static_cast<int>(rng.Below(2 * i + 1, 24)) - 14));
  }
  for (const double x : numbers) {
    EXPECT_EQ(ToF8E4M3(static_cast<float>(x)), NearestCode(static_cast<float>(x))) << x;
  }
}

TEST(Fp8, WordsUnpackToTheValues) {
  constexpr float kFactor = 0x1p120f;
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7f) == 0x7f) continue;
    for (int at = 0; at < 4; ++at) {
      // Neighbours with all bits set must not leak into it.
      const uint32_t codes = (0xfefefefeu & ~(0xffu << (8 * at))) | static_cast<uint32_t>(code)
                                                                        << (8 * at);
      const uint32_t word = PackFp8(codes);
      const uint32_t pairs[] = {FirstPair(word), SecondPair(word)};
      for (int i = 0; i < 4; ++i) {
        const auto bits = static_cast<uint16_t>(pairs[i / 2] >> (i % 2 * 16));
        const double expected = i == at ? ValueOf(code) : ValueOf(0xfe);
        EXPECT_EQ(ToFloat(Bf16{bits}) * kFactor, static_cast<float>(expected)) << code << " " << at;
      }
    }
  }
}

}  // namespace
}  // namespace oscar
