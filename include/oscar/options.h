// What a caller can ask for: how to draw tokens. Plain values, copied freely.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "oscar/status.h"

namespace oscar {

// The order of application: logit bias and penalties, temperature, top-k, top-p, min-p, draw.
struct SamplingOptions {
  // 0 takes the most likely token (the lowest id among equals) and ignores the rest.
  float temperature = 1.0f;
  // Keep the k most likely tokens; 0 keeps all.
  int top_k = 0;
  // Keep the smallest set of most likely tokens whose probability reaches top_p.
  float top_p = 1.0f;
  // Keep tokens at least min_p times as likely as the most likely one.
  float min_p = 0.0f;
  // > 1 makes tokens seen in the prompt or the output less likely (logits divided or multiplied).
  float repetition_penalty = 1.0f;
  // Subtracted once from the logit of every token of the output so far.
  float presence_penalty = 0.0f;
  // Subtracted as often as the token occurs in the output so far.
  float frequency_penalty = 0.0f;
  // Added to the logit of a token id.
  std::vector<std::pair<int32_t, float>> logit_bias;
  // The same seed, prompt and options give the same answer. Unset draws one from the system.
  std::optional<uint64_t> seed;

  // Names the first field that is out of range, in Status::param.
  Status Validate(int vocab_size) const;
};

}  // namespace oscar
