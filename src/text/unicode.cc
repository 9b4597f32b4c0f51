#include "text/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "base/check.h"

namespace oscar {
namespace {

constexpr size_t kAlphabetEnd = 0x144;  // U+0100 + 68 shifted bytes

struct Alphabet {
  std::array<char32_t, 256> of_byte{};
  std::array<int16_t, kAlphabetEnd> to_byte{};
  constexpr Alphabet() {
    for (auto& entry : to_byte) entry = -1;
    char32_t shifted = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) ||
                             (byte >= 0xAE && byte <= 0xFF);
      const char32_t symbol = printable ? static_cast<char32_t>(byte) : shifted++;
      of_byte[byte] = symbol;
      to_byte[symbol] = static_cast<int16_t>(byte);
    }
  }
};
constexpr Alphabet kAlphabet;

const utf8proc_property_t& PropertyOf(char32_t code_point) {
  return *utf8proc_get_property(static_cast<utf8proc_int32_t>(code_point));
}

// The tokenizer libraries that vocabularies are made with normalise by the tables of Unicode 9.0:
// what came later is to them an unassigned starter that neither moves, splits nor joins. Ids have
// to be theirs, so it is to us. Later marks, compositions and their parts, as inclusive ranges.
constexpr std::array<std::pair<char32_t, char32_t>, 47> kAfterUnicode9 = {{
    {0x07FD, 0x07FD},   {0x0897, 0x089F},   {0x08CA, 0x08D3},   {0x09FE, 0x09FE},
    {0x0C3C, 0x0C3C},   {0x0D3B, 0x0D3C},   {0x0EBA, 0x0EBA},   {0x1715, 0x1715},
    {0x1ABF, 0x1ACE},   {0x1DF6, 0x1DFA},   {0xA82C, 0xA82C},   {0x10D24, 0x10D27},
    {0x10D69, 0x10D6D}, {0x10EAB, 0x10EAC}, {0x10EFC, 0x10EFF}, {0x10F46, 0x10F50},
    {0x10F82, 0x10F85}, {0x11070, 0x11070}, {0x1133B, 0x1133B}, {0x11382, 0x11391},
    {0x113B8, 0x113D0}, {0x1145E, 0x1145E}, {0x11839, 0x1183A}, {0x11930, 0x11930},
    {0x11938, 0x11938}, {0x1193D, 0x1193E}, {0x11943, 0x11943}, {0x119E0, 0x119E0},
    {0x11A34, 0x11A34}, {0x11A47, 0x11A47}, {0x11A99, 0x11A99}, {0x11D42, 0x11D42},
    {0x11D44, 0x11D45}, {0x11D97, 0x11D97}, {0x11F41, 0x11F42}, {0x1611E, 0x1612F},
    {0x16D63, 0x16D6A}, {0x16FF0, 0x16FF1}, {0x1E08F, 0x1E08F}, {0x1E130, 0x1E136},
    {0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF}, {0x1E4EC, 0x1E4EF}, {0x1E5EE, 0x1E5EF},
    {0x1E6E3, 0x1E6E3}, {0x1E6E6, 0x1E6E6}, {0x1E6EE, 0x1E6EF},
}};

bool IsAfterUnicode9(char32_t c) {
  const auto range =
      std::upper_bound(kAfterUnicode9.begin(), kAfterUnicode9.end(), c,
                       [](char32_t value, const auto& entry) { return value < entry.first; });
  return range != kAfterUnicode9.begin() && c <= std::prev(range)->second;
}

// True when NFC can neither change this character nor join it to the one before: a starter without
// a canonical decomposition that is not the second half of any composition.
bool IsNfcInert(char32_t c) {
  if (c < 0x300) return c < 0xC0;
  // Vowel and trailing jamo join the syllable before them by arithmetic, not by table. The old ones
  // do not, nor does U+11A7, the zero of that arithmetic, which utf8proc drops after a syllable.
  if (c >= 0x1161 && c <= 0x11FF) return c > 0x1175 && (c < 0x11A8 || c > 0x11C2);
  if (c >= 0xAC00 && c <= 0xD7A3) return true;
  const utf8proc_property_t& property = PropertyOf(c);
  const bool is_inert = property.combining_class == 0 &&
                        (property.decomp_seqindex == UINT16_MAX || property.decomp_type != 0) &&
                        (property.comb_index == UINT16_MAX || property.comb_index < 0x8000);
  return is_inert || IsAfterUnicode9(c);
}

// NFC of one run. Combining marks are put in order with a sort of our own: utf8proc's is quadratic
// in the length of a run, which a request could exploit.
std::string NormalizeRun(std::string_view run) {
  std::vector<utf8proc_int32_t> points;
  points.reserve(run.size() + 4);
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
  for (size_t at = 0; at < run.size();) {
    const Utf8Step step = DecodeUtf8(run, at);
    at += step.length;
    std::array<utf8proc_int32_t, 32> buffer;  // the longest canonical decomposition has 4
    int boundary = 0;
    const auto count =
        utf8proc_decompose_char(static_cast<utf8proc_int32_t>(step.code_point), buffer.data(),
                                static_cast<utf8proc_ssize_t>(buffer.size()), options, &boundary);
    OSCAR_CHECK(count >= 0 && count <= static_cast<utf8proc_ssize_t>(buffer.size()), "NFC: {}",
                utf8proc_errmsg(count));
    points.insert(points.end(), buffer.begin(), buffer.begin() + count);
  }
  const auto combining_class = [](utf8proc_int32_t c) {
    const auto stated = utf8proc_get_property(c)->combining_class;
    return stated != 0 && IsAfterUnicode9(static_cast<char32_t>(c)) ? 0 : stated;
  };
  for (auto it = points.begin(); it != points.end();) {
    if (combining_class(*it) == 0) {
      ++it;
      continue;
    }
    auto marks_end = it;
    while (marks_end != points.end() && combining_class(*marks_end) != 0) ++marks_end;
    std::stable_sort(it, marks_end, [&](utf8proc_int32_t a, utf8proc_int32_t b) {
      return combining_class(a) < combining_class(b);
    });
    it = marks_end;
  }
  const auto length = utf8proc_normalize_utf32(
      points.data(), static_cast<utf8proc_ssize_t>(points.size()), options);
  OSCAR_CHECK(length >= 0, "NFC: {}", utf8proc_errmsg(length));
  std::string out;
  out.reserve(run.size());
  for (utf8proc_ssize_t i = 0; i < length; ++i) {
    AppendUtf8(static_cast<char32_t>(points[static_cast<size_t>(i)]), &out);
  }
  return out;
}

}  // namespace

Utf8Step DecodeUtf8(std::string_view text, size_t at) {
  if (at >= text.size()) return {};
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[at + i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {lead, 1, true, false};
  int trailing = 0;
  // Bounds of the first trailing byte exclude overlong forms, surrogates and values past U+10FFFF.
  uint8_t low = 0x80, high = 0xBF;
  char32_t value = 0;
  if (lead >= 0xC2 && lead <= 0xDF) {
    trailing = 1;
    value = lead & 0x1Fu;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    trailing = 2;
    value = lead & 0x0Fu;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    trailing = 3;
    value = lead & 0x07u;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return {kReplacementCharacter, 1, false, false};
  }
  for (int i = 1; i <= trailing; ++i) {
    if (at + static_cast<size_t>(i) >= text.size()) {
      return {kReplacementCharacter, static_cast<uint8_t>(i), false, true};
    }
    const uint8_t next = byte(static_cast<size_t>(i));
    if (next < low || next > high) {
      return {kReplacementCharacter, static_cast<uint8_t>(i), false, false};
    }
    low = 0x80;
    high = 0xBF;
    value = (value << 6) | (next & 0x3Fu);
  }
  return {value, static_cast<uint8_t>(trailing + 1), true, false};
}

size_t FindInvalidUtf8(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    if (static_cast<uint8_t>(text[at]) < 0x80) {
      ++at;
      continue;
    }
    const Utf8Step step = DecodeUtf8(text, at);
    if (!step.valid) return at;
    at += step.length;
  }
  return std::string_view::npos;
}

bool IsValidUtf8(std::string_view text) { return FindInvalidUtf8(text) == std::string_view::npos; }

std::string ReplaceInvalidUtf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = DecodeUtf8(text, at);
    if (step.valid) {
      out.append(text.substr(at, step.length));
    } else {
      out.append(kReplacementUtf8);
    }
    at += step.length;
  }
  return out;
}

void AppendUtf8(char32_t c, std::string* out) {
  if (c < 0x80) {
    out->push_back(static_cast<char>(c));
  } else if (c < 0x800) {
    out->push_back(static_cast<char>(0xC0 | (c >> 6)));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else if (c < 0x10000) {
    out->push_back(static_cast<char>(0xE0 | (c >> 12)));
    out->push_back(static_cast<char>(0x80 | ((c >> 6) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else {
    out->push_back(static_cast<char>(0xF0 | (c >> 18)));
    out->push_back(static_cast<char>(0x80 | ((c >> 12) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | ((c >> 6) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  }
}

size_t CountCodePoints(std::string_view text) {
  size_t count = 0;
  for (const char c : text) count += (static_cast<uint8_t>(c) & 0xC0) != 0x80;
  return count;
}

bool IsUnicodeSpace(char32_t c) {
  if (c < 0x80) return c == ' ' || (c >= '\t' && c <= '\r');
  if (c == 0x85 || c == 0xA0) return true;
  if (c < 0x1680) return false;
  return c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
         c == 0x205F || c == 0x3000;
}

bool IsPythonSpace(char32_t c) { return IsUnicodeSpace(c) || (c >= 0x1C && c <= 0x1F); }

bool IsWordCharacter(char32_t c) {
  switch (PropertyOf(c).category) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return c == 0x200C || c == 0x200D;  // joiners
  }
}

bool IsPrintable(char32_t c) {
  if (c == ' ') return true;
  switch (PropertyOf(c).category) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return false;
    default:
      return true;
  }
}

char32_t ToUpper(char32_t c) {
  return static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(c)));
}
char32_t ToLower(char32_t c) {
  return static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c)));
}
bool IsUpper(char32_t c) {
  const auto category = PropertyOf(c).category;
  return category == UTF8PROC_CATEGORY_LU;
}
bool IsLower(char32_t c) { return PropertyOf(c).category == UTF8PROC_CATEGORY_LL; }
bool IsAlphabetic(char32_t c) {
  const auto category = PropertyOf(c).category;
  return category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO;
}

bool NormalizeNfc(std::string* text, std::vector<bool>* marks) {
  OSCAR_CHECK(marks == nullptr || marks->size() == text->size(), "one mark a byte");
  // A run that needs work starts at the last inert character before it (which the run's first
  // character may compose with) and ends before the next inert one. Nothing outside can change.
  const std::string_view in = *text;
  std::string out;
  std::vector<bool> out_marks;
  bool changed = false;
  size_t copied = 0;      // input bytes already in `out`
  size_t last_inert = 0;  // start of the latest inert character
  size_t at = 0;
  while (at < in.size()) {
    if (static_cast<uint8_t>(in[at]) < 0x80) {
      last_inert = at++;
      continue;
    }
    Utf8Step step = DecodeUtf8(in, at);
    OSCAR_DCHECK(step.valid, "NFC of ill-formed UTF-8");
    if (step.length == 0) break;
    if (IsNfcInert(step.code_point)) {
      last_inert = at;
      at += step.length;
      continue;
    }
    const size_t begin = last_inert;
    size_t end = at;
    while (end < in.size()) {
      step = DecodeUtf8(in, end);
      if (IsNfcInert(step.code_point)) break;
      end += step.length;
    }
    const std::string normal = NormalizeRun(in.substr(begin, end - begin));
    if (normal != in.substr(begin, end - begin)) {
      changed = true;
      out.append(in.substr(copied, begin - copied));
      out.append(normal);
      if (marks != nullptr) {
        bool all = true;
        for (size_t i = copied; i < begin; ++i) out_marks.push_back((*marks)[i]);
        for (size_t i = begin; i < end; ++i) all = all && (*marks)[i];
        out_marks.insert(out_marks.end(), normal.size(), all);
      }
      copied = end;
    }
    last_inert = end;
    at = end;
  }
  if (!changed) return false;
  out.append(in.substr(copied));
  if (marks != nullptr) {
    for (size_t i = copied; i < in.size(); ++i) out_marks.push_back((*marks)[i]);
    *marks = std::move(out_marks);
  }
  *text = std::move(out);
  return true;
}

const std::array<char32_t, 256>& ByteAlphabet() { return kAlphabet.of_byte; }

int ByteOfAlphabet(char32_t c) { return c < kAlphabetEnd ? kAlphabet.to_byte[c] : -1; }

}  // namespace oscar
