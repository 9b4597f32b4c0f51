#include "cache/cache_config.h"

#include <fmt/core.h>

#include <utility>

namespace oscar {

Status CacheConfig::Validate() const {
  for (const auto& [name, value] : {std::pair{"sink", sink}, {"recent", recent}}) {
    if (value < 0 || value % kPageTokens != 0) {
      return InvalidArgument(fmt::format("{} window of {} tokens: must be a multiple of {}", name,
                                         value, kPageTokens));
    }
  }
  if (window > 0 && (!seals() || recent < window - 1)) {
    return InvalidArgument(fmt::format(
        "recent window of {} tokens: layers with a sliding window see {}; set it to {} or more",
        recent, window, PagesOf(window) * kPageTokens));
  }
  if (cell <= 0 || cell % kPageTokens != 0) {
    return InvalidArgument(fmt::format(
        "prefill cell of {} tokens: must be a positive multiple of {}", cell, kPageTokens));
  }
  return {};
}

}  // namespace oscar
