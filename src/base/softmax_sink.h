// The end of a softmax with a sink: a logit that takes weight and gives no value. One rule for the
// CPU and for portable passes of the GPU, which must agree to the bit. Host and device; not to be
// contracted.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "base/half.h"

namespace oscar {

// 2^x for x <= 0 to about 1 ulp; 0 below -126.
OSCAR_HD inline float Exp2OfNegative(float x) {
  if (!(x >= -126.0f)) return 0.0f;
  const float n = rintf(x), f = x - n;
  // Taylor of 2^f on [-1/2, 1/2]; the first dropped term is below 2^-23.
  float p = 1.5403530393381608e-4f;
  p = fmaf(p, f, 1.3333558146428443e-3f);
  p = fmaf(p, f, 9.6181291076284772e-3f);
  p = fmaf(p, f, 5.5504108664821580e-2f);
  p = fmaf(p, f, 2.4022650695910071e-1f);
  p = fmaf(p, f, 6.9314718055994531e-1f);
  p = fmaf(p, f, 1.0f);
  return std::bit_cast<float>(std::bit_cast<int32_t>(p) + static_cast<int32_t>(n) * (1 << 23));
}

// What a head's sums are multiplied by, whose `d` is the sum of 2^(logit - m): 1 over d and the
// sink's part. `sink` is natural; m and logits are in base 2.
OSCAR_HD inline float InverseWithSink(float m, float d, float sink) {
  constexpr float kLog2E = 1.4426950408889634f;
  const float logit = sink * kLog2E, largest = m > logit ? m : logit;
  const float mine = Exp2OfNegative(m - largest);
  return mine / fmaf(d, mine, Exp2OfNegative(logit - largest));
}

}  // namespace oscar
