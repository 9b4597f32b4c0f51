#include "run/paired.h"

#include <gtest/gtest.h>

namespace oscar {
namespace {

PairedItems Items(int both, int lost, int won, int neither) {
  PairedItems out;
  const auto add = [&](int count, bool baseline, bool method) {
    out.baseline.insert(out.baseline.end(), static_cast<size_t>(count), baseline);
    out.method.insert(out.method.end(), static_cast<size_t>(count), method);
  };
  add(both, true, true);
  add(lost, true, false);
  add(won, false, true);
  add(neither, false, false);
  return out;
}

// From sums of binomial coefficients in whole numbers.
TEST(McNemar, IsTheExactBinomialTest) {
  EXPECT_DOUBLE_EQ(McNemarP(0, 0), 1.0);
  EXPECT_NEAR(McNemarP(1, 0), 1.0, 1e-12);
  EXPECT_NEAR(McNemarP(5, 0), 0.0625, 1e-12);
  EXPECT_NEAR(McNemarP(0, 5), 0.0625, 1e-12);
  EXPECT_NEAR(McNemarP(10, 3), 0.0922851562, 1e-9);
  EXPECT_NEAR(McNemarP(71, 20), 7.2454e-8, 1e-11);
  EXPECT_NEAR(McNemarP(22, 16), 0.417692, 1e-6);
  EXPECT_NEAR(McNemarP(7, 7), 1.0, 1e-12);
}

TEST(ComparePaired, CountsWhatChangedAndWeighsTasksAlike) {
  const PairedScore score =
      ComparePaired({{"long", Items(80, 15, 5, 0)}, {"short", Items(9, 1, 0, 0)}}, 1);
  EXPECT_EQ(score.items, 110);
  EXPECT_EQ(score.lost, 16);
  EXPECT_EQ(score.won, 5);
  EXPECT_NEAR(score.difference, -10.0, 1e-9);  // the mean of -10 and -10
  EXPECT_LT(score.low, score.difference);
  EXPECT_GT(score.high, score.difference);
  EXPECT_NEAR(score.p, McNemarP(16, 5), 0.0);
}

TEST(ComparePaired, TheIntervalIsThatOfTheNormalApproximation) {
  const PairedScore score = ComparePaired({{"task", Items(800, 120, 80, 0)}}, 3);
  // Variance of one change: 0.2 - 0.04^2.
  const double error = 100 * 0.44543 / 31.623;
  EXPECT_NEAR(score.difference, -4.0, 1e-9);
  EXPECT_NEAR(score.low, -4.0 - 1.96 * error, 0.25);
  EXPECT_NEAR(score.high, -4.0 + 1.96 * error, 0.25);
}

TEST(ComparePaired, TheSameSeedGivesTheSameInterval) {
  const std::map<std::string, PairedItems> tasks = {{"task", Items(50, 8, 3, 9)}};
  EXPECT_EQ(ComparePaired(tasks, 5), ComparePaired(tasks, 5));
  EXPECT_EQ(ComparePaired({}, 5), PairedScore());
}

}  // namespace
}  // namespace oscar
