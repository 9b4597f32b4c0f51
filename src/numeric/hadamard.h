// The Walsh-Hadamard transform and the bit-reversal permutation. The scalar transform here is the
// specification: SIMD and CUDA versions are bit-equal to it.
//
//   H[i, j] = (-1)^popcount(i & j) / sqrt(D)      (Sylvester's natural order; H = H^T = H^-1)
//
// x H in binary32: butterflies with stride 1, 2, 4, ..., D/2 in that order, each
// (a, b) -> (a + b, a - b) with the lower index first; then every element is multiplied once by
// HadamardScale(D). Free functions without state; safe from any thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "numeric/matrix.h"

namespace oscar {

constexpr bool IsPowerOfTwo(int64_t x) { return x > 0 && (x & (x - 1)) == 0; }

// 1 / sqrt(order), rounded once to binary32.
float HadamardScale(int order);

// x <- x H in place. REQUIRES: x.size() is a power of two.
void FastHadamard(std::span<float> x);
// x <- x diag(H_order, H_order, ...). REQUIRES: order is a power of two that divides x.size().
void FastHadamardBlocks(std::span<float> x, int order);

// [dim, dim], elements exact to fp64. REQUIRES: power of two.
Matrix HadamardMatrix(int dim);
// Block-diagonal. REQUIRES: order is a power of two that divides dim.
Matrix BlockHadamardMatrix(int dim, int order);

// Reverses the low `bits` bits of `i`; the others must be 0.
uint32_t BitReverse(uint32_t i, int bits);

// The published order: perm[br(i)] = order[i], order = indices by value, largest first (the lower
// index first among equals). P = I[:, perm], so (M P)[:, j] = M[:, perm[j]].
// REQUIRES: values.size() is a power of two.
std::vector<int> BitReversalPermutation(std::span<const double> values);

}  // namespace oscar
