// EngineService: what the server, and any other concurrent caller, drives. Requests come from many
// threads; one engine thread owns all sequences, pages and sampler state, batches whatever is
// running, and hands tokens back through a bounded channel a request. Speaks token ids: text,
// templates, stop strings and JSON stay with the caller.
//
// Thread-safety: every method of EngineService and of RequestHandle may be called from any thread;
// a handle's Next from one thread at a time. Handles may outlive the service: they then end with
// kUnavailable.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/generator.h"
#include "engine/sampler.h"
#include "engine/token_constraint.h"
#include "oscar/options.h"
#include "oscar/status.h"

namespace oscar {

// Which tokens an answer may hold. Read-only once a request has it: its choices share one.
struct TokenRules {
  // Nothing else is sampled; empty: everything may be.
  std::vector<int32_t> allowed;
  // Runs of tokens that the answer does not hold: the last of a run is not sampled after the rest.
  std::vector<std::vector<int32_t>> bad_words;
};

struct EngineRequest {
  std::string id;  // for logs and GET /v1/oscar/cache
  std::vector<int32_t> prompt;
  SamplingOptions sampling;  // seed set by the caller: (seed, choice) makes one
  int64_t max_tokens = 0;    // 0: the rest of the context
  bool may_shorten = false;  // max_tokens is a default: where the cache holds less, that will do
  int64_t min_tokens = 0;    // stop tokens are not sampled before
  std::vector<int32_t> stop_tokens;
  // Lower is served earlier, equals by arrival; never changes an answer.
  int64_t priority = 0;
  std::shared_ptr<const TokenRules> rules;  // null: any token may come
  // Where set, called once: what the answer's tokens may be. Its masks come before everything else
  // in sampling; a token that it admits nothing beside comes whatever min_tokens says.
  std::function<std::unique_ptr<TokenConstraint>()> make_constraint;
  bool want_logprobs = false;
  int top_logprobs = 0;
  // Logprobs of the prompt's own tokens (echo, prompt_logprobs); such prompts are never taken from
  // the prefix cache.
  bool want_prompt_logprobs = false;
  // Requests share prefixes only within one salt (per-key isolation).
  std::string cache_salt;
  // Called from the engine's thread after every event, for callers that do not wait in Next; must
  // not wait, and may be called for a short while after the handle is gone.
  std::function<void()> on_event;
};

struct GeneratedToken {
  int32_t token = 0;
  float logprob = 0.0f;           // where wanted; of the model's own distribution
  std::vector<TokenLogprob> top;  // top_logprobs of them, most likely first
  int32_t rank = 0;               // prompt tokens: 1 is the most likely; else 0
};

struct EngineEvent {
  enum class Kind : uint8_t {
    kStarted,   // admitted; cached_tokens is known
    kToken,     // `token`; a stop token is delivered too, before kFinished
    kFinished,  // `reason`; the last event
    kFailed,    // `status`; the last event
    kTimeout,   // Next waited in vain; nothing happened
  };
  Kind kind = Kind::kTimeout;
  GeneratedToken token = {};
  FinishReason reason = FinishReason::kStop;
  Status status = {};
  int64_t cached_tokens = 0;                         // kStarted
  std::vector<GeneratedToken> prompt_logprobs = {};  // kStarted, where wanted: prompt[1..]
};

class RequestHandle {
 public:
  virtual ~RequestHandle() = default;  // cancels what is still running
  virtual EngineEvent Next(std::chrono::milliseconds timeout) = 0;
  // Pages are free by the end of the step in progress.
  virtual void Cancel() = 0;
};

// One sequence as the cache monitor shows it.
struct SequenceInfo {
  std::string request_id;
  std::string cache_salt;  // of its request: says who may see it
  bool running = false;    // false: waiting, or a kept prefix nobody uses
  CacheUsage usage;
  // One character a page in position order: 's' sink, 'q' quantised, 'r' recent or current cell; in
  // upper case where the page is shared.
  std::string pages;
};

// How many tokens passes had, counted in powers of two.
struct BatchHistogram {
  static constexpr size_t kBounds = 14;  // up to 1, 2, 4, ... 8192 tokens; one more for the rest
  std::array<uint64_t, kBounds + 1> counts{};
  uint64_t sum = 0;
  void Observe(uint64_t tokens) {
    size_t bucket = 0;
    while (bucket < kBounds && tokens > uint64_t{1} << bucket) ++bucket;
    ++counts[bucket];
    sum += tokens;
  }
};

struct EngineStats {
  int64_t running = 0, waiting = 0;
  uint64_t kv_budget_bytes = 0, kv_bytes = 0;
  uint64_t sink_bytes = 0, quantized_bytes = 0, recent_bytes = 0;
  uint64_t prefix_bytes = 0;  // of the above: pages that only the prefix cache holds
  // Recurrent states of sequences, and their snapshots in the prefix cache; of one.
  uint64_t state_bytes = 0, snapshot_bytes = 0, state_bytes_each = 0;
  // Pages of 64 tokens in use, and bytes of one.
  uint64_t open_pages = 0, sealed_pages = 0;
  uint64_t open_page_bytes = 0, sealed_page_bytes = 0;
  double bits_per_element = 0.0;
  uint64_t prompt_tokens = 0, cached_prompt_tokens = 0, generated_tokens = 0;
  uint64_t prefix_queries = 0, prefix_hits = 0, evictions = 0, preemptions = 0, cancelled = 0;
  uint64_t steps = 0;
  uint64_t cells_by_layer = 0;  // cells of prompts that were read layer by layer
  BatchHistogram batch_tokens;
};

class EngineService {
 public:
  virtual ~EngineService() = default;
  // Refuses at once: kInvalidArgument, kOutOfRange (longer than the context, or than the whole
  // cache could ever hold), kResourceExhausted (queue full), kUnavailable (draining or failed).
  virtual Result<std::unique_ptr<RequestHandle>> Submit(EngineRequest request) = 0;
  virtual EngineStats Stats() const = 0;
  virtual std::vector<SequenceInfo> Sequences() const = 0;
  // OK while requests are accepted; kUnavailable with the reason otherwise.
  virtual Status Health() const = 0;
  // No new requests; running ones continue. Drained() turns true when none is left.
  virtual void Drain() = 0;
  virtual bool Drained() const = 0;
  virtual int64_t max_context() const = 0;
};

struct EngineServiceOptions {
  int max_running = 64;
  int max_waiting = 4096;
  int step_tokens = 512;    // tokens of one forward pass, generated tokens first
  // Seconds between two tokens of an answer that passes with prompts should keep to, by holding
  // fewer prompt tokens; 0: they hold as many as fit.
  double target_pass_seconds = 0.0;
  int64_t max_context = 0;  // 0: the model's
  bool prefix_cache = true;
  bool deterministic = false;  // accept only exact prefix hits (--deterministic)
  // Where given, immutable prefix pages of requests without a salt survive a restart in this
  // folder; not with `deterministic`, nor with methods that seal several pages together.
  std::string prefix_dir;
  uint64_t prefix_dir_bytes = uint64_t{8} << 30;
  // Models with a recurrent state: of the cache's bytes, how many may be snapshots of it, without
  // which a prefix cannot be used. Unset: a quarter; 0: none are kept.
  std::optional<uint64_t> snapshot_bytes;
};

// `model` and `pool` must outlive the service and are used by its thread alone from here on.
std::unique_ptr<EngineService> MakeEngineService(Model& model, PagePool& pool, ThreadPool& threads,
                                                 const EngineServiceOptions& options);

}  // namespace oscar
