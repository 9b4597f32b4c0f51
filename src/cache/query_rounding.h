// How far attention may round a query against packed pages: the numbers that decide whether a page
// is met by the rounded query alone or by what rounding left of it, too. Here because every reader
// that is to give the same bits, on whatever device, must decide alike.
#pragma once

#include <cmath>

#include "base/half.h"
#include "cache/block_layout.h"

namespace oscar {

// Root mean square by which rounding q may move a logit, in powers of two: 4e-4 of a token's
// weight.
inline constexpr float kLogitNoise = 5.8e-4f;

// What codes of a page are like.
struct CodeStatistics {
  float middle;  // code
  float spread;  // root mean square about it

  // Root mean square of a sum over dims of (code - middle) times what rounding takes, in steps.
  OSCAR_HD float Noise(int dims) const {
    constexpr float kRounding = 0.2887f;  // of a number spread evenly over one step
    return kRounding * spread * sqrtf(static_cast<float>(dims));
  }
};
// Of keys.
OSCAR_HD constexpr CodeStatistics StatisticsOf(const BlockLayout& layout) {
  return layout.k_kind() == BlockKind::kInt2   ? CodeStatistics{1.5f, 1.118f}
         : layout.k_kind() == BlockKind::kInt3 ? CodeStatistics{3.5f, 2.291f}
                                               : CodeStatistics{7.5f, 4.61f};
}

// The largest K scale of a group whose q . code is off by `noise`, times softmax scale and log2 e.
OSCAR_HD inline float ScaleLimit(const BlockLayout& layout, float noise) {
  const float all = noise * sqrtf(static_cast<float>(layout.num_groups()));
  return kLogitNoise / (all > 1e-30f ? all : 1e-30f);
}

}  // namespace oscar
