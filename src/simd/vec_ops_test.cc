#include "simd/vec_ops.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "base/rng.h"
#include "numeric/hadamard.h"
#include "simd/dispatch.h"

namespace oscar::simd {
namespace {

std::vector<float> Random(size_t size, uint64_t stream, float scale = 1.0f) {
  const Philox rng(7, stream);
  std::vector<float> x(size);
  for (size_t i = 0; i < size; ++i) x[i] = scale * rng.Normal(i);
  return x;
}

// Every test runs once on each target of this machine.
class VecOps : public testing::TestWithParam<Target> {
 protected:
  ScopedTarget target_{GetParam()};
};

constexpr size_t kSizes[] = {1, 15, 16, 17, 64, 100, 896, 4096};

TEST_P(VecOps, RmsNormMatchesFp64) {
  for (const size_t size : kSizes) {
    const auto x = Random(size, 1, 3.0f), weight = Random(size, 2);
    std::vector<float> out(size);
    RmsNorm(x, weight, 1e-6f, out);
    double squares = 0.0;
    for (const float v : x) squares += static_cast<double>(v) * v;
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(size) + 1e-6);
    for (size_t i = 0; i < size; ++i) {
      EXPECT_NEAR(out[i], x[i] * scale * weight[i], 2e-6 * (1.0 + std::fabs(out[i])));
    }
    auto residual = Random(size, 3);
    std::vector<float> sum(size), expected(size), fused(size);
    for (size_t i = 0; i < size; ++i) sum[i] = residual[i] + x[i];
    RmsNorm(sum, weight, 1e-6f, expected);
    AddRmsNorm(residual, x, weight, 1e-6f, fused);
    EXPECT_EQ(residual, sum);
    EXPECT_EQ(fused, expected);
  }
}

TEST_P(VecOps, ClampedGateMulMatchesFp64AndItsLimits) {
  for (const size_t size : kSizes) {
    auto gate_up = Random(2 * size, 4, 6.0f);
    gate_up[0] = -std::numeric_limits<float>::max();
    std::vector<float> out(size);
    ClampedGateMul(gate_up, 7.0f, 1.702f, out);
    for (size_t i = 0; i < size; ++i) {
      const double gate = std::min(7.0, static_cast<double>(gate_up[2 * i]));
      const double up = std::clamp(static_cast<double>(gate_up[2 * i + 1]), -7.0, 7.0);
      const double expected = (up + 1.0) * gate / (1.0 + std::exp(-1.702 * gate));
      EXPECT_NEAR(out[i], gate < -1e3 ? 0.0 : expected, 4e-6 * (1.0 + std::fabs(expected)));
    }
  }
  // gate, up: sigmoid(1.702), a gate beyond the limit, an up beyond it.
  const std::vector<float> values = {1.0f, 0.0f, 10.0f, 0.0f, 1.0f, -9.0f};
  std::vector<float> out(3);
  ClampedGateMul(values, 7.0f, 1.702f, out);
  EXPECT_NEAR(out[0], 0.845796, 1e-6);
  EXPECT_NEAR(out[1], 6.999953, 1e-5);
  EXPECT_NEAR(out[2], -6.0 * 0.845796, 1e-5);
}

TEST_P(VecOps, SiluMulMatchesFp64AndSurvivesExtremes) {
  auto gate = Random(100, 1, 20.0f);
  const auto up = Random(100, 2);
  gate[3] = -1e30f;
  gate[4] = 1e30f;
  gate[5] = 0.0f;
  gate[6] = -std::numeric_limits<float>::max();
  std::vector<float> out(gate.size());
  SiluMul(gate, up, out);
  for (size_t i = 0; i < gate.size(); ++i) {
    const double expected = gate[i] / (1.0 + std::exp(-static_cast<double>(gate[i]))) * up[i];
    EXPECT_NEAR(out[i], expected, 1e-6 * std::fabs(expected) + 1e-6) << gate[i];
  }
}

TEST_P(VecOps, SigmoidMatchesFp64AndSurvivesExtremes) {
  auto x = Random(77, 1, 20.0f);
  x[3] = -1e30f;
  x[4] = 1e30f;
  x[5] = 0.0f;
  x[6] = -90.0f;
  x[7] = std::numeric_limits<float>::quiet_NaN();
  auto y = x;
  Sigmoid(y);
  for (size_t i = 0; i < x.size(); ++i) {
    if (i == 7) continue;
    EXPECT_NEAR(y[i], 1.0 / (1.0 + std::exp(-static_cast<double>(x[i]))), 2e-7) << x[i];
  }
  EXPECT_FALSE(y[7] < 0.0f || y[7] > 1.0f);
}

TEST_P(VecOps, DotAndAddScaledMatchTheScalar) {
  for (const size_t size : {1u, 15u, 16u, 17u, 64u, 1000u}) {
    const auto x = Random(size, 1), y = Random(size, 2);
    // Sixteen lanes, folded 8, 4, 2, 1.
    float lanes[16] = {};
    for (size_t i = 0; i < size; ++i) lanes[i % 16] = std::fma(x[i], y[i], lanes[i % 16]);
    for (size_t step = 8; step > 0; step /= 2) {
      for (size_t i = 0; i < step; ++i) lanes[i] += lanes[i + step];
    }
    EXPECT_EQ(Dot(x, y), lanes[0]) << size;
    auto sum = x;
    AddScaled(sum, 0.7f, y);
    for (size_t i = 0; i < size; ++i) EXPECT_EQ(sum[i], std::fma(0.7f, y[i], x[i]));
  }
}

TEST_P(VecOps, RopeTurnsPairs) {
  for (const size_t half : {32u, 64u, 40u}) {
    const auto x = Random(2 * half, 1), angle = Random(half, 2, 3.0f);
    std::vector<float> cos(half), sin(half);
    for (size_t i = 0; i < half; ++i) cos[i] = std::cos(angle[i]), sin[i] = std::sin(angle[i]);
    auto y = x;
    ApplyRope(y, cos, sin);
    for (size_t i = 0; i < half; ++i) {
      EXPECT_FLOAT_EQ(y[i], x[i] * cos[i] - x[i + half] * sin[i]);
      EXPECT_FLOAT_EQ(y[i + half], x[i + half] * cos[i] + x[i] * sin[i]);
    }
  }
}

TEST_P(VecOps, HadamardIsBitEqualToTheScalar) {
  for (const size_t size : {16u, 32u, 64u, 128u, 256u, 1024u}) {
    auto expected = Random(size, size, 5.0f);
    expected[1] = -0.0f;
    expected[size / 2] = 1e-40f;
    auto actual = expected;
    FastHadamard(expected);
    FastHadamardRow(actual);
    for (size_t i = 0; i < size; ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(actual[i]), std::bit_cast<uint32_t>(expected[i])) << i;
    }
  }
}

TEST_P(VecOps, RotationIsTheFusedSumInOrder) {
  for (const size_t dims : {64u, 128u, 256u, 80u}) {
    const auto x = Random(dims, 1), r = Random(dims * dims, 2);
    std::vector<float> out(dims);
    RotateRow(x, r, out);
    for (size_t j = 0; j < dims; ++j) {
      float sum = 0.0f;
      for (size_t i = 0; i < dims; ++i) sum = std::fma(x[i], r[i * dims + j], sum);
      ASSERT_EQ(out[j], sum);
    }
  }
}

TEST_P(VecOps, Bf16ConversionsAreExactForEveryPattern) {
  std::vector<Bf16> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i].bits = static_cast<uint16_t>(i);
  std::vector<float> wide(all.size());
  ToFloatRow(all, wide);
  std::vector<Fp16> halves(65536);
  std::vector<float> from_half(65536);
  for (size_t i = 0; i < halves.size(); ++i) halves[i].bits = static_cast<uint16_t>(i);
  ToFloatRow(halves, from_half);
  for (size_t i = 0; i < all.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(wide[i]), std::bit_cast<uint32_t>(ToFloat(all[i])));
    const float expected = ToFloat(halves[i]);
    ASSERT_TRUE(from_half[i] == expected || (std::isnan(expected) && std::isnan(from_half[i])));
  }
  // Rounding: each pattern with a dropped half of 0, 1, just below, at and above the tie.
  for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
    std::vector<float> x(65536);
    std::vector<Bf16> out(x.size());
    for (uint32_t i = 0; i < 65536; ++i) x[i] = std::bit_cast<float>((i << 16) | low);
    ToBf16Row(x, out);
    for (size_t i = 0; i < x.size(); ++i) ASSERT_EQ(out[i].bits, ToBf16(x[i]).bits) << i << low;
  }
}

TEST_P(VecOps, ArgMaxTakesTheFirstAndIgnoresNaN) {
  std::vector<float> x = Random(1000, 1);
  x[3] = std::numeric_limits<float>::quiet_NaN();
  x[700] = x[500] = x[999] = 50.0f;
  EXPECT_EQ(ArgMax(x), 500);
  x[0] = 51.0f;
  EXPECT_EQ(ArgMax(x), 0);
  x[998] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(ArgMax(x), 998);
  EXPECT_EQ(ArgMax(std::vector<float>(5, std::nanf(""))), 0);
  EXPECT_EQ(ArgMax(std::vector<float>{-3.0f}), 0);
}

TEST_P(VecOps, SoftmaxAndLogSumExpMatchFp64) {
  for (const size_t size : kSizes) {
    auto x = Random(size, 9, 10.0f);
    if (size > 2) x[1] = -std::numeric_limits<float>::infinity();
    const double largest = MaxElement(x);
    double sum = 0.0;
    for (const float v : x) sum += std::exp(v - largest);
    EXPECT_NEAR(LogSumExp(x), largest + std::log(sum), 1e-5);
    auto p = x;
    Softmax(p);
    for (size_t i = 0; i < size; ++i) EXPECT_NEAR(p[i], std::exp(x[i] - largest) / sum, 2e-6);
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, VecOps,
                         testing::ValuesIn(SupportedTargets().begin(), SupportedTargets().end()));

}  // namespace
}  // namespace oscar::simd
