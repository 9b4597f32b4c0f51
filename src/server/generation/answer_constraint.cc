#include "generation/answer_constraint.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

namespace oscar::server {
namespace {

void SetBit(std::span<uint32_t> mask, int32_t token, bool value) {
  const auto word = static_cast<size_t>(token) / 32;
  if (word >= mask.size()) return;
  const uint32_t bit = uint32_t{1} << (token % 32);
  mask[word] = value ? mask[word] | bit : mask[word] & ~bit;
}

}  // namespace

AnswerConstraint::AnswerConstraint(const Tokenizer& tokenizer,
                                   std::shared_ptr<const CompiledGrammar> grammar,
                                   const std::optional<ReasoningFormat>& reasoning,
                                   bool starts_in_reasoning, std::vector<int32_t> stop_tokens)
    : tokenizer_(tokenizer),
      grammar_(std::move(grammar)),
      matcher_(grammar_->NewMatcher()),
      stop_tokens_(std::move(stop_tokens)) {
  if (!reasoning.has_value()) return;
  close_ = reasoning->close;
  if (starts_in_reasoning) {
    state_ = State::kReasoning;
  } else if ((open_token_ = tokenizer.FindToken(reasoning->open)).has_value()) {
    state_ = State::kStart;
  }
}

Status AnswerConstraint::Fill(std::span<uint32_t> mask) {
  if (state_ == State::kReasoning) {
    // A stop token here would end an answer that has not begun.
    std::ranges::fill(mask, ~uint32_t{0});
    for (const int32_t token : stop_tokens_) SetBit(mask, token, false);
    return {};
  }
  OSCAR_RETURN_IF_ERROR(matcher_->Fill(mask));
  if (state_ == State::kStart) SetBit(mask, *open_token_, true);
  return {};
}

// What follows the end of the reasoning in the same token. Models put line breaks there, which are
// no part of the answer.
Status AnswerConstraint::Start(const std::string& text) {
  state_ = State::kAnswer;
  tail_.clear();
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string::npos) return {};
  if (matcher_->AcceptText(text.substr(first))) return {};
  return InvalidArgument(
      "the token that ends the reasoning also holds the beginning of an answer that the grammar "
      "does not allow");
}

Status AnswerConstraint::Accept(int32_t token) {
  if (state_ == State::kStart) {
    state_ = token == *open_token_ ? State::kReasoning : State::kAnswer;
    if (state_ == State::kReasoning) return {};
  }
  if (state_ == State::kReasoning) {
    tail_ += tokenizer_.TokenBytes(token);
    if (const size_t at = tail_.find(close_); at != std::string::npos) {
      return Start(tail_.substr(at + close_.size()));
    }
    if (tail_.size() > close_.size()) tail_.erase(0, tail_.size() - close_.size());
    return {};
  }
  if (matcher_->Accept(token)) return {};
  return Internal(fmt::format("token {} was sampled, which the grammar does not allow", token));
}

}  // namespace oscar::server
