#include "numeric/eigen.h"

#include <Eigen/Eigenvalues>
#include <Eigen/SVD>
#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace oscar {
namespace {

using RowMajor = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

Eigen::Map<const RowMajor> View(const Matrix& m) { return {m.data().data(), m.rows(), m.cols()}; }

}  // namespace

Result<SymmetricEigen> DecomposeSymmetric(const Matrix& m) {
  OSCAR_CHECK(m.rows() == m.cols() && m.rows() > 0);
  if (!AllFinite(m.data())) {
    return Unexpected(
        DataLoss("matrix has elements that are not finite; the data it was summed "
                 "from holds NaN, infinities or overflowing values"));
  }
  const Matrix symmetric = Symmetrized(m);
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(Eigen::MatrixXd(View(symmetric)));
  if (solver.info() != Eigen::Success) {
    return Unexpected(Internal("eigensolver did not converge"));
  }
  const int dim = m.rows();
  SymmetricEigen eigen;
  eigen.values.assign(solver.eigenvalues().data(), solver.eigenvalues().data() + dim);
  eigen.vectors = Matrix(dim, dim);
  for (int j = 0; j < dim; ++j) {
    int largest = 0;
    for (int i = 1; i < dim; ++i) {
      if (std::abs(solver.eigenvectors()(i, j)) > std::abs(solver.eigenvectors()(largest, j))) {
        largest = i;
      }
    }
    const double sign = solver.eigenvectors()(largest, j) < 0 ? -1.0 : 1.0;
    for (int i = 0; i < dim; ++i) eigen.vectors(i, j) = sign * solver.eigenvectors()(i, j);
  }
  eigen.orthogonality = OrthogonalityError(eigen.vectors);
  return eigen;
}

Matrix Reconstruct(const SymmetricEigen& eigen) {
  Matrix scaled = eigen.vectors;
  for (int i = 0; i < scaled.rows(); ++i) {
    for (int j = 0; j < scaled.cols(); ++j) scaled(i, j) *= eigen.values[static_cast<size_t>(j)];
  }
  return Multiply(scaled, eigen.vectors.Transposed());
}

std::vector<double> PrincipalAngles(const Matrix& a, const Matrix& b) {
  OSCAR_CHECK(a.rows() == b.rows() && a.cols() == b.cols());
  // acos of the singular values of A^T B loses half the digits near 0, where tests look; the sines,
  // singular values of (I - A A^T) B, do not. Take each where it is accurate.
  const Eigen::MatrixXd left = View(a);
  const Eigen::MatrixXd right = View(b);
  const Eigen::VectorXd cosines =
      Eigen::JacobiSVD<Eigen::MatrixXd>(left.transpose() * right).singularValues();
  const Eigen::VectorXd sines =
      Eigen::JacobiSVD<Eigen::MatrixXd>(right - left * (left.transpose() * right)).singularValues();
  std::vector<double> angles(static_cast<size_t>(a.cols()));
  for (int i = 0; i < a.cols(); ++i) {
    const double cosine = std::min(cosines(i), 1.0);
    const double sine = std::min(sines(a.cols() - 1 - i), 1.0);
    angles[static_cast<size_t>(i)] = sine * sine < 0.5 ? std::asin(sine) : std::acos(cosine);
  }
  return angles;
}

double SubspaceDistance(const Matrix& a, const Matrix& b) {
  const std::vector<double> angles = PrincipalAngles(a, b);
  return angles.empty() ? 0.0 : std::sin(angles.back());
}

}  // namespace oscar
