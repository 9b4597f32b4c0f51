#include "rotation/clip.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/half.h"
#include "base/rng.h"
#include "quant/row_quantizer.h"

namespace oscar {
namespace {

constexpr int kDim = 64;

std::vector<float> GaussianRows(int count, uint64_t seed) {
  const Philox rng(seed, 0);
  std::vector<float> rows(static_cast<size_t>(count) * kDim);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = rng.Normal(i);
  return rows;
}

// The definition, row by row and candidate by candidate.
double ErrorOf(const std::vector<float>& rows, float ratio, const Matrix& weight) {
  RowSpec spec;
  spec.group_dims = kDim;
  spec.clip_ratio = ratio;
  double total = 0;
  for (size_t first = 0; first < rows.size(); first += kDim) {
    std::vector<float> row(kDim), decoded(kDim);
    for (size_t d = 0; d < kDim; ++d) row[d] = ToFloat(ToBf16(rows[first + d]));
    std::vector<uint8_t> codes(kDim);
    float scale = 0, min = 0;
    QuantizeRow(spec, row, codes, {&scale, 1}, {&min, 1});
    DequantizeRow(spec, codes, {&scale, 1}, {&min, 1}, decoded);
    for (int i = 0; i < kDim; ++i) {
      for (int j = 0; j < kDim; ++j) {
        const auto a = static_cast<size_t>(i), b = static_cast<size_t>(j);
        total += (double{row[a]} - decoded[a]) * weight(i, j) * (double{row[b]} - decoded[b]);
      }
    }
  }
  return total;
}

TEST(ClipTest, ErrorsAreTheWeightedTraces) {
  const std::vector<float> rows = GaussianRows(12, 1);
  Matrix weight = Matrix::Identity(kDim);
  for (int i = 0; i + 1 < kDim; ++i) weight(i, i + 1) = weight(i + 1, i) = 0.3;
  weight(7, 7) = 25;
  ClipOptions options;
  options.candidates = {0.0f, 0.95f, 0.85f};
  ClipSearch search(kDim, weight, options);
  search.Add(rows);
  ClipSearch plain(kDim, Matrix(), options);
  plain.Add(rows);
  for (size_t c = 0; c < 3; ++c) {
    const double expected = ErrorOf(rows, options.candidates[c], weight);
    EXPECT_NEAR(search.errors()[c], expected, 1e-9 * expected);
    const double unweighted = ErrorOf(rows, options.candidates[c], Matrix::Identity(kDim));
    EXPECT_NEAR(plain.errors()[c], unweighted, 1e-9 * unweighted);
  }
}

TEST(ClipTest, GaussianRowsWantAClipBelowThePublishedOne) {
  // For 2-bit Gaussian rows the best fixed ratio is near .85: the published .96 leaves error
  // behind.
  ClipOptions options;
  const ClipChoice choice = FitClipRatio(GaussianRows(600, 2), kDim, Matrix(), {}, options);
  EXPECT_GE(choice.ratio, 0.80f);
  EXPECT_LE(choice.ratio, 0.90f);
  EXPECT_LT(choice.error, 0.9 * choice.first_error);
}

TEST(ClipTest, HeavyWeightOnOutliersForbidsTheClip) {
  // One channel is large and all that counts: cutting it is the worst one can do.
  std::vector<float> rows = GaussianRows(100, 3);
  for (size_t first = 0; first < rows.size(); first += kDim) rows[first + 5] = 8.0f;
  Matrix weight(kDim, kDim);
  weight(5, 5) = 1;
  EXPECT_EQ(FitClipRatio(rows, kDim, weight, {}, {}).ratio, 0.0f);
  // With the identity the many small channels win.
  EXPECT_GT(FitClipRatio(rows, kDim, Matrix(), {}, {}).ratio, 0.0f);
}

TEST(ClipTest, RowWeightsCount) {
  // Rows with an outlier weigh nothing: the choice is that of the others.
  std::vector<float> rows = GaussianRows(80, 4);
  const std::vector<float> odd = GaussianRows(80, 5);
  std::vector<float> mixed = rows;
  std::vector<double> weights(80, 1.0);
  for (size_t i = 0; i < odd.size(); ++i) mixed.push_back(i % kDim == 0 ? 500.0f : odd[i]);
  weights.resize(160, 0.0);
  const ClipOptions options;
  ClipSearch a(kDim, Matrix(), options), b(kDim, Matrix(), options);
  a.Add(rows);
  b.Add(mixed, weights);
  for (size_t c = 0; c < options.candidates.size(); ++c) EXPECT_EQ(a.errors()[c], b.errors()[c]);
}

TEST(ClipTest, MergeAddsAndTiesGoToTheFirst) {
  const std::vector<float> rows = GaussianRows(20, 6);
  const ClipOptions options;
  ClipSearch a(kDim, Matrix(), options), b(kDim, Matrix(), options), both(kDim, Matrix(), options);
  a.Add(std::span(rows).first(kDim * 8));
  b.Add(std::span(rows).subspan(kDim * 8));
  both.Add(rows);
  a.Merge(b);
  EXPECT_EQ(a.num_rows(), 20);
  for (size_t c = 0; c < options.candidates.size(); ++c) {
    EXPECT_NEAR(a.errors()[c], both.errors()[c], 1e-9 * both.errors()[c]);
  }
  // Nothing added: all errors are 0, the first candidate wins.
  EXPECT_EQ(ClipSearch(kDim, Matrix(), options).Best().ratio, options.candidates[0]);
}

TEST(ClipTest, OptionsAreChecked) {
  EXPECT_TRUE(ValidateClipOptions({}, 128).ok());
  ClipOptions options;
  options.candidates = {1.2f};
  EXPECT_FALSE(ValidateClipOptions(options, 128).ok());
  options.candidates = {};
  EXPECT_FALSE(ValidateClipOptions(options, 128).ok());
  options = {};
  options.group_dims = 48;
  EXPECT_FALSE(ValidateClipOptions(options, 128).ok());
  options.group_dims = 32;
  EXPECT_TRUE(ValidateClipOptions(options, 128).ok());
  options.bits = 5;
  EXPECT_FALSE(ValidateClipOptions(options, 128).ok());
}

}  // namespace
}  // namespace oscar
