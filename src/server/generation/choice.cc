#include "generation/choice.h"

#include <algorithm>
#include <utility>

namespace oscar::server {
namespace {

bool Contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

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
      options_(std::move(options)),
      detokenizer_(tokenizer, options_.skip_special),
      matcher_(options_.stop, options_.include_stop) {
  if (options_.reasoning.has_value()) {
    splitter_.emplace(*options_.reasoning, options_.starts_in_reasoning);
  }
}

std::optional<int64_t> ChoiceAssembler::reasoning_tokens() const {
  if (!splitter_.has_value()) return std::nullopt;
  return reasoning_tokens_;
}

void ChoiceAssembler::Give(std::string_view text, ChoicePiece* piece) {
  if (!splitter_.has_value()) {
    piece->content += text;
    return;
  }
  const ReasoningSplitter::Output output = splitter_->Push(text);
  piece->reasoning += output.reasoning;
  piece->content += output.content;
}

// The end of the choice: what the splitter held back comes out.
void ChoiceAssembler::GiveRest(ChoicePiece* piece) {
  if (!splitter_.has_value()) return;
  const ReasoningSplitter::Output output = splitter_->Finish();
  piece->reasoning += output.reasoning;
  piece->content += output.content;
}

bool ChoiceAssembler::OnToken(const GeneratedToken& token, ChoicePiece* piece) {
  if (stopped_) return true;
  ++num_tokens_;
  if (options_.keep_token_ids) piece->token_ids.push_back(token.token);
  // The engine samples no stop token before min_tokens, so one that arrives ends the choice.
  if (Contains(options_.stop_token_ids, token.token)) {
    stop_token_ = token.token;
    if (!options_.include_stop) return false;
  } else if (Contains(options_.eos_ids, token.token)) {
    return false;
  }

  Pending pending;
  pending.begin = decoded_;
  const std::string text = detokenizer_.Push(token.token);
  decoded_ += text.size();
  const bool hidden = options_.skip_special && tokenizer_.IsSpecial(token.token);
  // A token that completes no character waits for the one that does.
  pending.end = text.empty() && !hidden ? decoded_ + 1 : decoded_;
  if (options_.logprobs) {
    pending.entry = MakeLogprobEntry(tokenizer_, token, options_.skip_special);
    pending_.push_back(std::move(pending));
  }
  std::string shown;
  const bool matched = matcher_.Push(text, num_tokens_ > options_.min_tokens, &shown);
  Give(shown, piece);
  if (splitter_.has_value() && splitter_->in_reasoning()) ++reasoning_tokens_;
  if (matched) {
    stopped_ = true;
    finish_reason_ = "stop";
    stop_string_ = matcher_.matched();
    GiveRest(piece);
    Release(/*cut=*/true, piece);
    return true;
  }
  Release(/*cut=*/false, piece);
  return false;
}

void ChoiceAssembler::OnFinish(FinishReason reason, ChoicePiece* piece) {
  if (stopped_) return;
  stopped_ = true;
  finish_reason_ = reason == FinishReason::kStop ? "stop" : "length";
  // A character cut short by the end of the text becomes U+FFFD, which may even end a stop string.
  std::string shown;
  const bool matched =
      matcher_.Push(detokenizer_.Finish(), num_tokens_ > options_.min_tokens, &shown);
  if (!matched) matcher_.Finish(&shown);
  Give(shown, piece);
  GiveRest(piece);
  if (matched) {
    finish_reason_ = "stop";
    stop_string_ = matcher_.matched();
    Release(/*cut=*/true, piece);
    return;
  }
  for (Pending& pending : pending_) piece->logprobs.push_back(std::move(pending.entry));
  pending_.clear();
}

// Tokens whose text is out go along with it. After a cut those that contributed to what was shown
// go too, and the rest is dropped.
void ChoiceAssembler::Release(bool cut, ChoicePiece* piece) {
  while (!pending_.empty()) {
    Pending& front = pending_.front();
    if (front.end > matcher_.emitted() && !(cut && front.begin < matcher_.emitted())) break;
    piece->logprobs.push_back(std::move(front.entry));
    pending_.pop_front();
  }
  if (cut) pending_.clear();
}

}  // namespace oscar::server
