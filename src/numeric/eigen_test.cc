#include "numeric/eigen.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/rng.h"
#include "numeric/hadamard.h"

namespace oscar {
namespace {

Matrix RandomSymmetric(int dim, uint64_t seed) {
  const Philox rng(seed, 0);
  Matrix m(dim, dim);
  for (size_t i = 0; i < m.data().size(); ++i) m.data()[i] = rng.Normal(i);
  return Symmetrized(m);
}

TEST(EigenTest, DecomposesAscendingWithCanonicalSigns) {
  for (const int dim : {1, 2, 16, 128}) {
    const Matrix m = RandomSymmetric(dim, 5);
    const auto eigen = DecomposeSymmetric(m);
    ASSERT_TRUE(eigen.has_value());
    EXPECT_LT(eigen->orthogonality, 1e-12);
    EXPECT_LT(OrthogonalityError(eigen->vectors), 1e-12);
    EXPECT_LT(MaxAbsDifference(Reconstruct(*eigen), m), 1e-12 * dim);
    for (int j = 0; j < dim; ++j) {
      if (j > 0) {
        EXPECT_LE(eigen->values[static_cast<size_t>(j) - 1], eigen->values[static_cast<size_t>(j)]);
      }
      double largest = 0;
      for (int i = 0; i < dim; ++i) {
        if (std::abs(eigen->vectors(i, j)) > std::abs(largest)) largest = eigen->vectors(i, j);
      }
      EXPECT_GT(largest, 0);
    }
  }
}

TEST(EigenTest, FindsAPlantedSpectrum) {
  // H diag(1..16) H has eigenvalues 1..16 and the Hadamard columns as eigenvectors.
  const Matrix h = HadamardMatrix(16);
  Matrix scaled = h;
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) scaled(i, j) *= j + 1;
  }
  const auto eigen = DecomposeSymmetric(Multiply(scaled, h));
  ASSERT_TRUE(eigen.has_value());
  for (int j = 0; j < 16; ++j) {
    EXPECT_NEAR(eigen->values[static_cast<size_t>(j)], j + 1, 1e-12);
    EXPECT_LT(SubspaceDistance(eigen->vectors.Columns(j, 1), h.Columns(j, 1)), 1e-12);
  }
}

TEST(EigenTest, RefusesWhatIsNotFinite) {
  Matrix m = Matrix::Identity(4);
  m(1, 2) = std::numeric_limits<double>::quiet_NaN();
  const auto eigen = DecomposeSymmetric(m);
  ASSERT_FALSE(eigen.has_value());
  EXPECT_EQ(eigen.error().code(), StatusCode::kDataLoss);
}

TEST(SubspaceTest, AnglesOfKnownPlanes) {
  // In 4 dims: span(e0, e1) against span(e0, cos a e1 + sin a e2).
  for (const double angle : {1e-9, 0.1, 1.0, 1.5}) {
    Matrix a(4, 2);
    a(0, 0) = a(1, 1) = 1;
    Matrix b(4, 2);
    b(0, 0) = 1;
    b(1, 1) = std::cos(angle);
    b(2, 1) = std::sin(angle);
    const std::vector<double> angles = PrincipalAngles(a, b);
    EXPECT_NEAR(angles[0], 0, 1e-12);
    EXPECT_NEAR(angles[1], angle, 1e-12);
    EXPECT_NEAR(SubspaceDistance(a, b), std::sin(angle), 1e-12);
  }
}

TEST(SubspaceTest, BasisDoesNotMatterSpaceDoes) {
  const auto eigen = DecomposeSymmetric(RandomSymmetric(16, 8));
  ASSERT_TRUE(eigen.has_value());
  const Matrix a = eigen->vectors.Columns(0, 4);
  EXPECT_LT(SubspaceDistance(a, Multiply(a, HadamardMatrix(4))), 1e-12);
  EXPECT_NEAR(SubspaceDistance(a, eigen->vectors.Columns(1, 4)), 1.0, 1e-12);
}

}  // namespace
}  // namespace oscar
