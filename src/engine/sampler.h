// Sampler: logits -> the next token, for one sequence. Deterministic: the sample at step n depends
// on (seed, n), the logits and the options alone. Owned by one sequence; not shared between
// threads.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "backend/sample_params.h"
#include "oscar/options.h"

namespace oscar {

struct TokenLogprob {
  int32_t token;
  float logprob;
};

class Sampler {
 public:
  // REQUIRES: options validated. Without a seed in the options one is sampled from the system.
  explicit Sampler(const SamplingOptions& options);

  uint64_t seed() const { return seed_; }
  // Tokens of the prompt, for the repetition penalty.
  void ObservePrompt(std::span<const int32_t> tokens);
  // Samples and counts the token as generated. `logits` [vocab] is not changed. `masked` tokens
  // (ids below vocab) are not sampled; they must leave at least one. SampleParams::kNotFinite, and
  // no sample, where the logits hold a NaN or an infinity. With `allowed` (SampleParams::mask) only
  // the tokens of that mask exist; where `masked` would leave none of them, it gives way.
  int32_t Sample(std::span<const float> logits, std::span<const int32_t> masked = {},
                 const uint32_t* allowed = nullptr);
  // The Sample that comes after `ahead` more, as a device can do it, where nothing but the logits
  // is needed for it; Observe then takes what the device drew.
  std::optional<SampleParams> NextSample(uint64_t ahead = 0) const;
  void Observe(int32_t token);

 private:
  struct Candidate {
    float logit;
    int32_t token;
  };
  bool NeedsPenalties() const;
  // In [0, 1), of that step.
  double Uniform(uint64_t step) const;
  int32_t SampleFrom(std::vector<Candidate>& candidates);

  SamplingOptions options_;
  uint64_t seed_;
  uint64_t step_ = 0;
  std::unordered_map<int32_t, int> generated_;  // token -> count
  std::unordered_map<int32_t, int> prompt_;
  std::vector<float> adjusted_;
  std::vector<Candidate> candidates_;
};

// What to say of logits that hold a NaN or an infinity, from which the token at `position` (from 0)
// was to be sampled.
Status NotFinite(int64_t position);

// log softmax of one token under the model's own distribution (no temperature, no penalties).
float LogProbability(std::span<const float> logits, int32_t token);
// The `count` most likely tokens, most likely first; ties by lower id.
std::vector<TokenLogprob> TopLogprobs(std::span<const float> logits, int count);

}  // namespace oscar
