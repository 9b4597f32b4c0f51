// Eigenvectors of symmetric matrices in fp64, made canonical so that a file fitted twice has the
// same bytes, and the comparison of subspaces that tests need, because eigenvectors of close
// eigenvalues are not defined one by one. Free functions; safe from any thread.
#pragma once

#include <vector>

#include "numeric/matrix.h"
#include "oscar/status.h"

namespace oscar {

struct SymmetricEigen {
  std::vector<double> values;  // ascending
  Matrix vectors;              // column j belongs to values[j]
  double orthogonality = 0;    // max |U U^T - I|
};

// Decomposes (m + m^T) / 2. In each eigenvector the entry of largest magnitude (the first of
// equals) is positive. Fails when an element is not finite. REQUIRES: square, not empty.
Result<SymmetricEigen> DecomposeSymmetric(const Matrix& m);

// U diag(values) U^T.
Matrix Reconstruct(const SymmetricEigen& eigen);

// Angles in radians between the spaces spanned by the orthonormal columns of `a` and `b`,
// ascending. REQUIRES: same shape.
std::vector<double> PrincipalAngles(const Matrix& a, const Matrix& b);
// Spectral norm of the difference of the two projectors, sin of the largest principal angle: 0 for
// the same space, 1 when some direction of one is orthogonal to the other.
double SubspaceDistance(const Matrix& a, const Matrix& b);

}  // namespace oscar
