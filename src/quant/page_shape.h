// The sizes on which every cache page depends: its tokens, and the head dims there are kernels for.
// Dispatches over head dims are made from this one list: by DispatchHeadDim, or by OSCAR_HEAD_DIMS
// where names are pasted. An instantiation that lacks one of them does not compile or does not
// link.
#pragma once

#include <array>

#include "base/half.h"

namespace oscar {

inline constexpr int kPageTokens = 64;

// Other head dims have no Sylvester Hadamard matrix (96) or no kernel (32, 512).
#define OSCAR_HEAD_DIMS(X) X(64) X(128) X(256)

inline constexpr std::array kHeadDims = {
#define OSCAR_X(dim) dim,
    OSCAR_HEAD_DIMS(OSCAR_X)
#undef OSCAR_X
};

OSCAR_HD constexpr bool IsHeadDim(int head_dim) {
#define OSCAR_X(dim) || head_dim == dim
  return false OSCAR_HEAD_DIMS(OSCAR_X);
#undef OSCAR_X
}

// body.operator()<kDim>() of the head dim, or `otherwise` where it is none of the list.
template <typename T, typename Body>
constexpr T DispatchHeadDim(int head_dim, T otherwise, const Body& body) {
#define OSCAR_X(dim) \
  if (head_dim == dim) return body.template operator()<dim>();
  OSCAR_HEAD_DIMS(OSCAR_X)
#undef OSCAR_X
  return otherwise;
}

// 1 / sqrt(D), which makes a Hadamard matrix orthonormal. Exact but for the root of 2.
template <int kDim>
inline constexpr float kHadamardScale = [] {
  static_assert(IsHeadDim(kDim));
  float scale = 1.0f;
  for (int dims = kDim; dims > 1; dims /= 4) scale *= dims == 2 ? 0.70710678118654752f : 0.5f;
  return scale;
}();
static_assert(kHadamardScale<64> == 0.125f && kHadamardScale<128> == 0.08838834764831845f &&
              kHadamardScale<256> == 0.0625f);

}  // namespace oscar
