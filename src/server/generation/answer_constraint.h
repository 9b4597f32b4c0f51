// AnswerConstraint: the grammar of an answer as the engine's TokenConstraint. Reasoning stays free:
// the grammar holds from the first token after it. One object per choice, used by one thread at a
// time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/token_constraint.h"
#include "grammar/compiler.h"
#include "text/reasoning.h"
#include "text/tokenizer.h"

namespace oscar::server {

class AnswerConstraint final : public TokenConstraint {
 public:
  // `tokenizer` must outlive this object. `reasoning`: how the model marks it, where it does;
  // `starts_in_reasoning`: the prompt has opened it. A model that may open it itself has the choice
  // with its first token.
  AnswerConstraint(const Tokenizer& tokenizer, std::shared_ptr<const CompiledGrammar> grammar,
                   const std::optional<ReasoningFormat>& reasoning, bool starts_in_reasoning,
                   std::vector<int32_t> stop_tokens);

  Status Fill(std::span<uint32_t> mask) override;
  Status Accept(int32_t token) override;
  bool finished() const override { return matcher_->finished(); }

 private:
  enum class State : uint8_t {
    kStart,      // reasoning may be opened by the first token
    kReasoning,  // everything but the end of the answer
    kAnswer,
  };
  Status Start(const std::string& text);

  const Tokenizer& tokenizer_;
  std::shared_ptr<const CompiledGrammar> grammar_;
  std::unique_ptr<GrammarMatcher> matcher_;
  std::vector<int32_t> stop_tokens_;
  std::string close_;
  std::optional<TokenId> open_token_;
  std::string tail_;  // of the reasoning, in which its end may have begun
  State state_ = State::kAnswer;
};

}  // namespace oscar::server
