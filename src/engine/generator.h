// Generator: one sequence at a time on one model: prefill in chunks, then token by token. It keeps
// its sequence between calls, so that a next turn whose prompt repeats what is cached computes only
// what is new. Speaks token ids. One caller thread; Cancel may come from any.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "cache/page_pool.h"
#include "cache/sequence_cache.h"
#include "engine/pass_runner.h"
#include "engine/sampler.h"
#include "model/model.h"
#include "oscar/options.h"
#include "oscar/status.h"

namespace oscar {

struct GenerateRequest {
  std::vector<int32_t> prompt;  // not empty
  SamplingOptions sampling;
  int64_t max_tokens = 0;  // 0: as many as the context has room for
  std::vector<int32_t> stop_tokens;
  int64_t min_tokens = 0;  // stop tokens are not sampled before
};

struct GenerateResult {
  std::vector<int32_t> tokens;  // the stop token included
  FinishReason reason = FinishReason::kStop;
  Status status;  // why an answer that is kFailed broke off
  int64_t prompt_tokens = 0;
  int64_t reused_tokens = 0;  // of the prompt, found in the cache
  double prefill_seconds = 0.0, decode_seconds = 0.0;
  uint64_t seed = 0;
  CacheUsage cache;
};

class Generator {
 public:
  // `max_context` in tokens; 0 takes the model's own limit. `chunk` is the number of prompt tokens
  // in one pass; it changes speed, never answers.
  Generator(Model& model, PagePool& pool, int64_t max_context = 0, int chunk = 0);

  // Called for every token as it is sampled; returning false stops.
  using OnToken = std::function<bool(int32_t token)>;
  // kOutOfRange when the prompt does not fit the context, kResourceExhausted when the cache budget
  // cannot hold it; the sequence then keeps what was cached. An error after the first token is part
  // of the result: kFailed.
  Result<GenerateResult> Generate(const GenerateRequest& request, const OnToken& on_token = {});
  // Stops the running Generate at the next token or chunk; a later Generate starts afresh.
  void Cancel() { cancelled_.store(true, std::memory_order_relaxed); }

  // Teacher forcing: the logits of the last `num_logits` prompt tokens after the whole prompt,
  // [num_logits, vocab], handed out chunk by chunk in order.
  using OnLogits = std::function<void(int64_t position, std::span<const float> logits)>;
  Status Prefill(std::span<const int32_t> prompt, int64_t num_logits, const OnLogits& on_logits);
  // Appends one token as if it had been generated; returns the logits after it.
  Result<std::span<const float>> Step(int32_t token);

  const std::vector<int32_t>& tokens() const { return tokens_; }  // those in the cache
  const SequenceCache& cache() const { return cache_; }
  int64_t max_context() const { return max_context_; }
  void Reset();

 private:
  Status Run(std::span<const int32_t> prompt, int64_t num_logits, const OnLogits& on_logits);
  bool DropSnapshots();  // false: there were none
  int64_t ReusePrefix(std::span<const int32_t> prompt, int64_t num_logits);
  // Why `total` tokens, the first `prompt` of them read as a prompt, do not fit the budget.
  Status Exhausted(int64_t prompt, int64_t total) const;
  // A pass of one generated token.
  Status Append(int32_t token, const std::optional<SampleParams>& sample);
  // Appends `token` and returns what is sampled after it, on the model's device where it can. With
  // `goes_on` another token will be wanted unless the sampled one ends the answer: the pass for it
  // may then be launched before this one is waited for. `masked` tokens are not sampled; the step
  // before must not have said `goes_on` where there are some.
  Result<int32_t> StepAndSample(int32_t token, bool goes_on, std::span<const int32_t> masked,
                                Sampler& sampler);

  Model& model_;
  PagePool& pool_;
  int64_t max_context_;
  int chunk_;
  SequenceCache cache_;
  std::vector<int32_t> tokens_;
  PassRunner pass_;
  std::vector<float> logits_;  // after the prompt
  std::atomic<bool> cancelled_{false};
};

}  // namespace oscar
