#include "rotation/spectrum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace oscar {
namespace {

TEST(SpectrumTest, DecadesAreLinesOfEqualHeight) {
  // 1, .1, .01, .001: evenly spaced on a log scale.
  const std::vector<float> values{0.001f, 0.01f, 0.1f, 1.0f};
  EXPECT_EQ(SpectrumPlot(values, 40, 3),
            " 1.00e+00 █   \n"
            "          ██▁ \n"
            " 1.00e-03 ███▁\n"
            "          4 eigenvalues, log scale; 1 hold 90% of the trace\n");
}

TEST(SpectrumTest, FoldsManyValuesIntoColumns) {
  std::vector<float> values(128);
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::exp(0.1f * static_cast<float>(i));
  const std::string plot = SpectrumPlot(values, 32, 6);
  EXPECT_EQ(std::count(plot.begin(), plot.end(), '\n'), 7);
  EXPECT_NE(plot.find("128 eigenvalues"), std::string::npos);
}

TEST(SpectrumTest, HandlesWhatHasNoLogarithm) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(SpectrumPlot({}, 10, 4), "no positive eigenvalues\n");
  EXPECT_EQ(SpectrumPlot(std::vector<float>{0, -1, nan}, 10, 4), "no positive eigenvalues\n");
  const std::string plot = SpectrumPlot(std::vector<float>{1, 0, -3, nan, inf}, 10, 2);
  EXPECT_NE(plot.find("5 eigenvalues"), std::string::npos);
  // A flat spectrum fills its columns.
  EXPECT_NE(SpectrumPlot(std::vector<float>(4, 1.0f), 8, 2).find("████\n"), std::string::npos);
}

}  // namespace
}  // namespace oscar
