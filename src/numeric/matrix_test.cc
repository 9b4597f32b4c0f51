#include "numeric/matrix.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/rng.h"

namespace oscar {
namespace {

Matrix RandomMatrix(int rows, int cols, uint64_t seed) {
  const Philox rng(seed, 0);
  Matrix m(rows, cols);
  for (size_t i = 0; i < m.data().size(); ++i) m.data()[i] = rng.Normal(i);
  return m;
}

TEST(MatrixTest, MultiplyMatchesTheDefinition) {
  const Matrix a = RandomMatrix(5, 7, 1);
  const Matrix b = RandomMatrix(7, 3, 2);
  const Matrix c = Multiply(a, b);
  ASSERT_EQ(c.rows(), 5);
  ASSERT_EQ(c.cols(), 3);
  for (int i = 0; i < 5; ++i) {
    for (int j = 0; j < 3; ++j) {
      double sum = 0;
      for (int k = 0; k < 7; ++k) sum += a(i, k) * b(k, j);
      EXPECT_EQ(c(i, j), sum);  // the order of the sum is part of the contract
    }
  }
}

TEST(MatrixTest, PermutedColumnsTakesColumnPermJ) {
  const Matrix m = RandomMatrix(3, 4, 3);
  const std::vector<int> perm{2, 0, 3, 1};
  const Matrix p = m.PermutedColumns(perm);
  for (int i = 0; i < 3; ++i) {
    for (int j = 0; j < 4; ++j) EXPECT_EQ(p(i, j), m(i, perm[static_cast<size_t>(j)]));
  }
  // M P with P = I[:, perm] is the same thing.
  EXPECT_EQ(MaxAbsDifference(Multiply(m, Matrix::Identity(4).PermutedColumns(perm)), p), 0);
}

TEST(MatrixTest, OrthogonalityErrorSeesWhatIsWrong) {
  Matrix m = Matrix::Identity(8);
  EXPECT_EQ(OrthogonalityError(m), 0);
  m(3, 5) = 0.25;
  EXPECT_DOUBLE_EQ(OrthogonalityError(m), 0.25);
  m(3, 5) = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(std::isinf(OrthogonalityError(m)));
  m(3, 5) = 1e300;  // finite, but its square is not
  EXPECT_TRUE(std::isinf(OrthogonalityError(m)));
}

TEST(MatrixTest, KnowsValuesThatAreNotFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float broken : {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity}) {
    for (const size_t at : {0u, 17u, 99u}) {
      std::vector<float> values(100, std::numeric_limits<float>::max());
      EXPECT_TRUE(AllFinite(values));
      values[at] = broken;
      EXPECT_FALSE(AllFinite(values));
    }
  }
}

TEST(MatrixTest, Stats) {
  Matrix m(2, 2);
  m(0, 0) = 3;
  m(0, 1) = -4;
  m(1, 1) = 1;
  const MatrixStats stats = StatsOf(m);
  EXPECT_EQ(stats.min, -4);
  EXPECT_EQ(stats.max, 3);
  EXPECT_EQ(stats.mean, 0);
  EXPECT_EQ(stats.trace, 4);
  EXPECT_DOUBLE_EQ(stats.frobenius, std::sqrt(26.0));
  EXPECT_TRUE(stats.finite);
  m(1, 0) = std::numeric_limits<double>::infinity();
  EXPECT_FALSE(StatsOf(m).finite);
}

TEST(MatrixTest, FloatsRoundTrip) {
  const std::vector<float> values{1.5f, -2.25f, 0.1f, 3e-20f, 7.0f, -0.0f};
  EXPECT_EQ(Matrix::FromFloats(values, 2, 3).ToFloats(), values);
}

}  // namespace
}  // namespace oscar
