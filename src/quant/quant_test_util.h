// Shared by the tests of this module: Gaussian rows, relative error, and a Hadamard transform that
// is deliberately not the library's own.
#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "base/rng.h"

namespace oscar {

inline std::vector<float> GaussianRows(size_t count, uint64_t stream) {
  const Philox rng(2026, stream);
  std::vector<float> x(count);
  for (size_t i = 0; i < count; ++i) x[i] = rng.Normal(i);
  return x;
}

// Squared error relative to the energy of `x`.
inline double RelativeError(std::span<const float> x, std::span<const float> y) {
  double error = 0.0, energy = 0.0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double d = static_cast<double>(x[i]) - y[i];
    error += d * d;
    energy += static_cast<double>(x[i]) * x[i];
  }
  return error / energy;
}

// Orthonormal Sylvester Hadamard of consecutive blocks of `size` numbers, by butterflies in double.
inline void HadamardBlocks(std::span<float> x, size_t size) {
  std::vector<double> block(size);
  for (size_t start = 0; start < x.size(); start += size) {
    for (size_t i = 0; i < size; ++i) block[i] = x[start + i];
    for (size_t h = 1; h < size; h *= 2) {
      for (size_t i = 0; i < size; ++i) {
        if ((i & h) != 0) continue;
        const double a = block[i], b = block[i + h];
        block[i] = a + b;
        block[i + h] = a - b;
      }
    }
    for (size_t i = 0; i < size; ++i) {
      x[start + i] = static_cast<float>(block[i] / std::sqrt(static_cast<double>(size)));
    }
  }
}

}  // namespace oscar
