#include "rotation/clip.h"

#include <fmt/core.h>

#include <array>

#include "base/check.h"
#include "base/half.h"
#include "numeric/multiversion.h"
#include "quant/row_quantizer.h"

namespace oscar {
namespace {

OSCAR_MULTIVERSION
void RowTimesMatrix(const double* x, const double* c, int64_t dim, double* y) {
  for (int64_t j = 0; j < dim; ++j) y[j] = 0;
  for (int64_t i = 0; i < dim; ++i) {
    for (int64_t j = 0; j < dim; ++j) y[j] += x[i] * c[i * dim + j];
  }
}

RowSpec SpecOf(const ClipOptions& options, int head_dim) {
  RowSpec spec;
  spec.rule = RowRule::kMinMax;
  spec.bits = options.bits;
  spec.group_dims = options.group_dims == 0 ? head_dim : options.group_dims;
  return spec;
}

}  // namespace

std::vector<float> ClipOptions::DefaultCandidates() {
  std::vector<float> candidates{0.0f};
  for (int percent = 99; percent >= 80; --percent) {
    candidates.push_back(static_cast<float>(percent) / 100.0f);
  }
  return candidates;
}

Status ValidateClipOptions(const ClipOptions& options, int head_dim) {
  const RowSpec spec = SpecOf(options, head_dim);
  if (options.bits != 2 && options.bits != 3 && options.bits != 4 && options.bits != 8) {
    return InvalidArgument(fmt::format("clip fit: {} bits; 2, 3, 4 or 8", options.bits));
  }
  if (head_dim > kMaxHeadDim || spec.group_dims < 16 || spec.group_dims % 16 != 0 ||
      head_dim % spec.group_dims != 0 || head_dim / spec.group_dims > kMaxGroups) {
    return InvalidArgument(
        fmt::format("clip fit: groups of {} in rows of {}; the group must be a multiple of 16 that "
                    "divides the row into at most {} parts, and the row at most {}",
                    spec.group_dims, head_dim, kMaxGroups, kMaxHeadDim));
  }
  if (options.candidates.empty()) return InvalidArgument("clip fit: no candidate ratios");
  for (const float ratio : options.candidates) {
    if (!(ratio >= 0.0f && ratio <= 1.0f)) {
      return InvalidArgument(fmt::format("clip fit: ratio {} is not in [0, 1]", ratio));
    }
  }
  if (options.max_tokens < 1) return InvalidArgument("clip fit: needs at least one token");
  return {};
}

double QuadraticForm(std::span<const double> x, const Matrix& c, std::span<double> scratch) {
  OSCAR_DCHECK(x.size() == static_cast<size_t>(c.rows()) && scratch.size() == x.size());
  RowTimesMatrix(x.data(), c.data().data(), c.rows(), scratch.data());
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += scratch[i] * x[i];
  return sum;
}

ClipSearch::ClipSearch(int head_dim, Matrix weight, const ClipOptions& options)
    : head_dim_(head_dim),
      weight_(std::move(weight)),
      options_(options),
      errors_(options.candidates.size()) {
  OSCAR_CHECK(ValidateClipOptions(options, head_dim).ok());
  OSCAR_CHECK(weight_.rows() == 0 || (weight_.rows() == head_dim && weight_.cols() == head_dim));
}

void ClipSearch::Add(std::span<const float> rows, std::span<const double> row_weights) {
  const auto dim = static_cast<size_t>(head_dim_);
  OSCAR_CHECK(rows.size() % dim == 0);
  const size_t count = rows.size() / dim;
  OSCAR_CHECK(row_weights.empty() || row_weights.size() == count);
  RowSpec spec = SpecOf(options_, head_dim_);
  std::vector<float> row(dim);
  std::vector<float> decoded(dim);
  std::vector<uint8_t> codes(dim);
  std::array<float, kMaxGroups> scale{};
  std::array<float, kMaxGroups> min{};
  const size_t groups = dim / static_cast<size_t>(spec.group_dims);
  std::vector<double> difference(dim);
  std::vector<double> scratch(dim);
  for (size_t r = 0; r < count; ++r) {
    for (size_t d = 0; d < dim; ++d) row[d] = ToFloat(ToBf16(rows[r * dim + d]));
    const double row_weight = row_weights.empty() ? 1.0 : row_weights[r];
    for (size_t c = 0; c < options_.candidates.size(); ++c) {
      spec.clip_ratio = options_.candidates[c];
      QuantizeRow(spec, row, codes, std::span(scale).first(groups), std::span(min).first(groups));
      DequantizeRow(spec, codes, std::span(scale).first(groups), std::span(min).first(groups),
                    decoded);
      double error = 0;
      for (size_t d = 0; d < dim; ++d) {
        difference[d] = static_cast<double>(row[d]) - static_cast<double>(decoded[d]);
        error += difference[d] * difference[d];
      }
      if (weight_.rows() > 0) error = QuadraticForm(difference, weight_, scratch);
      errors_[c] += row_weight * error;
    }
  }
  num_rows_ += static_cast<int64_t>(count);
}

void ClipSearch::Merge(const ClipSearch& other) {
  OSCAR_CHECK(errors_.size() == other.errors_.size());
  for (size_t c = 0; c < errors_.size(); ++c) errors_[c] += other.errors_[c];
  num_rows_ += other.num_rows_;
}

void ClipSearch::Scale(double factor) {
  for (double& error : errors_) error *= factor;
}

ClipChoice ClipSearch::Best() const {
  size_t best = 0;
  for (size_t c = 1; c < errors_.size(); ++c) {
    if (errors_[c] < errors_[best]) best = c;
  }
  const double rows = static_cast<double>(num_rows_ > 0 ? num_rows_ : 1);
  return {options_.candidates[best], errors_[best] / rows, errors_[0] / rows};
}

ClipChoice FitClipRatio(std::span<const float> rows, int head_dim, const Matrix& weight,
                        std::span<const double> row_weights, const ClipOptions& options) {
  ClipSearch search(head_dim, weight, options);
  search.Add(rows, row_weights);
  return search.Best();
}

}  // namespace oscar
