#include "arch/rope.h"

#include <gtest/gtest.h>

#include <cmath>

namespace oscar {
namespace {

TEST(Rope, PlainFrequencies) {
  const RopeTable rope(1e6, {}, 128);
  EXPECT_EQ(rope.frequency()[0], 1.0f);
  EXPECT_FLOAT_EQ(rope.frequency()[32], 1e-3f);
  std::vector<float> cos(64), sin(64);
  rope.Fill(1000, cos, sin);
  EXPECT_NEAR(cos[32], std::cos(1.0), 1e-5);
  EXPECT_NEAR(sin[0], std::sin(1000.0), 1e-6);
}

// Values computed with transformers 5.22 (modeling_rope_utils), Llama-3.1 and a Qwen3 yarn config:
// tools/make_rope_goldens.py.
TEST(Rope, Llama3MatchesTheReference) {
  RopeScaling scaling{RopeScalingType::kLlama3, 8.0, 8192, 1.0, 4.0};
  const RopeTable rope(500000.0, scaling, 128);
  EXPECT_FLOAT_EQ(rope.frequency()[0], 1.0f);
  EXPECT_FLOAT_EQ(rope.frequency()[20], 0.016560440883040428f);
  EXPECT_FLOAT_EQ(rope.frequency()[30], 0.0013718936825171113f);
  EXPECT_FLOAT_EQ(rope.frequency()[34], 0.0001785077911335975f);
  EXPECT_FLOAT_EQ(rope.frequency()[63], 3.068925877869333e-07f);
  EXPECT_EQ(rope.magnitude(), 1.0f);
}

// gpt-oss: theta 150000, 64 dims, factor 32 over 4096; check values from the formula in FP64.
TEST(Rope, YarnWithoutTruncation) {
  RopeScaling scaling{RopeScalingType::kYarn, 32.0, 4096};
  scaling.truncate = false;
  const RopeTable rope(150000.0, scaling, 64);
  std::vector<float> cos(32), sin(32);
  rope.Fill(1, cos, sin);
  const double magnitude = 0.1 * std::log(32.0) + 1.0;
  for (const auto& [i, frequency] : {std::pair(8, 5.081327e-2),
                                     {9, 3.170570e-2},
                                     {12, 6.794959e-3},
                                     {17, 1.293187e-4},
                                     {18, 3.830881e-5},
                                     {31, 3.023511e-7}}) {
    EXPECT_NEAR(sin[static_cast<size_t>(i)] / magnitude, std::sin(frequency), 1e-5 * frequency)
        << i;
  }
}

TEST(Rope, YarnMatchesTheReference) {
  RopeScaling scaling{RopeScalingType::kYarn, 4.0, 32768};
  const RopeTable rope(1e6, scaling, 128);
  EXPECT_FLOAT_EQ(rope.frequency()[10], 0.11547820270061493f);
  EXPECT_FLOAT_EQ(rope.frequency()[25], 0.004131738096475601f);
  EXPECT_FLOAT_EQ(rope.frequency()[35], 0.0002462583943270147f);
  EXPECT_FLOAT_EQ(rope.frequency()[63], 3.102344408034696e-07f);
  EXPECT_FLOAT_EQ(rope.magnitude(), 1.138629436111989f);
  std::vector<float> cos(64), sin(64);
  rope.Fill(0, cos, sin);
  EXPECT_FLOAT_EQ(cos[0], 1.138629436111989f);
}

TEST(Rope, LinearDividesEveryAngle) {
  const RopeTable plain(1e4, {}, 64), linear(1e4, {RopeScalingType::kLinear, 4.0}, 64);
  for (size_t i = 0; i < 32; ++i) {
    EXPECT_FLOAT_EQ(linear.frequency()[i], plain.frequency()[i] / 4);
  }
}

}  // namespace
}  // namespace oscar
