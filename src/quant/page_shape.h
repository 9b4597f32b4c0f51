// The sizes on which every cache page depends: its tokens, and the head dims there are kernels for.
// Dispatches over head dims are made from this one list: by DispatchHeadDim, or by OSCAR_HEAD_DIMS
// where names are pasted. An instantiation that lacks one of them does not compile or does not
// link.
#pragma once

#include <array>
#include <cstdint>

#include "base/half.h"

namespace oscar {

inline constexpr int kPageTokens = 64;

// Which numbers of one side (K or V) of a KV head share a scale. V is always in rows.
enum class SideForm : uint8_t {
  kRows = 0,      // (scale, min) per token and group of dims
  kChannels = 1,  // (scale, min) per dim and group of 32, 64 or 128 tokens
  kMixed = 2,     // as kChannels over 128 tokens of 2 bits, and two more bits for some dims
  kCodebook = 3,  // one scale per token; codes name the levels of ByteLevel()
};

// What the keys of a token are divided by before they are coded: nothing, one norm over all KV
// heads, or one per head.
enum class TokenNorm : uint8_t { kNone, kAllHeads, kPerHead };

// Tokens whose numbers share a scale where that is most of them: two pages.
inline constexpr int kMaxGroupTokens = 128;
inline constexpr int kMaxPagesTogether = kMaxGroupTokens / kPageTokens;

// The levels that codes of 2, 3 and 4 bits of a codebook side name: the Lloyd-Max levels of N(0, 1)
// (quant/lloyd_max.h) in units of their largest / 127, rounded, so that readers can multiply whole
// numbers. The lower half of the codes is the upper half mirrored.
OSCAR_HD constexpr int ByteLevel(int bits, int code) {
  const int half = 1 << (bits - 1);
  const int i = code >= half ? code - half : half - 1 - code;
  int level = 0;
  if (bits == 2) level = i == 0 ? 38 : 127;
  if (bits == 3) level = i == 0 ? 14 : i == 1 ? 45 : i == 2 ? 79 : 127;
  if (bits == 4) {
    level = i == 0   ? 6
            : i == 1 ? 18
            : i == 2 ? 31
            : i == 3 ? 44
            : i == 4 ? 58
            : i == 5 ? 75
            : i == 6 ? 96
                     : 127;
  }
  return code >= half ? level : -level;
}
// Levels in one standard deviation: 127 over the largest Lloyd-Max level.
OSCAR_HD constexpr float ByteLevelUnit(int bits) {
  return bits == 2 ? 84.08267f : bits == 3 ? 59.01503f : 46.47586f;
}

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
