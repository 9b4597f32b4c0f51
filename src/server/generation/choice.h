// ChoiceAssembler: one choice's tokens on their way to text: detokenised, searched for stop
// strings, cut into pieces that are safe to send. Never half a character, never the beginning of
// what may become a stop string; each token's logprobs travel with the piece that completes its
// text. One object a choice, used by one thread.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "engine/service.h"
#include "generation/stop_matcher.h"
#include "openai/response.h"
#include "text/detokenizer.h"
#include "text/reasoning.h"
#include "text/tokenizer.h"

namespace oscar::server {

struct ChoiceOptions {
  std::vector<std::string> stop;
  std::vector<int32_t> stop_token_ids;  // given by the request: named in stop_reason
  std::vector<int32_t> eos_ids;         // the model's own, where not ignored
  bool include_stop = false;
  bool skip_special = true;
  int64_t min_tokens = 0;
  bool logprobs = false;
  bool keep_token_ids = false;
  // Where set, what the model marks as reasoning is kept apart from the answer.
  std::optional<ReasoningFormat> reasoning;
  bool starts_in_reasoning = false;
};

class ChoiceAssembler {
 public:
  // `tokenizer` must outlive this object.
  ChoiceAssembler(const Tokenizer& tokenizer, ChoiceOptions options);

  // Appends to `piece`; true when a stop string has ended the choice (the engine should stop).
  bool OnToken(const GeneratedToken& token, ChoicePiece* piece);
  // The engine ended the choice: flushes.
  void OnFinish(FinishReason reason, ChoicePiece* piece);

  // "stop" or "length", once finished.
  const std::string& finish_reason() const { return finish_reason_; }
  // What ended the choice: a stop string, or a stop token id given by the request.
  const std::optional<std::string>& stop_string() const { return stop_string_; }
  const std::optional<int32_t>& stop_token() const { return stop_token_; }
  int64_t num_tokens() const { return num_tokens_; }
  // Of those, sampled while the model was reasoning; nothing for a model that marks none.
  std::optional<int64_t> reasoning_tokens() const;

 private:
  struct Pending {
    LogprobEntry entry;
    size_t begin = 0, end = 0;  // bytes of the decoded stream
  };
  void Release(bool cut, ChoicePiece* piece);
  void Give(std::string_view text, ChoicePiece* piece);
  void GiveRest(ChoicePiece* piece);

  const Tokenizer& tokenizer_;
  ChoiceOptions options_;
  Detokenizer detokenizer_;
  StopMatcher matcher_;
  std::optional<ReasoningSplitter> splitter_;
  std::deque<Pending> pending_;
  size_t decoded_ = 0;
  int64_t num_tokens_ = 0, reasoning_tokens_ = 0;
  bool stopped_ = false;
  std::string finish_reason_;
  std::optional<std::string> stop_string_;
  std::optional<int32_t> stop_token_;
};

// Exact bytes and logprobs of a token, for prompts too.
LogprobEntry MakeLogprobEntry(const Tokenizer& tokenizer, const GeneratedToken& token,
                              bool skip_special);

}  // namespace oscar::server
