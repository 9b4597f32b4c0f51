#include "backend/batch.h"

#include "base/check.h"

namespace oscar {

BatchRows::BatchRows(std::span<const ForwardItem> items) : first(items.size()) {
  for (const bool prompts : {false, true}) {
    for (size_t i = 0; i < items.size(); ++i) {
      if (items[i].is_prompt != prompts) continue;
      first[i] = rows;
      rows += static_cast<int>(items[i].tokens.size());
      logits += items[i].num_logits;
    }
    if (!prompts) decodes = rows;
  }
}

void CheckItems(std::span<const ForwardItem> items, int max_batch_tokens) {
  int64_t total = 0;
  for (const ForwardItem& item : items) {
    const SequenceCache& cache = *item.cache;
    const auto count = static_cast<int64_t>(item.tokens.size());
    OSCAR_CHECK(count > 0 && (item.is_prompt || count == 1));
    const int64_t cell = cache.config().cell;
    OSCAR_CHECK(!item.is_prompt || cache.length() / cell == (cache.length() + count - 1) / cell,
                "a prompt chunk crosses a cell boundary");
    total += count;
  }
  OSCAR_CHECK(total <= max_batch_tokens, "{} tokens in one pass", total);
}

Status SealAndReserve(std::span<const ForwardItem> items, ThreadPool& threads) {
  for (const ForwardItem& item : items) {
    OSCAR_RETURN_IF_ERROR(item.is_prompt ? item.cache->SealForPrompt(threads)
                                         : item.cache->SealForGeneration(threads));
  }
  for (size_t i = 0; i < items.size(); ++i) {
    Status status = items[i].cache->Reserve(static_cast<int64_t>(items[i].tokens.size()));
    if (status.ok()) continue;
    // Pages that an earlier item got are given back.
    for (size_t j = 0; j < i; ++j) items[j].cache->Trim(items[j].cache->length());
    return status;
  }
  return {};
}

void AdvanceAll(std::span<const ForwardItem> items) {
  for (const ForwardItem& item : items) {
    item.cache->Advance(static_cast<int64_t>(item.tokens.size()));
  }
}

}  // namespace oscar
