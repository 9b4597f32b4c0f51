#include "generation/choice.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace oscar::server {
LogprobEntry MakeLogprobEntry(const Tokenizer& tokenizer, const GeneratedToken& token,
                              bool skip_special) {
  LogprobEntry entry;
  entry.bytes = tokenizer.TokenBytes(token.token);
  entry.logprob = token.logprob;
  entry.hidden = skip_special && tokenizer.IsSpecial(token.token);
  for (const TokenLogprob& candidate : token.top) {
    entry.top.push_back({std::string(tokenizer.TokenBytes(candidate.token)), candidate.logprob});
  }
  return entry;
}

ChoiceAssembler::ChoiceAssembler(const Tokenizer& tokenizer, ChoiceOptions options)
    : tokenizer_(tokenizer),
      logprobs_(options.logprobs),
      keep_token_ids_(options.keep_token_ids),
      skip_special_(options.skip_special),
      answer_(tokenizer, std::move(options)) {}

std::string ChoiceAssembler::finish_reason() const {
  switch (answer_.finish_reason()) {
    case FinishReason::kStop:
    case FinishReason::kToolCalls:
      return std::string(NameOf(answer_.finish_reason()));
    default:
      return "length";
  }
}

void ChoiceAssembler::Append(AnswerPiece&& from, ChoicePiece* piece) {
  piece->content += from.content;
  piece->reasoning += from.reasoning;
  std::ranges::move(from.tool_calls, std::back_inserter(piece->tool_calls));
  if (!logprobs_) return;
  for (size_t i = 0; i < from.tokens; ++i) {
    piece->logprobs.push_back(std::move(pending_.front()));
    pending_.pop_front();
  }
}

bool ChoiceAssembler::OnToken(const GeneratedToken& token, ChoicePiece* piece) {
  if (keep_token_ids_) piece->token_ids.push_back(token.token);
  if (logprobs_ && !answer_.IsHiddenStop(token.token)) {
    pending_.push_back(MakeLogprobEntry(tokenizer_, token, skip_special_));
  }
  AnswerPiece answer;
  const bool stopped = answer_.OnToken(token.token, &answer);
  Append(std::move(answer), piece);
  return stopped;
}

void ChoiceAssembler::OnFinish(FinishReason reason, ChoicePiece* piece) {
  AnswerPiece answer;
  answer_.OnFinish(reason, &answer);
  Append(std::move(answer), piece);
}

}  // namespace oscar::server
