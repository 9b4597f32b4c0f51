// Tokens of PTX text.
#pragma once

#include <cstdint>
#include <string_view>

namespace oscar::emulator {

struct Token {
  enum class Kind { kName, kNumber, kString, kSign, kEnd };
  Kind kind = Kind::kEnd;
  std::string_view text;

  bool Is(char sign) const { return kind == Kind::kSign && text[0] == sign; }
  bool Is(std::string_view name) const { return kind == Kind::kName && text == name; }
};

class Lexer {
 public:
  explicit Lexer(std::string_view text, int line = 1) : text_(text), line_(line) { Advance(); }

  const Token& token() const { return token_; }
  int line() const { return line_; }
  // Where the token begins.
  size_t position() const { return static_cast<size_t>(token_.text.data() - text_.data()); }
  void Advance();
  // Whether the token after this one is a single colon: this one is a label then.
  bool BeforeColon() const;
  // From an opening brace to behind its closing one; returns what lies between.
  std::string_view SkipBraces();

 private:
  void SkipSpace();

  std::string_view text_;
  size_t at_ = 0;
  int line_;
  Token token_;
};

// "12", "0x1f", "0F3f800000", "0D...": the bits. Returns false for what is no number.
bool ParseNumber(std::string_view text, uint64_t* bits);

}  // namespace oscar::emulator
