#include "quant/lloyd_max.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "quant/quant_test_util.h"

namespace oscar {
namespace {

// J. Max, "Quantizing for Minimum Distortion", 1960, table I: positive half, 4 digits.
TEST(LloydMax, AgreesWithThePublishedTable) {
  struct Table {
    int bits;
    std::vector<double> levels, thresholds;
    double distortion;
  };
  for (const Table& t : std::initializer_list<Table>{
           {1, {0.7980}, {0.0}, 0.3634},
           {2, {0.4528, 1.510}, {0.0, 0.9816}, 0.1175},
           {3, {0.2451, 0.7560, 1.344, 2.152}, {0.0, 0.5006, 1.050, 1.748}, 0.03454},
           {4,
            {0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733},
            {0.0, 0.2582, 0.5224, 0.7996, 1.099, 1.437, 1.844, 2.401},
            0.009497}}) {
    const GaussianCodebook& book = LloydMaxCodebook(t.bits);
    const size_t half = t.levels.size();
    ASSERT_EQ(book.levels.size(), 2 * half);
    ASSERT_EQ(book.thresholds.size(), 2 * half - 1);
    for (size_t i = 0; i < half; ++i) {
      EXPECT_NEAR(book.levels[half + i], t.levels[i], 6e-4);
      EXPECT_EQ(book.levels[half - 1 - i], -book.levels[half + i]);
      EXPECT_NEAR(book.thresholds[half - 1 + i], t.thresholds[i], 6e-4);
    }
    EXPECT_NEAR(book.distortion, t.distortion, 6e-5);
  }
}

// The fixed point itself, by quadrature that shares nothing with the closed forms of the library.
TEST(LloydMax, LevelsAreTheMeansBetweenThresholds) {
  for (int bits : {2, 3, 4}) {
    const GaussianCodebook& book = LloydMaxCodebook(bits);
    double distortion = 0.0;
    for (size_t i = 0; i < book.levels.size(); ++i) {
      const double a = i == 0 ? -12.0 : book.thresholds[i - 1];
      const double b = i + 1 == book.levels.size() ? 12.0 : book.thresholds[i];
      double mass = 0.0, mean = 0.0, error = 0.0;
      constexpr int kSteps = 20000;
      for (int s = 0; s < kSteps; ++s) {  // midpoint rule
        const double x = a + (s + 0.5) * (b - a) / kSteps;
        const double p = std::exp(-0.5 * x * x);
        mass += p;
        mean += p * x;
        error += p * (x - book.levels[i]) * (x - book.levels[i]);
      }
      EXPECT_NEAR(mean / mass, book.levels[i], 1e-6);
      distortion += error * (b - a) / kSteps / std::sqrt(2.0 * M_PI);
      if (i > 0) {
        EXPECT_NEAR(book.thresholds[i - 1], 0.5 * (book.levels[i - 1] + book.levels[i]), 1e-14);
      }
    }
    EXPECT_NEAR(distortion, book.distortion, 1e-7);
  }
}

double Distortion(const LloydMaxSpec& spec) {
  const TileShape shape{2000, 1, 128};
  const LloydMaxRows quantizer(spec);
  const auto rows = GaussianRows(shape.elements(), 78);
  std::vector<std::byte> bytes(quantizer.EncodedBytes(shape));
  std::vector<float> back(rows.size());
  EXPECT_EQ(quantizer.Encode(shape, rows, bytes), 0);
  EXPECT_TRUE(quantizer.Decode(shape, bytes, back).ok());
  return RelativeError(rows, back);
}

// Expected: independent Monte-Carlo runs of the same rules, three digits; four-digit ones come from
// tools/gaussian_distortion.py. Half a unit of the last digit and 1.2 % for the sample.
TEST(LloydMax, GaussianDistortion) {
  struct Case {
    LloydMaxSpec spec;
    double expected, digit;
  };
  for (const Case& c : std::initializer_list<Case>{{{2, 128}, 0.115, 5e-4},
                                                   {{2, 64}, 0.113, 5e-4},
                                                   {{2, 32}, 0.108, 5e-4},
                                                   {{3, 128}, 0.0337, 5e-5},
                                                   {{4, 128}, 0.0092, 5e-5}}) {
    const double d = Distortion(c.spec);
    const std::string name = LloydMaxRows(c.spec).description();
    RecordProperty(name, std::to_string(d));
    EXPECT_NEAR(d, c.expected, c.digit + 0.012 * c.expected) << name;
  }
}

TEST(LloydMax, ConstantGroupsDecodeToTheirMean) {
  const LloydMaxRows quantizer({2, 32, 0.92f, MetaType::kFp16});
  const TileShape shape{1, 1, 64};
  for (float value : {0.0f, 3.0f, -65504.0f}) {
    const std::vector<float> row(64, value);
    std::vector<std::byte> bytes(quantizer.EncodedBytes(shape));
    std::vector<float> back(row.size());
    EXPECT_EQ(quantizer.Encode(shape, row, bytes), 0);
    ASSERT_TRUE(quantizer.Decode(shape, bytes, back).ok());
    for (float v : back) EXPECT_NEAR(v, value, 1e-3f * std::fabs(value));
  }
}

}  // namespace
}  // namespace oscar
