#include "numeric/matrix.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "numeric/multiversion.h"

namespace oscar {
namespace {

// c[0..n) += a * b[0..n).
OSCAR_MULTIVERSION
void AddScaledRow(double a, const double* b, double* c, int n) {
  for (int j = 0; j < n; ++j) c[j] += a * b[j];
}

}  // namespace

Matrix Matrix::Identity(int dim) {
  Matrix m(dim, dim);
  for (int i = 0; i < dim; ++i) m(i, i) = 1.0;
  return m;
}

Matrix Matrix::FromFloats(std::span<const float> values, int rows, int cols) {
  Matrix m(rows, cols);
  OSCAR_CHECK(values.size() == m.data_.size(), "{} values for [{}, {}]", values.size(), rows, cols);
  std::copy(values.begin(), values.end(), m.data_.begin());
  return m;
}

std::vector<float> Matrix::ToFloats() const {
  std::vector<float> out(data_.size());
  std::transform(data_.begin(), data_.end(), out.begin(),
                 [](double x) { return static_cast<float>(x); });
  return out;
}

Matrix Matrix::Transposed() const {
  Matrix t(cols_, rows_);
  for (int i = 0; i < rows_; ++i) {
    for (int j = 0; j < cols_; ++j) t(j, i) = (*this)(i, j);
  }
  return t;
}

Matrix Matrix::Columns(int first, int count) const {
  OSCAR_CHECK(first >= 0 && count >= 0 && first + count <= cols_);
  Matrix m(rows_, count);
  for (int i = 0; i < rows_; ++i) {
    for (int j = 0; j < count; ++j) m(i, j) = (*this)(i, first + j);
  }
  return m;
}

Matrix Matrix::PermutedColumns(std::span<const int> perm) const {
  OSCAR_CHECK(perm.size() == static_cast<size_t>(cols_));
  Matrix m(rows_, cols_);
  for (int i = 0; i < rows_; ++i) {
    for (int j = 0; j < cols_; ++j) m(i, j) = (*this)(i, perm[static_cast<size_t>(j)]);
  }
  return m;
}

Matrix Multiply(const Matrix& a, const Matrix& b) {
  OSCAR_CHECK(a.cols() == b.rows(), "[{}, {}] times [{}, {}]", a.rows(), a.cols(), b.rows(),
              b.cols());
  Matrix c(a.rows(), b.cols());
  for (int i = 0; i < a.rows(); ++i) {
    for (int k = 0; k < a.cols(); ++k) {
      AddScaledRow(a(i, k), b.row(k).data(), c.row(i).data(), b.cols());
    }
  }
  return c;
}

Matrix Scaled(const Matrix& m, double factor) {
  Matrix out = m;
  for (double& x : out.data()) x *= factor;
  return out;
}

Matrix Symmetrized(const Matrix& m) {
  OSCAR_CHECK(m.rows() == m.cols());
  Matrix out(m.rows(), m.cols());
  for (int i = 0; i < m.rows(); ++i) {
    for (int j = 0; j < m.cols(); ++j) out(i, j) = (m(i, j) + m(j, i)) / 2.0;
  }
  return out;
}

void AddTo(Matrix& sum, const Matrix& m) {
  OSCAR_CHECK(sum.rows() == m.rows() && sum.cols() == m.cols());
  for (size_t i = 0; i < m.data().size(); ++i) sum.data()[i] += m.data()[i];
}

double OrthogonalityError(const Matrix& m) {
  OSCAR_CHECK(m.rows() == m.cols());
  if (!AllFinite(m.data())) return std::numeric_limits<double>::infinity();
  const Matrix gram = Multiply(m, m.Transposed());
  double error = 0;
  for (int i = 0; i < m.rows(); ++i) {
    for (int j = 0; j < m.cols(); ++j) {
      error = std::max(error, std::abs(gram(i, j) - (i == j ? 1.0 : 0.0)));
    }
  }
  // Products of finite values may overflow, and max() would drop the NaN that follows.
  return AllFinite(gram.data()) ? error : std::numeric_limits<double>::infinity();
}

double MaxAbsDifference(const Matrix& a, const Matrix& b) {
  OSCAR_CHECK(a.rows() == b.rows() && a.cols() == b.cols());
  double difference = 0;
  for (size_t i = 0; i < a.data().size(); ++i) {
    difference = std::max(difference, std::abs(a.data()[i] - b.data()[i]));
  }
  return difference;
}

MatrixStats StatsOf(const Matrix& m) {
  MatrixStats stats;
  if (m.data().empty()) return stats;
  stats.min = stats.max = m.data()[0];
  double sum = 0;
  double squares = 0;
  for (const double x : m.data()) {
    stats.min = std::min(stats.min, x);
    stats.max = std::max(stats.max, x);
    stats.finite = stats.finite && std::isfinite(x);
    sum += x;
    squares += x * x;
  }
  stats.mean = sum / static_cast<double>(m.data().size());
  stats.frobenius = std::sqrt(squares);
  if (m.rows() == m.cols()) {
    for (int i = 0; i < m.rows(); ++i) stats.trace += m(i, i);
  }
  return stats;
}

bool AllFinite(std::span<const double> values) {
  return std::all_of(values.begin(), values.end(), [](double x) { return std::isfinite(x); });
}
bool AllFinite(std::span<const float> values) {
  constexpr uint32_t kExponent = 0x7F800000;
  uint32_t bad = 0;  // no early exit, in integers: compilers make vectors of it
  for (float x : values) bad |= (std::bit_cast<uint32_t>(x) & kExponent) == kExponent;
  return bad == 0;
}

}  // namespace oscar
