// What one pass computes: any mix of prompt chunks and generated tokens of different sequences, and
// what is done with their caches before and after, whatever the device. One thread.
#pragma once

#include <cstdint>
#include <iterator>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "cache/sequence_cache.h"
#include "oscar/status.h"

namespace oscar {

// Consecutive tokens of one sequence, at positions [cache->length(), ...).
struct ForwardItem {
  SequenceCache* cache = nullptr;
  std::span<const int32_t> tokens;
  // In place of a token: what the sample of that row of the pass before (Model::Launch) gives.
  static constexpr int32_t Sampled(int32_t row) { return -1 - row; }
  // Prompt tokens see their cell exactly; a chunk must not cross into the next cell
  // (CacheConfig::cell). A generated token comes alone.
  bool is_prompt = false;
  // Logits wanted of the last `num_logits` tokens.
  int num_logits = 0;
};

// Where the items' tokens are among the rows of a pass: generated tokens first, then prompt chunks,
// both in order.
struct BatchRows {
  explicit BatchRows(std::span<const ForwardItem> items);
  std::vector<int> first;  // row of an item's first token
  int rows = 0, decodes = 0, logits = 0;
};

// Rows that a recorded step may have, and the smallest of them that holds `rows`, or the largest
// where none does.
inline constexpr int kStepRows[] = {1,  2,  4,   8,   12,  16,  24,  32,  40,  48,  56,  64,
                                    80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512};
constexpr int StepRows(int rows) {
  for (const int step : kStepRows) {
    if (step >= rows) return step;
  }
  return kStepRows[std::size(kStepRows) - 1];
}
static_assert(StepRows(1) == 1 && StepRows(9) == 12 && StepRows(4096) == 512);

// The caller's mistakes end the program: no tokens, a chunk across cells, too many tokens.
void CheckItems(std::span<const ForwardItem> items, int max_batch_tokens);
// Quantises what is due and takes pages for the items' tokens: for every item or for none (what was
// due stays sealed).
Status SealAndReserve(std::span<const ForwardItem> items, ThreadPool& threads);
// The caches grow by the items' tokens.
void AdvanceAll(std::span<const ForwardItem> items);

}  // namespace oscar
