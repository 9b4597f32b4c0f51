#include "toolcall/json_scanner.h"

#include "base/json.h"

namespace oscar {

void JsonScanner::Start(size_t at) {
  *this = JsonScanner();
  at_ = at;
}

JsonScanner::State JsonScanner::Scan(std::string_view text) {
  while (state_ == State::kMore && at_ < text.size()) {
    if (!Take(text[at_++])) state_ = State::kBroken;
  }
  return state_;
}

bool JsonScanner::Take(char c) {
  if (in_string_) {
    if (static_cast<unsigned char>(c) < 0x20) return false;
    const bool ends = c == '"' && !escaped_;
    escaped_ = c == '\\' && !escaped_;
    if (!ends) {
      if (is_key_ && open_.size() == 1) key_ += c;
      return true;
    }
    in_string_ = false;
    if (is_key_ && open_.size() == 1) keys_.push_back(std::move(key_));
    expect_ = is_key_ ? Expect::kColon : Expect::kCommaOrEnd;
    return true;
  }
  const bool is_word = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || c == '-' || c == '+' ||
                       c == '.' || c == 'E';
  if (in_word_ && is_word) return true;
  in_word_ = false;
  if (c == ' ' || c == '\t' || c == '\n' || c == '\r') return true;

  const bool wants_value = expect_ == Expect::kValue || expect_ == Expect::kValueOrEnd;
  switch (c) {
    case '"':
      if (open_.empty()) return false;  // no object
      is_key_ = expect_ == Expect::kKey || expect_ == Expect::kKeyOrEnd;
      if (!is_key_ && !wants_value) return false;
      in_string_ = true;
      key_.clear();
      return true;
    case '{':
    case '[':
      if (!wants_value || (open_.empty() && c == '[')) return false;
      if (open_.size() >= static_cast<size_t>(kMaxJsonDepth)) return false;
      open_.push_back(c);
      expect_ = c == '{' ? Expect::kKeyOrEnd : Expect::kValueOrEnd;
      return true;
    case '}':
    case ']': {
      const char opened = c == '}' ? '{' : '[';
      if (open_.empty() || open_.back() != opened) return false;
      const Expect empty = c == '}' ? Expect::kKeyOrEnd : Expect::kValueOrEnd;
      if (expect_ != Expect::kCommaOrEnd && expect_ != empty) return false;
      open_.pop_back();
      expect_ = Expect::kCommaOrEnd;
      if (open_.empty()) state_ = State::kDone;
      return true;
    }
    case ',':
      if (expect_ != Expect::kCommaOrEnd) return false;
      expect_ = open_.back() == '{' ? Expect::kKey : Expect::kValue;
      return true;
    case ':':
      if (expect_ != Expect::kColon) return false;
      expect_ = Expect::kValue;
      return true;
    default:
      if (!is_word || !wants_value || open_.empty()) return false;
      in_word_ = true;
      expect_ = Expect::kCommaOrEnd;
      return true;
  }
}

}  // namespace oscar
