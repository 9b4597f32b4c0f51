#include "numeric/covariance.h"

#include <algorithm>

#include "base/check.h"
#include "numeric/multiversion.h"

namespace oscar {
namespace {

constexpr int kTileRows = 4;
constexpr int kTileCols = 16;
// Tokens widened to fp64 at a time: bounds scratch to a few MiB a group.
constexpr int64_t kBlockTokens = 256;

// sum[r, c] += left[t, r] * right[t, c] for t in order. `left` and `right` have `stride` doubles a
// row. Full tiles keep their sums in registers over all tokens.
OSCAR_MULTIVERSION
void AddTile(const double* left, const double* right, int64_t num_rows, int64_t stride, double* sum,
             int64_t sum_stride) {
  double tile[kTileRows][kTileCols];
  for (int r = 0; r < kTileRows; ++r) {
    for (int c = 0; c < kTileCols; ++c) tile[r][c] = sum[r * sum_stride + c];
  }
  for (int64_t t = 0; t < num_rows; ++t) {
    const double* a = left + t * stride;
    const double* b = right + t * stride;
    for (int r = 0; r < kTileRows; ++r) {
      for (int c = 0; c < kTileCols; ++c) tile[r][c] += a[r] * b[c];
    }
  }
  for (int r = 0; r < kTileRows; ++r) {
    for (int c = 0; c < kTileCols; ++c) sum[r * sum_stride + c] = tile[r][c];
  }
}

// The same sums in the same order for a tile at the edge.
void AddPartialTile(const double* left, const double* right, int64_t num_rows, int64_t stride,
                    int tile_rows, int tile_cols, double* sum, int64_t sum_stride) {
  for (int64_t t = 0; t < num_rows; ++t) {
    for (int r = 0; r < tile_rows; ++r) {
      for (int c = 0; c < tile_cols; ++c) {
        sum[r * sum_stride + c] += left[t * stride + r] * right[t * stride + c];
      }
    }
  }
}

}  // namespace

CovarianceAccumulator::CovarianceAccumulator(int num_groups, int heads_per_group, int dim)
    : num_groups_(num_groups),
      heads_per_group_(heads_per_group),
      dim_(dim),
      moments_(static_cast<size_t>(num_groups), Matrix(dim, dim)),
      sums_(static_cast<size_t>(num_groups), std::vector<double>(static_cast<size_t>(dim))) {
  OSCAR_CHECK(num_groups > 0 && heads_per_group > 0 && dim > 0);
}

void CovarianceAccumulator::Add(std::span<const float> rows, std::span<const double> weights,
                                ThreadPool& pool) {
  const int64_t heads = int64_t{num_groups_} * heads_per_group_;
  const int64_t dim = dim_;
  OSCAR_CHECK(static_cast<int64_t>(rows.size()) % (heads * dim) == 0,
              "{} values, {} x {} per token", rows.size(), heads, dim);
  const int64_t num_tokens = static_cast<int64_t>(rows.size()) / (heads * dim);
  OSCAR_CHECK(weights.empty() || static_cast<int64_t>(weights.size()) == num_tokens * heads);

  const int64_t block_rows = kBlockTokens * heads_per_group_;
  const auto block_size = static_cast<size_t>(block_rows * dim);
  // [groups][block rows, dim]: the rows, and the rows times their weights.
  std::vector<std::vector<double>> wide(static_cast<size_t>(num_groups_));
  std::vector<std::vector<double>> weighted(static_cast<size_t>(num_groups_));
  const int64_t row_tiles = (dim + kTileRows - 1) / kTileRows;

  for (int64_t first = 0; first < num_tokens; first += kBlockTokens) {
    const int64_t tokens = std::min(kBlockTokens, num_tokens - first);
    const int64_t count = tokens * heads_per_group_;
    pool.ParallelFor(num_groups_, [&](int64_t group, int) {
      const auto g = static_cast<size_t>(group);
      wide[g].resize(block_size);
      if (!weights.empty()) weighted[g].resize(block_size);
      double* out = wide[g].data();
      double* out_weighted = weighted[g].data();
      std::vector<double>& sum = sums_[g];
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t h = 0; h < heads_per_group_; ++h) {
          const int64_t head = (first + t) * heads + group * heads_per_group_ + h;
          const float* in = rows.data() + head * dim;
          const double weight = weights.empty() ? 1.0 : weights[static_cast<size_t>(head)];
          for (int64_t d = 0; d < dim; ++d) {
            const double x = in[d];
            *out++ = x;
            if (!weights.empty()) *out_weighted++ = weight * x;
            sum[static_cast<size_t>(d)] += weight * x;
          }
        }
      }
    });
    pool.ParallelFor(num_groups_ * row_tiles, [&](int64_t task, int) {
      const auto g = static_cast<size_t>(task / row_tiles);
      const int64_t i = task % row_tiles * kTileRows;
      const double* right = wide[g].data();
      const double* left = (weights.empty() ? wide[g] : weighted[g]).data() + i;
      Matrix& moment = moments_[g];
      const auto tile_rows = static_cast<int>(std::min<int64_t>(kTileRows, dim - i));
      // Tiles that touch the upper triangle; what falls below the diagonal is not read.
      for (int64_t j = i / kTileCols * kTileCols; j < dim; j += kTileCols) {
        double* sum = &moment(static_cast<int>(i), static_cast<int>(j));
        const auto tile_cols = static_cast<int>(std::min<int64_t>(kTileCols, dim - j));
        if (tile_rows == kTileRows && tile_cols == kTileCols) {
          AddTile(left, right + j, count, dim, sum, dim);
        } else {
          AddPartialTile(left, right + j, count, dim, tile_rows, tile_cols, sum, dim);
        }
      }
    });
  }
  num_tokens_ += num_tokens;
}

void CovarianceAccumulator::Merge(const CovarianceAccumulator& other) {
  OSCAR_CHECK(num_groups_ == other.num_groups_ && heads_per_group_ == other.heads_per_group_ &&
              dim_ == other.dim_);
  for (size_t g = 0; g < moments_.size(); ++g) {
    AddTo(moments_[g], other.moments_[g]);
    for (size_t d = 0; d < sums_[g].size(); ++d) sums_[g][d] += other.sums_[g][d];
  }
  num_tokens_ += other.num_tokens_;
}

Matrix CovarianceAccumulator::SecondMoment(int group) const {
  const Matrix& sum = moments_[static_cast<size_t>(group)];
  const auto rows = static_cast<double>(std::max<int64_t>(rows_per_group(), 1));
  Matrix moment(dim_, dim_);
  for (int i = 0; i < dim_; ++i) {
    for (int j = i; j < dim_; ++j) moment(i, j) = moment(j, i) = sum(i, j) / rows;
  }
  return moment;
}

std::vector<double> CovarianceAccumulator::Mean(int group) const {
  std::vector<double> mean = sums_[static_cast<size_t>(group)];
  const auto rows = static_cast<double>(std::max<int64_t>(rows_per_group(), 1));
  for (double& x : mean) x /= rows;
  return mean;
}

Matrix CovarianceAccumulator::Centered(int group) const {
  Matrix moment = SecondMoment(group);
  const std::vector<double> mean = Mean(group);
  for (int i = 0; i < dim_; ++i) {
    for (int j = 0; j < dim_; ++j) {
      moment(i, j) -= mean[static_cast<size_t>(i)] * mean[static_cast<size_t>(j)];
    }
  }
  return moment;
}

Matrix CovarianceAccumulator::MeanSecondMoment() const {
  Matrix mean(dim_, dim_);
  for (int group = 0; group < num_groups_; ++group) AddTo(mean, SecondMoment(group));
  return Scaled(mean, 1.0 / num_groups_);
}

}  // namespace oscar
