#include "numeric/hadamard.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/rng.h"

namespace oscar {
namespace {

std::vector<float> RandomRow(int dim, uint64_t seed) {
  const Philox rng(seed, 0);
  std::vector<float> row(static_cast<size_t>(dim));
  for (size_t i = 0; i < row.size(); ++i) row[i] = rng.Normal(i);
  return row;
}

class HadamardOrder : public testing::TestWithParam<int> {};

TEST_P(HadamardOrder, MatrixIsSymmetricOrthogonalAndSylvester) {
  const int dim = GetParam();
  const Matrix h = HadamardMatrix(dim);
  EXPECT_LT(OrthogonalityError(h), 1e-14);
  EXPECT_EQ(MaxAbsDifference(h, h.Transposed()), 0);
  if (dim == 1) return;
  // The recursion [[H, H], [H, -H]] / sqrt(2), an independent definition.
  const Matrix half = HadamardMatrix(dim / 2);
  for (int i = 0; i < dim; ++i) {
    for (int j = 0; j < dim; ++j) {
      const double sign = i >= dim / 2 && j >= dim / 2 ? -1 : 1;
      EXPECT_NEAR(h(i, j), sign * half(i % (dim / 2), j % (dim / 2)) / std::sqrt(2.0), 1e-15);
    }
  }
}

TEST_P(HadamardOrder, FastTransformIsTheMatrixProduct) {
  const int dim = GetParam();
  const std::vector<float> row = RandomRow(dim, 7);
  std::vector<float> fast = row;
  FastHadamard(fast);
  const Matrix product = Multiply(Matrix::FromFloats(row, 1, dim), HadamardMatrix(dim));
  for (int j = 0; j < dim; ++j) {
    EXPECT_NEAR(fast[static_cast<size_t>(j)], product(0, j), 1e-6 * std::sqrt(dim));
  }
  FastHadamard(fast);  // an involution, to rounding
  for (int j = 0; j < dim; ++j) {
    EXPECT_NEAR(fast[static_cast<size_t>(j)], row[static_cast<size_t>(j)], 4e-6);
  }
}

INSTANTIATE_TEST_SUITE_P(Orders, HadamardOrder, testing::Values(1, 2, 4, 16, 64, 128, 256));

TEST(HadamardTest, SmallIntegersAreExact) {
  // At order 16 the scale is 1/4, so every value below is exact and the bits are fixed.
  std::vector<float> row(16, 0.0f);
  row[5] = 8.0f;
  FastHadamard(row);
  for (uint32_t j = 0; j < 16; ++j) {
    EXPECT_EQ(row[j], std::popcount(5u & j) % 2 == 0 ? 2.0f : -2.0f);
  }
}

TEST(HadamardTest, BlocksAreIndependentTransforms) {
  for (const int order : {16, 32, 64, 128}) {
    const std::vector<float> row = RandomRow(128, 9);
    std::vector<float> blocks = row;
    FastHadamardBlocks(blocks, order);
    const Matrix product =
        Multiply(Matrix::FromFloats(row, 1, 128), BlockHadamardMatrix(128, order));
    for (int j = 0; j < 128; ++j) {
      EXPECT_NEAR(blocks[static_cast<size_t>(j)], product(0, j), 1e-5);
    }
    // A change in one block stays there.
    std::vector<float> changed = row;
    changed[0] += 1.0f;
    FastHadamardBlocks(changed, order);
    EXPECT_TRUE(std::equal(changed.begin() + order, changed.end(), blocks.begin() + order));
    EXPECT_NE(changed[0], blocks[0]);
  }
}

TEST(BitReversalTest, ReversesAndIsAnInvolution) {
  EXPECT_EQ(BitReverse(0b0000001, 7), 0b1000000u);
  EXPECT_EQ(BitReverse(0b0010110, 7), 0b0110100u);
  for (uint32_t i = 0; i < 256; ++i) EXPECT_EQ(BitReverse(BitReverse(i, 8), 8), i);
}

TEST(BitReversalTest, AscendingValuesGiveTheFixedPermutation) {
  // Eigenvalues come ascending, so order[i] = D-1-i and perm[j] = D-1-br(j).
  std::vector<double> values(128);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(i);
  const std::vector<int> perm = BitReversalPermutation(values);
  for (uint32_t j = 0; j < 128; ++j) {
    EXPECT_EQ(perm[j], 127 - static_cast<int>(BitReverse(j, 7)));
  }
}

TEST(BitReversalTest, LargestValuesGoToReversedPositions) {
  // Worked by hand for D = 4: order = {2, 0, 3, 1}; br = {0, 2, 1, 3}.
  const std::vector<double> values{5, 1, 9, 3};
  EXPECT_EQ(BitReversalPermutation(values), (std::vector<int>{2, 3, 0, 1}));
  // Equal values keep their order: perm[br(i)] = i.
  EXPECT_EQ(BitReversalPermutation(std::vector<double>(4, 1.0)), (std::vector<int>{0, 2, 1, 3}));
}

}  // namespace
}  // namespace oscar
