// SequenceRunner: many prompts with expected outputs through one model, several at a time in one
// pass. What a token sees depends on its own sequence alone, so the batch changes speed, never a
// score. Speaks token ids. One thread.
//
// A greedy run is teacher-forced along the reference: the reference was produced exactly when every
// one of its tokens is the argmax. At the first token that is not, the model continues by itself,
// so that one run gives both the strict score and what greedy decoding would have answered. Where
// the reference is scored too, the rest of it is read afterwards, from a fork made at that token.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cache/sequence_cache.h"
#include "engine/loaded_model.h"
#include "engine/pass_runner.h"
#include "engine/sampler.h"
#include "measure/token_distribution.h"
#include "oscar/options.h"
#include "oscar/status.h"
#include "run/results.h"

namespace oscar {

// A prompt, or its start, read exactly, in BF16 and without rotation, for all methods to continue
// from.
struct SharedPrompt {
  SequenceCache cache;        // of a bf16 plan
  std::vector<float> logits;  // [vocab], after the prompt's last token; empty where it continues
};

struct SequenceTask {
  std::vector<int32_t> prompt;     // not empty
  std::vector<int32_t> reference;  // with its end token; empty: free generation
  int64_t max_tokens = 0;          // of free generation, teacher-forced tokens counted
  bool stop_at_mismatch = false;   // the answer is not wanted
  // Unset: greedy. Set: sampled, and the reference is only compared with.
  std::optional<SamplingOptions> sampling;
  const SharedPrompt* shared = nullptr;
  // The probability of the reference is wanted, of all its tokens. Greedy tasks only.
  bool score_reference = false;
  bool keep_distributions = false;  // those of its tokens are wanted, too
  // EncodeDistributions of the method to compare with; null: none.
  const std::string* baseline = nullptr;
};

struct SequenceOutcome {
  bool strict = false;
  int64_t first_wrong = -1;          // index into the reference; -1: none
  std::vector<TokenMargin> margins;  // as in ItemRecord
  std::vector<int32_t> output;       // end token included where there was one
  int64_t tokens = 0;                // in the cache at the end
  uint64_t cache_bytes = 0;          // of its pages at the end, the prompt's sealed
  uint64_t saturated = 0;
  std::optional<ReferenceScore> reference;       // where it was to be scored
  std::vector<TokenDistribution> distributions;  // where they were to be kept
};

class SequenceRunner {
 public:
  // `stop_tokens` end an output. The model must outlive the runner.
  SequenceRunner(LoadedModel& model, std::vector<int32_t> stop_tokens, int max_running = 64);

  using OnDone = std::function<Status(size_t index, const SequenceOutcome& outcome)>;
  // `on_done` is called once a task, in the order in which they end.
  Status Run(std::span<const SequenceTask> tasks, const OnDone& on_done);
  // Reads prompts to their ends, or their first `max_tokens`. REQUIRES: a bf16 plan.
  Result<std::vector<SharedPrompt>> ReadPrompts(std::span<const std::vector<int32_t>> prompts,
                                                int64_t max_tokens);

 private:
  struct Running;
  Status Start(Running& running);
  Status Step(std::vector<Running>& running, size_t& max_running);
  Status Take(Running& running, std::span<const float> logits);
  Status ScoreNext(Running& running, std::span<const float> logits) const;
  static void End(Running& running);

  LoadedModel& model_;
  std::vector<int32_t> stop_tokens_;
  size_t max_running_;
  PassRunner pass_;
};

}  // namespace oscar
