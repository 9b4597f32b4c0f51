// Engine: a model directory that answers many conversations at once. It batches whatever runs,
// shares the cache pages of equal prompt beginnings, and lets requests wait while its memory is
// full. Answers are the ones that LanguageModel and the server give.
//
//   auto engine = oscar::Engine::Load({.model = {.model = "models/demo"}});
//   auto answer = (*engine)->Chat(R"([{"role": "user", "content": "Add these numbers: 2 3"}])",
//   {}); while (true) {
//     const oscar::AnswerEvent event = (*answer)->Next(std::chrono::seconds(1));
//     std::cout << event.content;
//     if (event.is_last()) break;
//   }
//
// Every method may be called from any thread, Answer::Next from one thread at a time. An Answer
// must not outlive its Engine.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/options.h"
#include "oscar/status.h"
#include "oscar/tool_call.h"

namespace oscar {

struct EngineOptions {
  ModelOptions model;
  int max_running = 64;   // answers in one batch
  int max_waiting = 256;  // requests in the queue; more are refused with kResourceExhausted
  bool prefix_cache = true;
  // Use cached prefixes only where answers stay the same to the bit.
  bool deterministic = false;
};

// What happened to an answer since the event before.
struct AnswerEvent {
  enum class Kind : uint8_t {
    kTimeout,   // nothing
    kStarted,   // admitted; usage().cached_tokens is known
    kText,      // new text, or tokens whose text is not complete yet
    kFinished,  // the last event; may carry the last text
    kFailed,    // the last event: `status` says why
  };
  Kind kind = Kind::kTimeout;
  std::string content, reasoning;
  std::vector<ToolCallDelta> tool_calls;
  std::vector<int32_t> token_ids;  // in order; a stop token is among them
  // kFinished: as in Completion.
  FinishReason finish_reason = FinishReason::kStop;
  std::optional<std::string> stop_string;
  std::optional<int32_t> stop_token;
  Status status;

  bool is_last() const { return kind == Kind::kFinished || kind == Kind::kFailed; }
};

struct AnswerUsage {
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;  // of the prompt, found in the prefix cache
  int64_t completion_tokens = 0;
  int64_t reasoning_tokens = 0;  // of the completion
};

// One request. Destroying it cancels what still runs.
class Answer {
 public:
  virtual ~Answer() = default;
  // Waits for the next event; a timeout of 0 polls. After the last event it returns that again,
  // without text.
  virtual AnswerEvent Next(std::chrono::milliseconds timeout) = 0;
  // Its pages are free soon after; the last event then says kCancelled.
  virtual void Cancel() = 0;
  virtual AnswerUsage usage() const = 0;
  virtual uint64_t seed() const = 0;  // the one that is used
};

struct EngineReport {
  int64_t running = 0, waiting = 0;
  uint64_t kv_bytes = 0, kv_budget_bytes = 0;  // of cache pages
  double bits_per_element = 0.0;               // stored bits per K or V number
  uint64_t prompt_tokens = 0, cached_prompt_tokens = 0, generated_tokens = 0;  // since Load
  uint64_t steps = 0;                                                          // forward passes
};

class Engine {
 public:
  static Result<std::unique_ptr<Engine>> Load(const EngineOptions& options);
  virtual ~Engine() = default;

  // Submits raw text, or a conversation: see LanguageModel. Refuses at once what can never run
  // (kInvalidArgument, kOutOfRange) and what finds the queue full (kResourceExhausted).
  virtual Result<std::unique_ptr<Answer>> Complete(std::string_view prompt,
                                                   const CompletionOptions& options) = 0;
  virtual Result<std::unique_ptr<Answer>> Chat(std::string_view messages_json,
                                               const CompletionOptions& options) = 0;

  virtual EngineReport report() const = 0;
  // OK while requests are accepted; kUnavailable with the reason after the device has failed.
  virtual Status health() const = 0;
  virtual int64_t max_context() const = 0;
  // What unset CompletionOptions take: see there.
  virtual SamplingOptions default_sampling() const = 0;
  virtual int64_t default_max_tokens() const = 0;  // 0: the rest of the context
};

}  // namespace oscar
