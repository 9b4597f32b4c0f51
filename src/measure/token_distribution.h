// The likely part of a model's distribution over tokens: small enough to keep on disk for every
// token of an evaluation, and enough to take a KL divergence from afterwards. Plain values.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "oscar/status.h"

namespace oscar {

struct TokenDistribution {
  // Token and natural logarithm of its probability, the most likely first: until others together
  // are below kMaxRest, or kMaxLikely of them.
  std::vector<std::pair<int32_t, double>> likely;
  double rest = 0;  // probability of all others

  static constexpr size_t kMaxLikely = 64;
  static constexpr double kMaxRest = 1e-6;
};

// REQUIRES: finite logits.
TokenDistribution LikelyTokens(std::span<const float> logits);

// KL(reference || logits) in nats, all tokens that `reference` does not list taken as one. Never
// more than over all tokens; the same to about reference.rest.
double Divergence(const TokenDistribution& reference, std::span<const float> logits);

// One line of text, and back. Tokens outside of [0, vocab_size) are refused.
std::string EncodeDistributions(std::span<const TokenDistribution> distributions);
Result<std::vector<TokenDistribution>> DecodeDistributions(std::string_view text, int vocab_size);

}  // namespace oscar
