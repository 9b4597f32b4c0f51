// UTF-8 and Unicode facts that the tokenizer and the template engine share: validation, iteration,
// normalisation form C, and the byte alphabet of byte-level vocabularies. Free functions without
// state; safe from any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace oscar {

inline constexpr char32_t kReplacementCharacter = 0xFFFD;
inline constexpr std::string_view kReplacementUtf8 = "\xEF\xBF\xBD";

// One step of a UTF-8 scan. For ill-formed input `valid` is false and `length` covers the maximal
// subpart (Unicode 15, section 3.9, table 3-8), so that one replacement character stands for it.
struct Utf8Step {
  char32_t code_point = 0;
  uint8_t length = 0;  // bytes consumed, 1..4; 0 at the end of the text
  bool valid = false;
  // The text ends inside what may yet become a character: `length` bytes, all of the rest.
  bool incomplete = false;
};
Utf8Step DecodeUtf8(std::string_view text, size_t at);

bool IsValidUtf8(std::string_view text);
// Position of the first ill-formed byte, or npos.
size_t FindInvalidUtf8(std::string_view text);
// Every maximal ill-formed part becomes U+FFFD.
std::string ReplaceInvalidUtf8(std::string_view text);
void AppendUtf8(char32_t code_point, std::string* out);
// Code points of valid UTF-8.
size_t CountCodePoints(std::string_view text);

// White_Space property: what Python's str.isspace-like trimming and the regex \s agree on, except
// for the four separators U+001C..U+001F, which only Python counts (IsPythonSpace).
bool IsUnicodeSpace(char32_t code_point);
bool IsPythonSpace(char32_t code_point);
// Letters, marks, decimal digits and connectors: \w of Unicode regular expressions.
bool IsWordCharacter(char32_t code_point);
// Python's str.isprintable for one character.
bool IsPrintable(char32_t code_point);
// Simple (one to one) case mappings.
char32_t ToUpper(char32_t code_point);
char32_t ToLower(char32_t code_point);
bool IsUpper(char32_t code_point);
bool IsLower(char32_t code_point);
bool IsAlphabetic(char32_t code_point);

// NFC of valid UTF-8, with a flag a byte carried along: a byte of the output is marked when the
// bytes it was composed from were all marked. `marks` may be null; otherwise marks->size() ==
// text->size(). Returns false when the text was already normal (and leaves it alone).
bool NormalizeNfc(std::string* text, std::vector<bool>* marks);

// GPT-2's alphabet: each byte as one printable code point, so that vocabularies are JSON text.
// Bytes '!'..'~', 0xA1..0xAC and 0xAE..0xFF stand for themselves, the other 68 for U+0100 onward.
const std::array<char32_t, 256>& ByteAlphabet();
// Reverse: -1 for a code point outside the alphabet.
int ByteOfAlphabet(char32_t code_point);

}  // namespace oscar
