#include "text/detokenizer.h"

#include "text/unicode.h"

namespace oscar {

void Utf8Stream::Push(std::string_view bytes, std::string* out) {
  held_.append(bytes);
  size_t at = 0;
  while (at < held_.size()) {
    const Utf8Step step = DecodeUtf8(held_, at);
    if (step.incomplete) break;
    out->append(step.valid ? std::string_view(held_).substr(at, step.length) : kReplacementUtf8);
    at += step.length;
  }
  held_.erase(0, at);
}

void Utf8Stream::Finish(std::string* out) {
  if (!held_.empty()) out->append(kReplacementUtf8);
  held_.clear();
}

std::string Detokenizer::Push(TokenId id) {
  std::string out;
  if (skip_special_ && tokenizer_->IsSpecial(id)) return out;
  stream_.Push(tokenizer_->TokenBytes(id), &out);
  return out;
}

std::string Detokenizer::Finish() {
  std::string out;
  stream_.Finish(&out);
  return out;
}

}  // namespace oscar
