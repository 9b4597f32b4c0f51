#include "scoring/math_canonical.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

namespace oscar {
namespace {

// Stands where text between two parts of a formula was: what is left is no expression.
constexpr char kGap = '\x01';

void ReplaceAll(std::string& text, std::string_view from, std::string_view to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
}

// Replaces a backslash and what follows it, unless the backslash is the second of a line break.
void ReplaceEscape(std::string& text, std::string_view from, std::string_view to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at)) {
    if (at > 0 && text[at - 1] == '\\') {
      ++at;
      continue;
    }
    text.replace(at, from.size(), to);
    at += to.size();
  }
}

// Replaces \name where no further letter follows.
void ReplaceCommand(std::string& text, std::string_view name, std::string_view to) {
  for (size_t at = text.find(name); at != std::string::npos; at = text.find(name, at)) {
    const size_t end = at + name.size();
    if (end < text.size() && IsMathLetter(text[end])) {
      at = end;
      continue;
    }
    text.replace(at, name.size(), to);
    at += to.size();
  }
}

// Removes \name{...}, or the name and the braces alone.
void RemoveWrapper(std::string& text, std::string_view name, bool keep_inside) {
  const std::string open = std::string(name) + "{";
  for (size_t at = text.find(open); at != std::string::npos; at = text.find(open, at)) {
    const size_t brace = at + open.size() - 1, close = ClosingBrace(text, brace);
    if (close == std::string::npos) return;
    // A group stays a group: \frac\mathbf{12}3.
    text.erase(at, keep_inside ? name.size() : close + 1 - at);
  }
}

constexpr auto kSymbols = std::to_array<std::pair<std::string_view, std::string_view>>({
    {"−", "-"},      {"×", "\\times "}, {"·", "\\cdot "}, {"÷", "\\div "},   {"≤", "\\le "},
    {"≥", "\\ge "},  {"≠", "\\ne "},    {"π", "\\pi "},   {"∞", "\\infty "}, {"∅", "\\emptyset "},
    {"∪", "\\cup "}, {"±", "\\pm "},    {"²", "^2"},      {"³", "^3"},       {"°", "^\\circ "},
    {"…", "..."},    {"\u00a0", " "},   {"\u2009", " "},  {"\u202f", " "},   {"“", ""},
    {"”", ""},       {"€", ""},
});

constexpr auto kSynonyms = std::to_array<std::pair<std::string_view, std::string_view>>({
    {"\\dfrac", "\\frac"},
    {"\\tfrac", "\\frac"},
    {"\\cfrac", "\\frac"},
    {"\\dbinom", "\\binom"},
    {"\\tbinom", "\\binom"},
    {"\\leq", "\\le"},
    {"\\leqslant", "\\le"},
    {"\\geq", "\\ge"},
    {"\\geqslant", "\\ge"},
    {"\\neq", "\\ne"},
    {"\\lt", "<"},
    {"\\gt", ">"},
    {"\\varnothing", "\\emptyset"},
    {"\\lvert", "|"},
    {"\\rvert", "|"},
    {"\\vert", "|"},
    {"\\lbrace", "\\{"},
    {"\\rbrace", "\\}"},
    {"\\lparen", "("},
    {"\\rparen", ")"},
    {"\\lbrack", "["},
    {"\\rbrack", "]"},
    {"\\ast", "*"},
    {"\\ldots", "..."},
    {"\\dots", "..."},
    {"\\cdots", "..."},
    {"\\quad", " "},
    {"\\qquad", " "},
    {"\\colon", ":"},
    {"\\tg", "\\tan"},
    {"\\land", ","},
    {"\\times", "\\cdot"},
});

constexpr auto kDecorations = std::to_array<std::string_view>(
    {"\\left",      "\\right", "\\bigl",  "\\bigr",    "\\Bigl",   "\\Bigr",
     "\\biggl",     "\\biggr", "\\big",   "\\Big",     "\\bigg",   "\\Bigg",
     "\\middle",    "\\bf",    "\\rm",    "\\it",      "\\limits", "\\displaystyle",
     "\\textstyle", "\\large", "\\Large", "\\bfseries"});

constexpr auto kFonts = std::to_array<std::string_view>(
    {"\\mathbf", "\\mathit", "\\mathsf", "\\boldsymbol", "\\bm", "\\boxed", "\\fbox", "\\underline",
     "\\mathnormal", "\\ensuremath", "\\mathstrut"});

constexpr auto kScales = std::to_array<std::pair<std::string_view, std::string_view>>({
    {"hundred", "\\cdot 10^{2}"},
    {"thousand", "\\cdot 10^{3}"},
    {"million", "\\cdot 10^{6}"},
    {"billion", "\\cdot 10^{9}"},
    {"trillion", "\\cdot 10^{12}"},
    {"dozen", "\\cdot 12"},
});

constexpr auto kUnits = std::to_array<std::string_view>(
    {"mm",      "cm",      "km",      "inch",   "inches",      "in",         "ft",
     "foot",    "feet",    "yd",      "yard",   "yards",       "mi",         "mile",
     "miles",   "meter",   "meters",  "metre",  "metres",      "mg",         "kg",
     "gram",    "grams",   "lb",      "lbs",    "pound",       "pounds",     "oz",
     "ounce",   "ounces",  "ton",     "tons",   "ml",          "mL",         "liter",
     "liters",  "litre",   "litres",  "gallon", "gallons",     "cup",        "cups",
     "sec",     "second",  "seconds", "min",    "minute",      "minutes",    "hr",
     "hrs",     "hour",    "hours",   "day",    "days",        "week",       "weeks",
     "month",   "months",  "year",    "years",  "mph",         "kmh",        "kph",
     "dollar",  "dollars", "cent",    "cents",  "USD",         "percent",    "degree",
     "degrees", "radian",  "radians", "rad",    "unit",        "units",      "square",
     "cubic",   "sq",      "per",     "times",  "centimeters", "kilometers", "millimeters",
     "people",  "ways",    "points",  "pm"});

bool IsUnit(std::string_view word) {
  return std::find(kUnits.begin(), kUnits.end(), word) != kUnits.end();
}
bool IsOneLetterUnit(std::string_view word) {
  return word.size() == 1 && std::string_view("mgshL").find(word[0]) != std::string_view::npos;
}

// The text without the units that end it; the same text where none do. They follow a number or a
// group, with a space where they have one letter.
std::string_view WithoutUnits(std::string_view text, bool one_letter) {
  std::string_view rest = text;
  bool any = false;
  for (;;) {
    std::string_view next = StripSpace(rest);
    // A power of the unit, of one digit.
    if (next.size() > 2 && IsMathDigit(next.back()) && next[next.size() - 2] == '^') {
      next.remove_suffix(2);
    } else if (next.size() > 4 && next.ends_with('}') && next.substr(next.size() - 4, 2) == "^{") {
      next.remove_suffix(4);
    }
    if (any && next.ends_with('/')) next = StripSpace(next.substr(0, next.size() - 1));
    size_t start = next.size();
    while (start > 0 && IsMathLetter(next[start - 1])) --start;
    const std::string_view word = next.substr(start);
    const bool is_command = start > 0 && next[start - 1] == '\\';
    const bool spaced = start > 0 && (next[start - 1] == ' ' || next[start - 1] == '/');
    if (is_command || !(IsUnit(word) || (one_letter && spaced && IsOneLetterUnit(word)))) break;
    rest = next.substr(0, start);
    any = true;
  }
  if (!any) return text;
  rest = StripSpace(rest);
  if (rest.ends_with('/')) rest.remove_suffix(1);
  rest = StripSpace(rest);
  const bool follows = !rest.empty() && (IsMathDigit(rest.back()) || rest.back() == '}' ||
                                         rest.back() == ')' || rest.ends_with("\\pi"));
  return follows ? rest : text;
}

// "5 million" -> "5 \cdot 10^{6}".
void ResolveScales(std::string& text) {
  for (const auto& [word, power] : kScales) {
    for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
      const size_t end = at + word.size();
      if (end < text.size() && IsMathLetter(text[end])) continue;
      size_t before = at;
      while (before > 0 && text[before - 1] == ' ') --before;
      if (before == at || before == 0 || !IsMathDigit(text[before - 1])) continue;
      text.replace(at, word.size(), power);
    }
  }
}

// Whether what stands at `at` would go on a formula without a sign between.
bool StartsOperand(std::string_view text, size_t at) {
  while (at < text.size() && IsMathSpace(text[at])) ++at;
  if (at >= text.size()) return false;
  if (IsMathDigit(text[at]) || IsMathLetter(text[at]) || text[at] == '.') return true;
  for (const std::string_view name : {"\\frac", "\\dfrac", "\\sqrt", "\\pi"}) {
    if (text.substr(at, name.size()) == name) return true;
  }
  return false;
}

// \text{...} is the answer where it stands alone, and a unit or a remark after a formula. Returns
// whether the answer is text.
bool ResolveText(std::string& text) {
  bool is_words = false;
  for (const std::string_view name : {"\\text", "\\mbox", "\\textbf", "\\textit", "\\textrm",
                                      "\\textnormal", "\\mathrm", "\\operatorname"}) {
    const std::string open = std::string(name) + "{";
    for (size_t at = text.find(open); at != std::string::npos; at = text.find(open, at)) {
      const size_t close = ClosingBrace(text, at + open.size() - 1);
      if (close == std::string::npos) break;
      const std::string inside(
          StripSpace(std::string_view(text).substr(at + open.size(), close - at - open.size())));
      size_t end = close + 1;
      const bool is_alone = StripSpace(std::string_view(text).substr(0, at)).empty();
      const bool joins = inside == "or" || inside == "and" || inside == "," || inside == ", and";
      const bool is_constant = name == "\\mathrm" && (inside == "i" || inside == "e");
      const auto scale = std::find_if(kScales.begin(), kScales.end(), [&](const auto& s) {
        return std::string_view(inside).substr(0, s.first.size()) == s.first;
      });
      if (joins || scale != kScales.end()) {
        text.replace(at, end - at, joins ? "," : scale->second);
        continue;
      }
      if (is_alone || is_constant || name == "\\operatorname") {
        text.replace(at, end - at, inside);
        is_words |= is_alone && !is_constant &&
                    std::count_if(inside.begin(), inside.end(), IsMathLetter) > 0;
        continue;
      }
      // A unit; its power goes with it.
      if (end < text.size() && text[end] == '^') {
        ++end;
        const size_t brace =
            end < text.size() && text[end] == '{' ? ClosingBrace(text, end) : std::string::npos;
        end = brace != std::string::npos ? brace + 1 : std::min(end + 1, text.size());
      }
      text.replace(at, end - at, StartsOperand(text, end) ? 1 : 0, kGap);
    }
  }
  ReplaceAll(text, "\\frac{}{}", "");  // of two units
  return is_words;
}

// "0.333..." -> "0.33\overline{3}": one digit three times or more at the end of the decimals.
void ResolveEllipsis(std::string& text) {
  if (!text.ends_with("...")) return;
  size_t end = text.size();
  while (end > 0 && text[end - 1] == '.') --end;
  size_t start = end;
  while (start > 0 && IsMathDigit(text[start - 1])) --start;
  if (end - start < 3 || start == 0 || text[start - 1] != '.') return;
  const char digit = text[end - 1];
  if (text[end - 2] != digit || text[end - 3] != digit) return;
  text.resize(end - 1);
  text += std::string("\\overline{") + digit + "}";
}

// A degree sign is kept apart from a composition of functions.
void ResolveDegrees(std::string& text) {
  for (const std::string_view form : {"^{\\circ}", "^\\circ", "^{\\degree}", "^\\degree"}) {
    ReplaceAll(text, form, "\\degree ");
  }
  constexpr std::string_view kCircle = "\\circ";
  for (size_t at = text.find(kCircle); at != std::string::npos; at = text.find(kCircle, at + 1)) {
    size_t before = at;
    while (before > 0 && text[before - 1] == ' ') --before;
    if (before > 0 && IsMathDigit(text[before - 1])) text.replace(at, kCircle.size(), "\\degree ");
  }
}

std::string TakeModulus(std::string& text) {
  for (const std::string_view name : {"\\pmod", "\\bmod", "\\mod", "(mod "}) {
    const size_t at = text.find(name);
    if (at == std::string::npos || at == 0) continue;
    std::string modulus;
    for (char c : std::string_view(text).substr(at + name.size())) {
      if (!IsMathSpace(c) && c != '{' && c != '}' && c != '(' && c != ')') modulus += c;
    }
    text.resize(at);
    ReplaceCommand(text, "\\equiv", "=");
    return modulus;
  }
  return {};
}

// "1,234,567", "1{,}234" or "1 234" -> digits alone: groups of exactly three after one to three. A
// bare comma inside brackets divides what they hold.
void JoinThousands(std::string& text, bool join_lists) {
  const auto is_group = [&](size_t at) {
    return at + 2 < text.size() && IsMathDigit(text[at]) && IsMathDigit(text[at + 1]) &&
           IsMathDigit(text[at + 2]) && (at + 3 >= text.size() || !IsMathDigit(text[at + 3]));
  };
  std::string out;
  int depth = 0;
  for (size_t at = 0; at < text.size();) {
    const char c = text[at];
    const bool escaped = at > 0 && text[at - 1] == '\\';
    if (c == '(' || c == '[' || (c == '{' && escaped)) ++depth;
    if (c == ')' || c == ']' || (c == '}' && escaped)) --depth;
    if (!IsMathDigit(c) || (at > 0 && text[at - 1] == '.')) {
      out += c;
      ++at;
      while (!out.empty() && out.back() == '.' && at < text.size() && IsMathDigit(text[at])) {
        // The decimals of a number are no first group.
        while (at < text.size() && IsMathDigit(text[at])) out += text[at++];
      }
      continue;
    }
    size_t end = at;
    while (end < text.size() && IsMathDigit(text[end])) ++end;
    out.append(text, at, end - at);
    std::string_view divider;
    for (const std::string_view mark : {"{,}", ",", " "}) {
      if (mark == "," && (!join_lists || depth > 0)) continue;
      if (end - at <= 3 && std::string_view(text).substr(end, mark.size()) == mark &&
          is_group(end + mark.size())) {
        divider = mark;
      }
    }
    at = end;
    while (!divider.empty() && std::string_view(text).substr(at, divider.size()) == divider &&
           is_group(at + divider.size())) {
      out.append(text, at + divider.size(), 3);
      at += divider.size() + 3;
    }
  }
  text = std::move(out);
}

// Words before the only equals sign name what was asked for.
void StripWords(std::string& text) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos || text.find('=', equals + 1) != std::string::npos) return;
  const std::string_view left = StripSpace(std::string_view(text).substr(0, equals));
  if (HasWord(left) && std::all_of(left.begin(), left.end(),
                                   [](char c) { return IsMathLetter(c) || IsMathSpace(c); })) {
    text.erase(0, equals + 1);
  }
}

}  // namespace

std::string_view StripSpace(std::string_view text) {
  while (!text.empty() && IsMathSpace(text.front())) text.remove_prefix(1);
  while (!text.empty() && IsMathSpace(text.back())) text.remove_suffix(1);
  return text;
}

size_t ClosingBrace(std::string_view text, size_t open) {
  int depth = 0;
  for (size_t i = open; i < text.size(); ++i) {
    if (text[i] == '\\') {
      ++i;
      continue;
    }
    if (text[i] == '{') ++depth;
    if (text[i] == '}' && --depth == 0) return i;
  }
  return std::string_view::npos;
}

bool HasWord(std::string_view text) {
  size_t run = 0;
  bool in_order = true;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\') {  // a command is no word, nor the name of an environment
      const size_t start = i + 1;
      while (i + 1 < text.size() && IsMathLetter(text[i + 1])) ++i;
      const std::string_view name = text.substr(start, i + 1 - start);
      if (name == "begin" || name == "end") i = std::min(text.find('}', i), text.size() - 1);
      run = 0;
      in_order = true;
      continue;
    }
    if (!IsMathLetter(text[i])) {
      if (run >= 3 && !in_order) return true;
      run = 0;
      in_order = true;
      continue;
    }
    if (run > 0 && text[i] != text[i - 1] + 1) in_order = false;
    ++run;
  }
  return run >= 3 && !in_order;
}

CanonicalMath CanonicaliseMath(std::string_view raw, bool join_lists) {
  std::string text(StripSpace(raw.substr(0, kMaxMathAnswer)));
  for (const auto& [symbol, command] : kSymbols) ReplaceAll(text, symbol, command);
  for (const std::string_view mark : {"\\(", "\\)", "\\[", "\\]", "\\$"}) {
    ReplaceEscape(text, mark, "");
  }
  for (const std::string_view gap : {"\\,", "\\;", "\\:", "\\ "}) ReplaceEscape(text, gap, " ");
  for (const std::string_view gap : {"\n", "\t", "\r", "~"}) ReplaceAll(text, gap, " ");
  ReplaceAll(text, "$", "");
  ReplaceAll(text, ",\\! ", ",\\!");
  ReplaceAll(text, ",\\!", "{,}");  // how MATH writes a thousands separator
  ReplaceEscape(text, "\\!", "");
  for (const std::string_view name : {"\\phantom", "\\hphantom", "\\vphantom", "\\color",
                                      "\\textcolor", "\\hspace", "\\tag", "\\label"}) {
    RemoveWrapper(text, name, /*keep_inside=*/false);
  }
  for (const std::string_view name : kFonts) RemoveWrapper(text, name, /*keep_inside=*/true);
  CanonicalMath out;
  out.is_words = ResolveText(text);
  for (const std::string_view word : kDecorations) ReplaceCommand(text, word, "");
  for (const auto& [from, to] : kSynonyms) ReplaceCommand(text, from, to);
  for (const std::string_view empty : {"\\{\\}", "\\{ \\}"}) ReplaceAll(text, empty, "\\emptyset ");
  ResolveDegrees(text);
  ReplaceAll(text, "\\%", "");
  ReplaceAll(text, "%", "");
  out.modulus = TakeModulus(text);
  if (const size_t in = text.find("\\in");
      in != std::string::npos && in + 3 < text.size() && !IsMathLetter(text[in + 3]) &&
      StripSpace(std::string_view(text).substr(0, in)).size() == 1) {
    text.erase(0, in + 3);
  }
  text = std::string(StripSpace(text));
  while (text.ends_with("\\\\"))
    text = std::string(StripSpace(std::string_view(text).substr(0, text.size() - 2)));
  ResolveEllipsis(text);
  while (!text.empty() && (text.back() == '.' || text.back() == ',' || text.back() == ';')) {
    text.pop_back();
  }
  ResolveScales(text);
  StripWords(text);
  text = std::string(StripSpace(WithoutUnits(text, /*one_letter=*/false)));
  out.is_words |= HasWord(text);
  if (!out.is_words) JoinThousands(text, join_lists);
  out.text = StripSpace(text);
  const std::string_view bare = WithoutUnits(out.text, /*one_letter=*/true);
  if (bare != out.text) out.without_unit = bare;
  return out;
}

}  // namespace oscar
