#include "engine/page_budget.h"

#include <algorithm>

#include "cache/layered_append.h"

namespace oscar {
namespace {

// Calls body(bytes, tokens) with what is held after each stretch in which bytes only grow.
template <typename Body>
void EachPeak(const CacheConfig& config, int64_t length, int64_t sealed_end, int64_t prompt,
              int64_t total, Reading reading, const Body& body) {
  const int64_t sink_pages = config.sink / kPageTokens;
  const auto bytes = [&](int64_t tokens, int64_t seal_before) {
    const int64_t end =
        std::max(sealed_end, SequenceCache::SealedEndAt(config, seal_before - config.recent));
    const int64_t pages = PagesOf(tokens);
    const int64_t sealed = std::clamp<int64_t>(end - sink_pages, 0, pages);
    return static_cast<uint64_t>(sealed) * config.sealed.bytes() +
           static_cast<uint64_t>(pages - sealed) * config.open.bytes() + config.state.bytes();
  };
  const int64_t last_prompt = std::min(prompt, total);
  for (int64_t at = length; at < last_prompt;) {
    const int64_t start = at / config.cell * config.cell;
    const int64_t end = std::min(last_prompt, start + config.cell);
    uint64_t held = bytes(end, start);
    if (reading == Reading::kByLayer) {
      sealed_end = std::max(sealed_end, SequenceCache::SealedEndAt(config, start - config.recent));
      const LayeredPages pages(config, at, sealed_end, end);
      held = bytes(at, start) + pages.bytes(config);
      sealed_end = pages.sealed_end;
    }
    if (!body(held, end)) return;
    at = end;
  }
  // A generated token at position `at` is computed after sealing before at - recent.
  for (int64_t at = std::max(prompt, length); at < total;) {
    const int64_t page_end = std::min(total, (at / kPageTokens + 1) * kPageTokens);
    if (!body(bytes(page_end, at), page_end)) return;
    at = page_end;
  }
}

}  // namespace

uint64_t PeakBytes(const CacheConfig& config, int64_t length, int64_t sealed_end, int64_t prompt,
                   int64_t total, Reading reading) {
  uint64_t peak = 0;
  EachPeak(config, length, sealed_end, prompt, total, reading, [&](uint64_t bytes, int64_t) {
    peak = std::max(peak, bytes);
    return true;
  });
  return peak;
}

int64_t LargestTotal(const CacheConfig& config, int64_t prompt, int64_t limit, uint64_t budget,
                     Reading reading) {
  int64_t fits = 0;
  EachPeak(config, 0, 0, prompt, limit, reading, [&](uint64_t bytes, int64_t tokens) {
    if (bytes > budget) return false;
    fits = tokens;
    return true;
  });
  return fits;
}

int64_t Conversations(const CacheConfig& config, int64_t tokens, uint64_t budget, Reading reading) {
  const uint64_t read = PeakBytes(config, tokens, tokens, reading);
  if (read > budget) return 0;
  const uint64_t rest = std::max<uint64_t>(SequenceCache::BytesFor(config, tokens), 1);
  return 1 + static_cast<int64_t>((budget - read) / rest);
}

}  // namespace oscar
