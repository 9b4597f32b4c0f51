// LanguageModel: a model directory that answers text on a mixed-precision paged KV cache. It keeps
// one sequence, so that a prompt which repeats what it has seen (the next turn of a conversation)
// computes only what is new. One caller thread; Cancel may come from any.
//
//   auto model = oscar::LanguageModel::Load({.model = "models/demo"});
//   auto answer = (*model)->Chat(R"([{"role": "user", "content": "Add these numbers: 2 3"}])", {});
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/options.h"
#include "oscar/status.h"
#include "oscar/tool_call.h"

namespace oscar {

// What the cache of a sequence holds.
struct CacheReport {
  int64_t tokens = 0;
  int64_t quantized_tokens = 0;   // of them, in sealed pages; the rest is BF16
  uint64_t bytes = 0;             // of K and V as stored
  uint64_t bf16_bytes = 0;        // what the same tokens take in BF16
  double bits_per_element = 0.0;  // windows and metadata counted
  std::string method;             // "oscar+ (Hadamard), 2.25 history bits"
};

struct Completion {
  std::string text;       // without what ended it, unless asked for
  std::string reasoning;  // what the model thought first, where its family marks that
  std::vector<ToolCall> tool_calls;
  std::vector<int32_t> token_ids;  // the stop token included
  int64_t prompt_tokens = 0;
  int64_t reused_tokens = 0;  // of the prompt, found in the cache
  FinishReason finish_reason = FinishReason::kStop;
  // What of CompletionOptions::stop or stop_token_ids ended the answer, if any of it did.
  std::optional<std::string> stop_string;
  std::optional<int32_t> stop_token;
  Status status;      // why an answer that is kFailed broke off
  uint64_t seed = 0;  // the one that was used
  double prefill_seconds = 0.0, decode_seconds = 0.0;
  CacheReport cache;
};

class LanguageModel {
 public:
  static Result<std::unique_ptr<LanguageModel>> Load(const ModelOptions& options);
  virtual ~LanguageModel() = default;

  // A piece of the answer as it grows; reasoning comes marked. Returning false stops.
  using OnText = std::function<bool(std::string_view piece, bool is_reasoning)>;

  // Continues raw text. Special tokens in it are recognised: it is the caller's own.
  virtual Result<Completion> Complete(std::string_view prompt, const CompletionOptions& options,
                                      const OnText& on_text = {}) = 0;
  // Answers a conversation: a JSON list of {"role", "content"} as in OpenAI's API. Text in messages
  // never becomes a special token.
  virtual Result<Completion> Chat(std::string_view messages_json, const CompletionOptions& options,
                                  const OnText& on_text = {}) = 0;
  virtual void Cancel() = 0;
  // Forgets the sequence.
  virtual void Reset() = 0;

  // What unset CompletionOptions take: see there.
  virtual SamplingOptions default_sampling() const = 0;
  virtual int64_t default_max_tokens() const = 0;  // 0: the rest of the context
  // Prompts that the model directory suggests to newcomers (sample_prompts.json); may be empty.
  virtual const std::vector<std::string>& sample_prompts() const = 0;
  virtual int64_t max_context() const = 0;
  virtual CacheReport cache() const = 0;
};

}  // namespace oscar
