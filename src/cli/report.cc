#include "cli/report.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/progress.h"

namespace oscar::cli {

nlohmann::ordered_json AnswerToJson(const Completion& completion) {
  nlohmann::ordered_json stop_reason;  // null unless a stop option ended the answer
  if (completion.stop_string.has_value()) stop_reason = *completion.stop_string;
  if (completion.stop_token.has_value()) stop_reason = *completion.stop_token;
  return {{"token_ids", completion.token_ids},
          {"finish_reason", NameOf(completion.finish_reason)},
          {"stop_reason", std::move(stop_reason)},
          {"seed", completion.seed}};
}

nlohmann::ordered_json CacheToJson(const CacheReport& cache) {
  return {{"tokens", cache.tokens},
          {"bytes", cache.bytes},
          {"bf16_bytes", cache.bf16_bytes},
          {"quantized_tokens", cache.quantized_tokens},
          {"bits_per_element", cache.bits_per_element},
          {"method", cache.method}};
}

std::string CacheLine(const CacheReport& cache) {
  const bool is_bf16 = cache.method.starts_with("bf16");
  if (cache.quantized_tokens == 0 && cache.tokens > 0 && !is_bf16) {
    return fmt::format("{} tokens cached in {} of BF16 pages; no 2-bit pages yet", cache.tokens,
                       FormatBytes(cache.bytes));
  }
  return fmt::format("{} tokens cached in {} (BF16: {}), {:.2f} bits per element", cache.tokens,
                     FormatBytes(cache.bytes), FormatBytes(cache.bf16_bytes),
                     cache.bits_per_element);
}

std::string StatsLine(const Completion& c) {
  const auto rate = [](int64_t tokens, double seconds) {
    return seconds > 0 ? static_cast<double>(tokens) / seconds : 0.0;
  };
  const int64_t read = c.prompt_tokens - c.reused_tokens;
  return fmt::format(
      "{}\nprompt {} tokens ({} from the cache), read in {} ({:.0f} tokens/s); answer {} tokens in "
      "{} "
      "({:.1f} tokens/s)",
      CacheLine(c.cache), c.prompt_tokens, c.reused_tokens, FormatDuration(c.prefill_seconds),
      rate(read, c.prefill_seconds), c.token_ids.size(), FormatDuration(c.decode_seconds),
      rate(static_cast<int64_t>(c.token_ids.size()), c.decode_seconds));
}

}  // namespace oscar::cli
