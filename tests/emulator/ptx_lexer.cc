#include "emulator/ptx_lexer.h"

#include <charconv>

namespace oscar::emulator {

namespace {

bool BeginsName(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '$' || c == '%' ||
         c == '.';
}
bool IsDigit(char c) { return c >= '0' && c <= '9'; }

}  // namespace

void Lexer::SkipSpace() {
  while (at_ < text_.size()) {
    const char c = text_[at_];
    if (c == '\n') {
      ++line_;
      ++at_;
    } else if (c == ' ' || c == '\t' || c == '\r') {
      ++at_;
    } else if (text_.compare(at_, 2, "//") == 0) {
      while (at_ < text_.size() && text_[at_] != '\n') ++at_;
    } else if (text_.compare(at_, 2, "/*") == 0) {
      const size_t end = text_.find("*/", at_ + 2);
      const size_t next = end == std::string_view::npos ? text_.size() : end + 2;
      for (; at_ < next; ++at_) line_ += text_[at_] == '\n' ? 1 : 0;
    } else {
      return;
    }
  }
}

void Lexer::Advance() {
  SkipSpace();
  if (at_ >= text_.size()) {
    token_ = {Token::Kind::kEnd, text_.substr(text_.size())};
    return;
  }
  const size_t begin = at_;
  const char first = text_[at_++];
  Token::Kind kind = Token::Kind::kSign;
  if (BeginsName(first)) {
    kind = Token::Kind::kName;
    while (at_ < text_.size()) {
      if (BeginsName(text_[at_]) || IsDigit(text_[at_])) {
        ++at_;
      } else if (text_.compare(at_, 2, "::") == 0) {
        at_ += 2;
      } else {
        break;
      }
    }
  } else if (IsDigit(first)) {
    kind = Token::Kind::kNumber;
    while (at_ < text_.size() && (BeginsName(text_[at_]) || IsDigit(text_[at_]))) ++at_;
  } else if (first == '"') {
    kind = Token::Kind::kString;
    while (at_ < text_.size() && text_[at_] != '"') ++at_;
    if (at_ < text_.size()) ++at_;
  }
  token_ = {kind, text_.substr(begin, at_ - begin)};
}

bool Lexer::BeforeColon() const {
  size_t at = at_;
  while (at < text_.size() && (text_[at] == ' ' || text_[at] == '\t')) ++at;
  return at < text_.size() && text_[at] == ':';
}

std::string_view Lexer::SkipBraces() {
  const size_t begin = at_;
  int depth = 1;
  for (; at_ < text_.size() && depth > 0; ++at_) {
    const char c = text_[at_];
    depth += c == '{' ? 1 : c == '}' ? -1 : 0;
    line_ += c == '\n' ? 1 : 0;
  }
  const std::string_view inside = text_.substr(begin, at_ - begin - (depth == 0 ? 1 : 0));
  Advance();
  return inside;
}

bool ParseNumber(std::string_view text, uint64_t* bits) {
  if (text.empty() || !IsDigit(text[0])) return false;
  int base = 10;
  if (text.size() > 2 && text[0] == '0') {
    const char kind = text[1];
    if (kind == 'x' || kind == 'X' || kind == 'f' || kind == 'F' || kind == 'd' || kind == 'D') {
      base = 16;
      text.remove_prefix(2);
    }
  }
  if (base == 10 && text.ends_with('U')) text.remove_suffix(1);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *bits, base);
  return error == std::errc() && end == text.data() + text.size();
}

}  // namespace oscar::emulator
