// TokenDraw: how one token is drawn from a row of logits, for models that draw on their device.
// Plain data, host and device; the order of application is that of SamplingOptions.
#pragma once

#include <cstdint>

namespace oscar {

struct TokenDraw {
  static constexpr int32_t kNotANumber = -1;  // the row holds a NaN
  static constexpr int32_t kUndecided = -2;   // needs more candidates than the device keeps

  float temperature = 0.0f;  // 0: the most likely token
  int32_t top_k = 0;         // 0: off
  float top_p = 1.0f;
  float min_p = 0.0f;
  double uniform = 0.0;  // in [0, 1): which of the kept ones
};

}  // namespace oscar
