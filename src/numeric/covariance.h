// Second moments of head vectors, summed in fp64 while the data streams by. Every element of a sum
// is added up in token order, one token after the other (heads of a group in head order): work is
// divided over matrix elements, never over tokens. The bits therefore depend neither on the number
// of threads nor on how the tokens were cut into chunks. Merging two accumulators adds their sums,
// which equals one pass over both to fp64 rounding.
//
// One writer at a time; const methods from any thread while nobody writes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "numeric/matrix.h"

namespace oscar {

class CovarianceAccumulator {
 public:
  // Rows come as [tokens, num_groups * heads_per_group, dim]; consecutive heads share a group's
  // matrix (grouped-query attention: the query heads of one KV head).
  CovarianceAccumulator(int num_groups, int heads_per_group, int dim);

  int num_groups() const { return num_groups_; }
  int dim() const { return dim_; }
  int64_t num_tokens() const { return num_tokens_; }
  int64_t rows_per_group() const { return num_tokens_ * heads_per_group_; }

  // `weights` is empty (all 1) or [tokens, num_groups * heads_per_group]: adds w x^T x.
  void Add(std::span<const float> rows, std::span<const double> weights, ThreadPool& pool);
  void Add(std::span<const float> rows, ThreadPool& pool) { Add(rows, {}, pool); }

  // REQUIRES: same shape.
  void Merge(const CovarianceAccumulator& other);

  // Sum of w x^T x over the group's rows, divided by the number of rows (not by the weights).
  Matrix SecondMoment(int group) const;
  // Sum of w x over rows, divided by the number of rows.
  std::vector<double> Mean(int group) const;
  // SecondMoment - Mean^T Mean: the covariance where all weights are 1.
  Matrix Centered(int group) const;
  // Mean over groups of SecondMoment.
  Matrix MeanSecondMoment() const;

 private:
  int num_groups_;
  int heads_per_group_;
  int dim_;
  int64_t num_tokens_ = 0;
  std::vector<Matrix> moments_;            // [groups], upper triangle filled
  std::vector<std::vector<double>> sums_;  // [groups][dim]
};

}  // namespace oscar
