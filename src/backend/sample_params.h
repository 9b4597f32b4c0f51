// SampleParams: how one token is sampled from a row of logits, for models that sample on their
// device. Plain data, host and device; the order of application is that of SamplingOptions.
#pragma once

#include <cstdint>

namespace oscar {

struct SampleParams {
  static constexpr int32_t kNotFinite = -1;  // the row holds a NaN or an infinity
  static constexpr int32_t kUndecided = -2;  // needs more candidates than the device keeps

  // With top_k from 1 to this many a row is always decided, but for thousands of equal logits; so
  // it is where neither top_k nor top_p is set.
  static constexpr int32_t kMaxCandidates = 1024;

  float temperature = 0.0f;  // 0: the most likely token
  int32_t top_k = 0;         // 0: off
  float top_p = 1.0f;
  float min_p = 0.0f;
  double uniform = 0.0;  // in [0, 1): which of the kept ones
  // Where set, tokens whose bit (t % 32 of word t / 32) is not are as if they did not exist; at
  // least one is. Of the host; read when the sample is launched (Backend::Sample).
  const uint32_t* mask = nullptr;

  bool IsSureOnDevice() const {
    return temperature == 0.0f || (top_k > 0 && top_k <= kMaxCandidates) ||
           (top_k == 0 && top_p >= 1.0f);
  }
};

}  // namespace oscar
