// One written form for what a mathematics answer may be written as: spacing, fonts, synonyms of
// commands, units, currency and percent signs, thousands separators. Part of math_answer. Pure
// functions on text of any origin, at most kMaxMathAnswer bytes. Safe from any thread.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace oscar {

inline constexpr size_t kMaxMathAnswer = 4096;

// The spaces of TeX.
inline bool IsMathSpace(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

struct CanonicalMath {
  std::string text;
  std::string without_unit;  // text less a unit of one letter ("5 m"), which may be a variable
  std::string modulus;       // of \pmod
  bool is_words = false;     // words, not a formula
};

// `join_lists`: "1,234" is one number, not two.
CanonicalMath CanonicaliseMath(std::string_view raw, bool join_lists);

inline bool IsMathDigit(char c) { return c >= '0' && c <= '9'; }
inline bool IsMathLetter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// Without white space at the ends.
std::string_view StripSpace(std::string_view text);

// Index of the brace that closes the one at `open`; npos where none does.
size_t ClosingBrace(std::string_view text, size_t open);

// Whether three letters or more in a row make a word (letters in the order of the alphabet, as in
// abc, are a product).
bool HasWord(std::string_view text);

}  // namespace oscar
