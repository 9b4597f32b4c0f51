// Clip ratios fitted offline: of a list of candidates the one whose 2-bit rows have the smallest
// weighted error sum_t w_t (x_t - x^_t) C (x_t - x^_t)^T. For keys C is the query second moment in
// rotated space, which makes this the error of the logits; for values C is the identity and w the
// weight that attention gives the token. Rows are quantised by the cache's own rule, from BF16, as
// the cache holds them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "numeric/matrix.h"
#include "oscar/status.h"

namespace oscar {

struct ClipOptions {
  int bits = 2;
  int group_dims = 0;  // 0: the whole row
  // Ratios in [0, 1], tried in order; the first of equal errors wins. 0 is no clip.
  std::vector<float> candidates = DefaultCandidates();
  // Tokens that the fit looks at, evenly spaced over the data.
  int64_t max_tokens = 2048;

  static std::vector<float> DefaultCandidates();  // 0, then .99 down to .80 by .01
};

Status ValidateClipOptions(const ClipOptions& options, int head_dim);

struct ClipChoice {
  float ratio = 0;
  double error = 0;        // mean over rows, at `ratio`
  double first_error = 0;  // the same at the first candidate
};

// Errors of all candidates, summed over the rows added, in their order. One writer at a time;
// Merge joins the sums of parts.
class ClipSearch {
 public:
  // An empty `weight` is the identity. REQUIRES: ValidateClipOptions is OK; weight is [D, D].
  ClipSearch(int head_dim, Matrix weight, const ClipOptions& options);

  // Rotated rows [count, D]; `row_weights` is empty (all 1) or [count].
  void Add(std::span<const float> rows, std::span<const double> row_weights = {});
  void Merge(const ClipSearch& other);
  void Scale(double factor);  // as if all row weights had been that much larger
  ClipChoice Best() const;
  std::span<const double> errors() const { return errors_; }  // [candidates], sums
  int64_t num_rows() const { return num_rows_; }

 private:
  int head_dim_;
  Matrix weight_;
  ClipOptions options_;
  std::vector<double> errors_;
  int64_t num_rows_ = 0;
};

ClipChoice FitClipRatio(std::span<const float> rows, int head_dim, const Matrix& weight,
                        std::span<const double> row_weights, const ClipOptions& options);

// x C x^T. REQUIRES: C is [D, D], x has D entries; `scratch` has D entries.
double QuadraticForm(std::span<const double> x, const Matrix& c, std::span<double> scratch);

}  // namespace oscar
