#include "numeric/hadamard.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "base/check.h"

namespace oscar {

float HadamardScale(int order) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(order)));
}

void FastHadamard(std::span<float> x) {
  const size_t dim = x.size();
  OSCAR_CHECK(IsPowerOfTwo(static_cast<int64_t>(dim)), "size {}", dim);
  for (size_t stride = 1; stride < dim; stride *= 2) {
    for (size_t block = 0; block < dim; block += 2 * stride) {
      for (size_t i = block; i < block + stride; ++i) {
        const float a = x[i];
        const float b = x[i + stride];
        x[i] = a + b;
        x[i + stride] = a - b;
      }
    }
  }
  const float scale = HadamardScale(static_cast<int>(dim));
  for (float& value : x) value *= scale;
}

void FastHadamardBlocks(std::span<float> x, int order) {
  OSCAR_CHECK(IsPowerOfTwo(order) && x.size() % static_cast<size_t>(order) == 0,
              "order {} on {} values", order, x.size());
  const size_t step = static_cast<size_t>(order);
  for (size_t first = 0; first < x.size(); first += step) FastHadamard(x.subspan(first, step));
}

Matrix HadamardMatrix(int dim) { return BlockHadamardMatrix(dim, dim); }

Matrix BlockHadamardMatrix(int dim, int order) {
  OSCAR_CHECK(IsPowerOfTwo(order) && dim % order == 0, "order {} in {}", order, dim);
  const double scale = 1.0 / std::sqrt(static_cast<double>(order));
  Matrix h(dim, dim);
  for (int i = 0; i < dim; ++i) {
    const int first = i / order * order;
    for (int j = first; j < first + order; ++j) {
      const auto common = static_cast<uint32_t>((i - first) & (j - first));
      h(i, j) = std::popcount(common) % 2 == 0 ? scale : -scale;
    }
  }
  return h;
}

uint32_t BitReverse(uint32_t i, int bits) {
  uint32_t reversed = 0;
  for (int bit = 0; bit < bits; ++bit) {
    reversed = (reversed << 1) | ((i >> bit) & 1u);
  }
  return reversed;
}

std::vector<int> BitReversalPermutation(std::span<const double> values) {
  const size_t dim = values.size();
  OSCAR_CHECK(IsPowerOfTwo(static_cast<int64_t>(dim)), "size {}", dim);
  const int bits = std::countr_zero(dim);
  std::vector<int> order(dim);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)];
  });
  std::vector<int> perm(dim);
  for (size_t i = 0; i < dim; ++i) {
    perm[BitReverse(static_cast<uint32_t>(i), bits)] = order[i];
  }
  return perm;
}

}  // namespace oscar
