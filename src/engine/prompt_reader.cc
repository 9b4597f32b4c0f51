#include "engine/prompt_reader.h"

#include <algorithm>

#include "base/check.h"

namespace oscar {

ForwardItem NextChunk(SequenceCache& cache, std::span<const int32_t> prompt, int64_t max_tokens,
                      int64_t num_logits) {
  const int64_t at = cache.length(), cell = cache.config().cell;
  const auto total = static_cast<int64_t>(prompt.size());
  OSCAR_CHECK(at < total);
  const int64_t count = std::min({max_tokens, total - at, cell - at % cell});
  const int64_t wanted = std::clamp<int64_t>(at + count - (total - num_logits), 0, count);
  return {&cache, prompt.subspan(static_cast<size_t>(at), static_cast<size_t>(count)),
          /*is_prompt=*/true, static_cast<int>(wanted)};
}

PromptReader::PromptReader(Model& model, SequenceCache& cache, std::span<const int32_t> prompt,
                           int64_t num_logits, int chunk)
    : model_(model),
      cache_(cache),
      prompt_(prompt),
      num_logits_(num_logits),
      chunk_(chunk > 0 ? chunk : model.max_batch_tokens()) {}

Status PromptReader::ReadChunk() {
  const ForwardItem item = NextChunk(cache_, prompt_, chunk_, num_logits_);
  logits_.resize(static_cast<size_t>(item.num_logits) *
                 static_cast<size_t>(model_.spec().vocab_size));
  OSCAR_RETURN_IF_ERROR(model_.Forward({&item, 1}, logits_));
  read_ = item.tokens;
  return {};
}

Status PromptReader::ReadAll(Progress* progress) {
  while (!done()) {
    OSCAR_RETURN_IF_ERROR(ReadChunk());
    if (progress != nullptr) progress->Add(read_.size());
  }
  return {};
}

}  // namespace oscar
