#include "dialogue/answer.h"

#include <algorithm>
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
      detokenizer_(tokenizer, format_.skip_special),
      matcher_(format_.stop, format_.include_stop) {
  if (format_.reasoning.has_value()) {
    splitter_.emplace(*format_.reasoning, format_.starts_in_reasoning);
  }
}

std::optional<int64_t> AnswerAssembler::reasoning_tokens() const {
  if (!splitter_.has_value()) return std::nullopt;
  return reasoning_tokens_;
}

void AnswerAssembler::Give(std::string_view text, AnswerPiece* piece) {
  if (!splitter_.has_value()) {
    piece->content += text;
    return;
  }
  const ReasoningSplitter::Output output = splitter_->Push(text);
  piece->reasoning += output.reasoning;
  piece->content += output.content;
}

// The end of the answer: what the splitter held back comes out.
void AnswerAssembler::GiveRest(AnswerPiece* piece) {
  if (!splitter_.has_value()) return;
  const ReasoningSplitter::Output output = splitter_->Finish();
  piece->reasoning += output.reasoning;
  piece->content += output.content;
}

void AnswerAssembler::Stop(AnswerPiece* piece) {
  stopped_ = true;
  reason_ = FinishReason::kStop;
  stop_string_ = matcher_.matched();
  GiveRest(piece);
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

  const std::string text = detokenizer_.Push(token);
  const size_t begin = decoded_;
  decoded_ += text.size();
  const bool hidden = format_.skip_special && tokenizer_.IsSpecial(token);
  // A token that completes no character waits for the one that does.
  pending_.push_back({begin, text.empty() && !hidden ? decoded_ + 1 : decoded_});
  std::string shown;
  const bool matched = matcher_.Push(text, num_tokens_ > format_.min_tokens, &shown);
  Give(shown, piece);
  if (splitter_.has_value() && splitter_->in_reasoning()) ++reasoning_tokens_;
  if (matched) {
    Stop(piece);
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
  reason_ = reason;
  GiveRest(piece);
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
