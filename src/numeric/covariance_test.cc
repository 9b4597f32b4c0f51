#include "numeric/covariance.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/rng.h"

namespace oscar {
namespace {

std::vector<float> RandomRows(int64_t count, uint64_t seed) {
  const Philox rng(seed, 0);
  std::vector<float> rows(static_cast<size_t>(count));
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = rng.Normal(i) + 0.5f;
  return rows;
}

// Straight from the definition, in long double.
Matrix NaiveMoment(const std::vector<float>& rows, const std::vector<double>& weights, int heads,
                   int first_head, int group_heads, int dim) {
  const auto tokens = static_cast<int64_t>(rows.size()) / (heads * dim);
  Matrix m(dim, dim);
  for (int i = 0; i < dim; ++i) {
    for (int j = 0; j < dim; ++j) {
      long double sum = 0;
      for (int64_t t = 0; t < tokens; ++t) {
        for (int h = first_head; h < first_head + group_heads; ++h) {
          const int64_t at = t * heads + h;
          const long double w = weights.empty() ? 1.0L : weights[static_cast<size_t>(at)];
          sum +=
              w * rows[static_cast<size_t>(at * dim + i)] * rows[static_cast<size_t>(at * dim + j)];
        }
      }
      m(i, j) = static_cast<double>(sum / static_cast<long double>(tokens * group_heads));
    }
  }
  return m;
}

TEST(CovarianceTest, MatchesTheDefinition) {
  ThreadPool pool(1);
  for (const int dim : {1, 5, 16, 24, 64}) {  // full tiles, partial tiles and both
    const int groups = 2;
    const int group_heads = 3;
    const int64_t tokens = 300;  // more than one block
    const std::vector<float> rows = RandomRows(tokens * groups * group_heads * dim, 11);
    std::vector<double> weights(static_cast<size_t>(tokens * groups * group_heads));
    const Philox rng(12, 0);
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = rng.Uniform(i);
    for (const bool weighted : {false, true}) {
      CovarianceAccumulator sum(groups, group_heads, dim);
      sum.Add(rows, weighted ? weights : std::vector<double>{}, pool);
      EXPECT_EQ(sum.num_tokens(), tokens);
      EXPECT_EQ(sum.rows_per_group(), tokens * group_heads);
      for (int g = 0; g < groups; ++g) {
        const Matrix expected =
            NaiveMoment(rows, weighted ? weights : std::vector<double>{}, groups * group_heads,
                        g * group_heads, group_heads, dim);
        EXPECT_LT(MaxAbsDifference(sum.SecondMoment(g), expected), 1e-13) << dim << " " << g;
      }
    }
  }
}

TEST(CovarianceTest, BitsDependNeitherOnThreadsNorOnChunks) {
  const int heads = 4;
  const int dim = 24;
  const int64_t tokens = 700;
  const std::vector<float> rows = RandomRows(tokens * heads * dim, 21);
  ThreadPool one(1);
  CovarianceAccumulator whole(heads, 1, dim);
  whole.Add(rows, one);
  for (const int threads : {2, 5}) {
    ThreadPool pool(threads);
    for (const int64_t chunk : {int64_t{1}, int64_t{97}, int64_t{256}, tokens}) {
      CovarianceAccumulator parts(heads, 1, dim);
      for (int64_t first = 0; first < tokens; first += chunk) {
        const int64_t count = std::min(chunk, tokens - first);
        parts.Add(std::span(rows).subspan(static_cast<size_t>(first * heads * dim),
                                          static_cast<size_t>(count * heads * dim)),
                  pool);
      }
      for (int h = 0; h < heads; ++h) {
        EXPECT_EQ(MaxAbsDifference(parts.SecondMoment(h), whole.SecondMoment(h)), 0);
        EXPECT_EQ(parts.Mean(h), whole.Mean(h));
      }
    }
  }
}

TEST(CovarianceTest, MergeOfPartsIsTheWhole) {
  ThreadPool pool(2);
  const int heads = 2;
  const int dim = 16;
  const std::vector<float> rows = RandomRows(int64_t{512} * heads * dim, 31);
  CovarianceAccumulator whole(heads, 1, dim);
  whole.Add(rows, pool);
  CovarianceAccumulator first(heads, 1, dim);
  CovarianceAccumulator second(heads, 1, dim);
  const size_t cut = size_t{200} * heads * dim;
  first.Add(std::span(rows).first(cut), pool);
  second.Add(std::span(rows).subspan(cut), pool);
  first.Merge(second);
  EXPECT_EQ(first.num_tokens(), 512);
  for (int h = 0; h < heads; ++h) {
    EXPECT_LT(MaxAbsDifference(first.SecondMoment(h), whole.SecondMoment(h)), 1e-13);
    EXPECT_LT(MaxAbsDifference(first.Centered(h), whole.Centered(h)), 1e-13);
  }
}

TEST(CovarianceTest, CenteringRemovesTheMean) {
  ThreadPool pool(1);
  const int dim = 16;
  // Every row is the same vector: the covariance is zero, the second moment is not.
  std::vector<float> rows;
  for (int t = 0; t < 50; ++t) {
    for (int d = 0; d < dim; ++d) rows.push_back(static_cast<float>(d));
  }
  CovarianceAccumulator sum(1, 1, dim);
  sum.Add(rows, pool);
  EXPECT_EQ(StatsOf(sum.Centered(0)).frobenius, 0);
  EXPECT_EQ(sum.SecondMoment(0)(3, 5), 15);
  EXPECT_EQ(sum.Mean(0)[7], 7);
}

TEST(CovarianceTest, MeanOverGroups) {
  ThreadPool pool(1);
  const std::vector<float> rows = RandomRows(int64_t{40} * 3 * 8, 41);
  CovarianceAccumulator sum(3, 1, 8);
  sum.Add(rows, pool);
  Matrix mean(8, 8);
  for (int h = 0; h < 3; ++h) AddTo(mean, sum.SecondMoment(h));
  EXPECT_LT(MaxAbsDifference(sum.MeanSecondMoment(), Scaled(mean, 1.0 / 3)), 1e-15);
}

}  // namespace
}  // namespace oscar
