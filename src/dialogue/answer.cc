#include "dialogue/answer.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace oscar {
namespace {

bool Contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

AnswerAssembler::AnswerAssembler(const Tokenizer& tokenizer, AnswerFormat format)
    : format_(std::move(format)),
      tokenizer_(tokenizer),
      detokenizer_(tokenizer, /*skip_special=*/false),
      matcher_(format_.stop, format_.include_stop),
      parser_(MakeAnswerParser(format_.syntax)) {
  if (parser_ == nullptr) return;
  for (const std::string_view marker : MarkersOf(format_.syntax)) {
    const auto token = tokenizer.FindToken(marker);
    if (token.has_value() && tokenizer.IsSpecial(*token)) markers_.push_back(*token);
  }
}

std::optional<int64_t> AnswerAssembler::reasoning_tokens() const {
  if (!format_.syntax.reasoning.has_value()) return std::nullopt;
  return reasoning_tokens_;
}

bool AnswerAssembler::IsHidden(int32_t token) const {
  return format_.skip_special && tokenizer_.IsSpecial(token) && !Contains(markers_, token);
}

void AnswerAssembler::Append(ParsedPiece&& from, AnswerPiece* piece) {
  piece->content += from.content;
  piece->reasoning += from.reasoning;
  has_calls_ |= !from.tool_calls.empty();
  std::ranges::move(from.tool_calls, std::back_inserter(piece->tool_calls));
}

void AnswerAssembler::Give(std::string_view text, AnswerPiece* piece) {
  if (parser_ == nullptr) {
    piece->content += text;
    return;
  }
  ParsedPiece parsed;
  parser_->Push(text, &parsed);
  Append(std::move(parsed), piece);
}

// The end of the answer: what the parser held back comes out.
void AnswerAssembler::GiveRest(bool is_cut, AnswerPiece* piece) {
  if (parser_ == nullptr) return;
  ParsedPiece parsed;
  parser_->Finish(is_cut, &parsed);
  Append(std::move(parsed), piece);
}

void AnswerAssembler::Stop(AnswerPiece* piece) {
  stopped_ = true;
  stop_string_ = matcher_.matched();
  GiveRest(/*is_cut=*/true, piece);
  reason_ = has_calls_ ? FinishReason::kToolCalls : FinishReason::kStop;
  Release(/*cut=*/true, piece);
}

bool AnswerAssembler::IsHiddenStop(int32_t token) const {
  if (Contains(format_.stop_token_ids, token)) return !format_.include_stop;
  return Contains(format_.eos_ids, token);
}

bool AnswerAssembler::OnToken(int32_t token, AnswerPiece* piece) {
  if (stopped_) return true;
  ++num_tokens_;
  // The engine samples no stop token before min_tokens, so one that arrives ends the answer.
  if (Contains(format_.stop_token_ids, token)) stop_token_ = token;
  if (IsHiddenStop(token)) return false;

  const bool hidden = IsHidden(token);
  const std::string text = hidden ? std::string() : detokenizer_.Push(token);
  const size_t begin = decoded_;
  decoded_ += text.size();
  // A token that completes no character waits for the one that does.
  pending_.push_back({begin, text.empty() && !hidden ? decoded_ + 1 : decoded_});
  std::string shown;
  const bool matched = matcher_.Push(text, num_tokens_ > format_.min_tokens, &shown);
  Give(shown, piece);
  if (parser_ != nullptr && parser_->in_reasoning()) ++reasoning_tokens_;
  if (matched) {
    Stop(piece);
    return true;
  }
  if (parser_ != nullptr && parser_->ended()) {  // the one call that was allowed is out
    stopped_ = true;
    reason_ = FinishReason::kToolCalls;
    piece->tokens += pending_.size();
    pending_.clear();
    return true;
  }
  Release(/*cut=*/false, piece);
  return false;
}

void AnswerAssembler::OnFinish(FinishReason reason, AnswerPiece* piece) {
  if (stopped_) return;
  // A character cut short by the end of the text becomes U+FFFD, which may even end a stop string.
  std::string shown;
  const bool matched =
      matcher_.Push(detokenizer_.Finish(), num_tokens_ > format_.min_tokens, &shown);
  if (!matched) matcher_.Finish(&shown);
  Give(shown, piece);
  if (matched) return Stop(piece);
  stopped_ = true;
  GiveRest(/*is_cut=*/reason != FinishReason::kStop, piece);
  // An answer that a limit has cut stays one, though it has calls.
  reason_ = reason == FinishReason::kStop && has_calls_ ? FinishReason::kToolCalls : reason;
  piece->tokens += pending_.size();
  pending_.clear();
}

// Tokens whose text is out go along with it. After a cut those that contributed to what was shown
// go too, and the rest is dropped.
void AnswerAssembler::Release(bool cut, AnswerPiece* piece) {
  while (!pending_.empty()) {
    const Span& front = pending_.front();
    if (front.end > matcher_.emitted() && !(cut && front.begin < matcher_.emitted())) break;
    ++piece->tokens;
    pending_.pop_front();
  }
  if (cut) pending_.clear();
}

}  // namespace oscar
