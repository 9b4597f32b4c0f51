#include "base/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace oscar {
namespace {

// Independent judge: the nearest representable value found by search over all bit patterns.
uint16_t NearestFp16(float x) {
  uint16_t best = 0;
  double best_error = std::numeric_limits<double>::infinity();
  for (uint32_t bits = 0; bits < 0x7c00u; ++bits) {
    const double error =
        std::fabs(double{ToFloat(Fp16{static_cast<uint16_t>(bits)})} - std::fabs(double{x}));
    if (error < best_error || (error == best_error && (bits & 1u) == 0)) {
      best = static_cast<uint16_t>(bits);
      best_error = error;
    }
  }
  return static_cast<uint16_t>(best | (std::signbit(x) ? 0x8000u : 0u));
}

TEST(Half, Fp16RoundTripsEveryFiniteValue) {
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const Fp16 h{static_cast<uint16_t>(bits)};
    if ((bits & 0x7c00u) == 0x7c00u && (bits & 0x3ffu) != 0) {
      EXPECT_TRUE(std::isnan(ToFloat(h)));
    } else {
      EXPECT_EQ(ToFp16(ToFloat(h)), h) << bits;
    }
  }
}

TEST(Half, Fp16RoundsToNearestEven) {
  for (float x : {1.0f, 1.0f + 0x1p-11f, 1.0f + 0x1.8p-10f, 1.0f + 0x1.8p-11f, 0x1p-24f, 0x1p-25f,
                  0x1.000002p-25f, 0x1.8p-24f, 0x1p-14f - 0x1p-26f, 65504.0f, 65519.996f, 3.14159f,
                  0.1f, -2.7182818f, 1e-7f, -0.0f}) {
    EXPECT_EQ(ToFp16(x).bits, NearestFp16(x)) << x;
  }
  EXPECT_EQ(ToFp16(65520.0f).bits, 0x7c00u);
  EXPECT_EQ(ToFp16(-std::numeric_limits<float>::infinity()).bits, 0xfc00u);
}

TEST(Half, SaturationForMetadata) {
  EXPECT_EQ(ToFloat(SaturateToFp16(1e9f)), kFp16Max);
  EXPECT_EQ(ToFloat(SaturateToFp16(-std::numeric_limits<float>::infinity())), -kFp16Max);
  EXPECT_EQ(SaturateToFp16(std::nanf("")).bits, 0u);
}

TEST(Half, Bf16RoundTripsAndRoundsToEven) {
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const Bf16 b{static_cast<uint16_t>(bits)};
    if (std::isnan(ToFloat(b)))
      EXPECT_TRUE(std::isnan(ToFloat(ToBf16(ToFloat(b)))));
    else
      EXPECT_EQ(ToBf16(ToFloat(b)), b) << bits;
  }
  EXPECT_EQ(ToBf16(1.0f + 0x1p-8f).bits, 0x3f80u);     // tie, to even
  EXPECT_EQ(ToBf16(1.0f + 0x1.8p-7f).bits, 0x3f82u);   // tie, to even (up)
  EXPECT_EQ(ToBf16(1.0f + 0x1.01p-8f).bits, 0x3f81u);  // above the tie
  EXPECT_EQ(ToBf16(std::numeric_limits<float>::max()).bits, 0x7f80u);
}

}  // namespace
}  // namespace oscar
