// ChoiceAssembler: an AnswerAssembler whose pieces carry what the API tells of tokens: each token's
// logprobs travel with the piece that completes its text. One object per choice, used by one
// thread.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "dialogue/answer.h"
#include "engine/service.h"
#include "openai/response.h"
#include "text/tokenizer.h"

namespace oscar::server {

struct ChoiceOptions : AnswerFormat {
  bool logprobs = false;
  bool keep_token_ids = false;
};

class ChoiceAssembler {
 public:
  // `tokenizer` must outlive this object.
  ChoiceAssembler(const Tokenizer& tokenizer, ChoiceOptions options);

  // Appends to `piece`; true when a stop string has ended the choice (the engine should stop).
  bool OnToken(const GeneratedToken& token, ChoicePiece* piece);
  // The engine ended the choice: flushes.
  void OnFinish(FinishReason reason, ChoicePiece* piece);

  // "stop", "length" or "tool_calls", once finished.
  std::string finish_reason() const;
  const std::optional<std::string>& stop_string() const { return answer_.stop_string(); }
  const std::optional<int32_t>& stop_token() const { return answer_.stop_token(); }
  int64_t num_tokens() const { return answer_.num_tokens(); }
  std::optional<int64_t> reasoning_tokens() const { return answer_.reasoning_tokens(); }

 private:
  void Append(AnswerPiece&& from, ChoicePiece* piece);

  const Tokenizer& tokenizer_;
  const bool logprobs_, keep_token_ids_, skip_special_;
  AnswerAssembler answer_;
  std::deque<LogprobEntry> pending_;  // of tokens whose text is not all out
};

// Exact bytes and logprobs of a token, for prompts too.
LogprobEntry MakeLogprobEntry(const Tokenizer& tokenizer, const GeneratedToken& token,
                              bool skip_special);

}  // namespace oscar::server
