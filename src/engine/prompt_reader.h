// Reading a prompt into a sequence's cache. What a prompt token sees depends on its cell alone, so
// a chunk may be of any size as long as it stays in one cell; that rule lives here.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/progress.h"
#include "cache/sequence_cache.h"
#include "model/model.h"
#include "oscar/status.h"

namespace oscar {

// What comes next of a prompt whose first tokens `cache` holds: at most `max_tokens` tokens, none
// beyond the cell of the first. Asks for those logits of the prompt's last `num_logits` tokens that
// fall into the chunk. REQUIRES: the cache is shorter than the prompt.
ForwardItem NextChunk(SequenceCache& cache, std::span<const int32_t> prompt, int64_t max_tokens,
                      int64_t num_logits = 0);

// One prompt, chunk after chunk. Model, cache and prompt must outlive the reader.
class PromptReader {
 public:
  // Reads what `cache` lacks of `prompt`. `chunk`: tokens of a pass, at most; 0: the model's limit.
  PromptReader(Model& model, SequenceCache& cache, std::span<const int32_t> prompt,
               int64_t num_logits = 0, int chunk = 0);

  bool done() const { return cache_.length() >= static_cast<int64_t>(prompt_.size()); }
  Status ReadChunk();
  Status ReadAll(Progress* progress = nullptr);
  // Of the chunk read last: its tokens, and the logits that were wanted, [rows, vocab].
  std::span<const int32_t> chunk() const { return read_; }
  std::span<const float> logits() const { return logits_; }
  std::vector<float> TakeLogits() { return std::move(logits_); }

 private:
  Model& model_;
  SequenceCache& cache_;
  const std::span<const int32_t> prompt_;
  const int64_t num_logits_;
  const int chunk_;
  std::span<const int32_t> read_;
  std::vector<float> logits_;
};

}  // namespace oscar
