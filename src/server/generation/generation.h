// Generation: the choices of one request on the engine. Owns the engine handles: destroying a
// Generation cancels whatever still runs. One thread at a time; nothing here waits.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/service.h"
#include "generation/choice.h"
#include "grammar/spec.h"
#include "openai/api_error.h"
#include "openai/response.h"

namespace oscar::server {

// One prompt of a request, tokenised.
struct GenerationPrompt {
  std::vector<int32_t> tokens;
  std::string echo_text;  // completions with echo
};

struct GenerationPlan {
  std::string request_id;
  bool chat = false;
  std::vector<GenerationPrompt> prompts;
  int64_t choices_per_prompt = 1;
  EngineRequest prototype;  // everything but prompt, id and the choice's seed
  uint64_t seed = 0;
  ChoiceOptions choice;
  std::optional<GrammarSpec> demand;  // the calls that `tool_choice` demands
  bool reasons_first = false;         // the answer may begin with reasoning, which no grammar binds
  bool echo = false;
  bool prompt_logprobs = false;  // wanted of the engine, for echo or by themselves
  // How many of the likeliest tokens generated ones and prompt tokens are told with; the engine
  // gives the larger number for both.
  size_t top_logprobs = 0, prompt_top_logprobs = 0;
  bool keep_prompt_logprobs = false;
  // max_tokens 0: the engine samples one token, which nobody sees.
  bool prefill_only = false;
  // Called with every gap between the tokens of a choice, in seconds; empty: nobody wants them.
  std::function<void(double)> on_gap;
};

// Mixes the seed of a request with the number of a choice; choice 0 keeps the seed itself.
uint64_t ChoiceSeed(uint64_t seed, uint64_t choice);

class Generation {
 public:
  using Clock = std::chrono::steady_clock;

  // All choices or none.
  static ApiResult<std::unique_ptr<Generation>> Start(EngineService& engine,
                                                      const Tokenizer& tokenizer,
                                                      GenerationPlan plan);

  struct Update {
    enum class Kind : uint8_t {
      kIdle,     // nothing has happened
      kStarted,  // `choice` was admitted; with echo `piece` holds the prompt
      kPiece,    // new text of `choice`
      kChoiceDone,
      kFailed,  // `error`; the request is over
      kDone,    // all choices are done
    };
    Kind kind = Kind::kIdle;
    size_t choice = 0;
    ChoicePiece piece;  // kStarted, kPiece, kChoiceDone
    ApiError error;
  };
  // What has happened to any choice. `on_event` of the plan's prototype says when to ask.
  Update Next();
  void Cancel();

  size_t num_choices() const { return choices_.size(); }
  size_t num_active() const { return active_; }
  // The `count` best choices of each prompt, in the order of prompts, the best first: by the mean
  // logprob of their tokens, equals in their own order. All of a prompt's choices stay as they are.
  std::vector<size_t> Best(int64_t count) const;
  FinishInfo finish(size_t choice) const;
  const std::vector<int32_t>& prompt_tokens(size_t choice) const;
  Usage usage() const;
  // One a prompt token, where they were to be kept.
  std::vector<std::vector<PromptCandidate>> prompt_logprobs(size_t choice) const;

  struct Timing {
    Clock::time_point submitted, started, first_token, last_token;
    int64_t tokens = 0;
    bool has_started = false, has_token = false;
  };
  const Timing& timing(size_t choice) const { return choices_[choice].timing; }

 private:
  struct Choice {
    size_t prompt = 0;
    std::unique_ptr<RequestHandle> handle;
    std::unique_ptr<ChoiceAssembler> assembler;
    int64_t cached_tokens = 0;
    std::vector<GeneratedToken> prompt_logprobs;
    bool done = false;
    double logprob_sum = 0.0;  // where the engine was asked for logprobs
    Timing timing;
  };
  Generation(const Tokenizer& tokenizer, GenerationPlan plan)
      : tokenizer_(tokenizer), plan_(std::move(plan)) {}
  bool Take(size_t index, EngineEvent event, Update* update);
  ChoicePiece EchoPiece(const Choice& choice, const EngineEvent& event) const;
  void EndChoice(Choice& choice);

  const Tokenizer& tokenizer_;
  GenerationPlan plan_;
  std::vector<Choice> choices_;
  size_t active_ = 0;
  size_t cursor_ = 0;
};

}  // namespace oscar::server
