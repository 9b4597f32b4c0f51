// A small dense matrix of doubles, row-major, for calibration: head_dim x head_dim at most a few
// hundred. Products run in one fixed order, so results do not depend on threads or on the
// processor. A plain value: copy, move, read from any thread.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace oscar {

class Matrix {
 public:
  Matrix() = default;
  Matrix(int rows, int cols)
      : rows_(rows), cols_(cols), data_(static_cast<size_t>(rows) * static_cast<size_t>(cols)) {}
  static Matrix Identity(int dim);
  // Widens `values` [rows, cols].
  static Matrix FromFloats(std::span<const float> values, int rows, int cols);

  int rows() const { return rows_; }
  int cols() const { return cols_; }
  double& operator()(int i, int j) { return data_[Index(i, j)]; }
  double operator()(int i, int j) const { return data_[Index(i, j)]; }
  std::span<double> row(int i) { return {data_.data() + Index(i, 0), static_cast<size_t>(cols_)}; }
  std::span<const double> row(int i) const {
    return {data_.data() + Index(i, 0), static_cast<size_t>(cols_)};
  }
  std::span<double> data() { return data_; }
  std::span<const double> data() const { return data_; }
  std::vector<float> ToFloats() const;  // rounds each element once

  Matrix Transposed() const;
  // Columns [first, first + count).
  Matrix Columns(int first, int count) const;
  // this[:, perm]: column j of the result is column perm[j].
  Matrix PermutedColumns(std::span<const int> perm) const;

 private:
  size_t Index(int i, int j) const {
    return static_cast<size_t>(i) * static_cast<size_t>(cols_) + static_cast<size_t>(j);
  }
  int rows_ = 0;
  int cols_ = 0;
  std::vector<double> data_;
};

// REQUIRES: a.cols() == b.rows().
Matrix Multiply(const Matrix& a, const Matrix& b);
// factor * m.
Matrix Scaled(const Matrix& m, double factor);
// (m + m^T) / 2. REQUIRES: square.
Matrix Symmetrized(const Matrix& m);
// sum += m. REQUIRES: same shape.
void AddTo(Matrix& sum, const Matrix& m);

// max |m m^T - I|; infinity when an element is not finite. REQUIRES: square.
double OrthogonalityError(const Matrix& m);
double MaxAbsDifference(const Matrix& a, const Matrix& b);

struct MatrixStats {
  double min = 0;
  double max = 0;
  double mean = 0;
  double frobenius = 0;
  double trace = 0;  // 0 unless square
  bool finite = true;
};
MatrixStats StatsOf(const Matrix& m);
bool AllFinite(std::span<const double> values);
bool AllFinite(std::span<const float> values);

}  // namespace oscar
