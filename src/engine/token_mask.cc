#include "engine/token_mask.h"

#include <fmt/core.h>

#include <algorithm>

namespace oscar {

Status NoTokenLeft(int64_t generated) {
  return InvalidArgument(
             fmt::format("allowed_token_ids, bad_words and min_tokens leave no token to sample "
                         "after {} tokens of the answer",
                         generated))
      .WithParam("allowed_token_ids");
}

bool MaskTokens(const EngineRequest& request, std::span<const int32_t> generated, int vocab_size,
                std::vector<int32_t>* masked) {
  masked->clear();
  if (static_cast<int64_t>(generated.size()) < request.min_tokens) {
    *masked = request.stop_tokens;
  }
  static const TokenRules kNone;
  const TokenRules& rules = request.rules != nullptr ? *request.rules : kNone;
  for (const std::vector<int32_t>& run : rules.bad_words) {
    const size_t before = run.size() - 1;
    if (before <= generated.size() &&
        std::ranges::equal(generated.last(before), std::span(run).first(before))) {
      masked->push_back(run.back());
    }
  }
  std::ranges::sort(*masked);
  masked->erase(std::ranges::unique(*masked).begin(), masked->end());
  if (rules.allowed.empty()) return masked->size() < static_cast<size_t>(vocab_size);
  std::vector<bool> allowed(static_cast<size_t>(vocab_size), false);
  for (const int32_t token : rules.allowed) allowed[static_cast<size_t>(token)] = true;
  for (const int32_t token : *masked) allowed[static_cast<size_t>(token)] = false;
  masked->clear();
  for (int32_t token = 0; token < vocab_size; ++token) {
    if (!allowed[static_cast<size_t>(token)]) masked->push_back(token);
  }
  return masked->size() < static_cast<size_t>(vocab_size);
}

}  // namespace oscar
