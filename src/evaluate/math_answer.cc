#include "evaluate/math_answer.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "evaluate/math_expression.h"

namespace oscar {
namespace {

constexpr size_t kMaxAnswer = 4096;
constexpr int kMaxNesting = 8;
constexpr int kSamples = 3;
constexpr double kTolerance = 1e-9;

bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsLetter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool IsSpace(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

std::string_view Strip(std::string_view text) {
  while (!text.empty() && IsSpace(text.front())) text.remove_prefix(1);
  while (!text.empty() && IsSpace(text.back())) text.remove_suffix(1);
  return text;
}

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
    if (end < text.size() && IsLetter(text[end])) {
      at = end;
      continue;
    }
    text.replace(at, name.size(), to);
    at += to.size();
  }
}

// Index of the brace that closes the one at `open`; npos where none does.
size_t ClosingBrace(std::string_view text, size_t open) {
  int depth = 0;
  for (size_t i = open; i < text.size(); ++i) {
    if (i > 0 && text[i - 1] == '\\') continue;
    if (text[i] == '{') ++depth;
    if (text[i] == '}' && --depth == 0) return i;
  }
  return std::string_view::npos;
}

// \text{...} is the answer where it stands alone, and a unit or a remark after a formula. Returns
// whether the answer is text.
bool ResolveText(std::string& text) {
  bool is_text = false;
  for (const std::string_view name :
       {"\\text", "\\mbox", "\\textbf", "\\textit", "\\textrm", "\\mathrm", "\\mathbf", "\\mathit",
        "\\mathsf", "\\operatorname"}) {
    const std::string open = std::string(name) + "{";
    for (size_t at = text.find(open); at != std::string::npos; at = text.find(open, at)) {
      const size_t close = ClosingBrace(text, at + open.size() - 1);
      if (close == std::string::npos) break;
      const std::string inside(
          Strip(std::string_view(text).substr(at + open.size(), close - at - open.size())));
      size_t end = close + 1;
      const bool is_alone = Strip(std::string_view(text).substr(0, at)).empty();
      if (is_alone || inside == "or" || inside == "and" || name == "\\operatorname") {
        const bool joins = inside == "or" || inside == "and";
        text.replace(at, end - at, joins ? "," : inside);
        is_text |= is_alone && std::count_if(inside.begin(), inside.end(), IsLetter) > 0;
        continue;
      }
      // A unit; its power goes with it.
      if (end < text.size() && text[end] == '^') {
        ++end;
        const size_t brace =
            end < text.size() && text[end] == '{' ? ClosingBrace(text, end) : std::string::npos;
        end = brace != std::string::npos ? brace + 1 : std::min(end + 1, text.size());
      }
      text.erase(at, end - at);
    }
  }
  return is_text;
}

bool HasWord(std::string_view text) {
  int run = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\') {  // a command is no word, nor the name of an environment
      const size_t start = i + 1;
      while (i + 1 < text.size() && IsLetter(text[i + 1])) ++i;
      const std::string_view name = text.substr(start, i + 1 - start);
      if (name == "begin" || name == "end") i = std::min(text.find('}', i), text.size() - 1);
      run = 0;
      continue;
    }
    run = IsLetter(text[i]) ? run + 1 : 0;
    if (run >= 3) return true;
  }
  return false;
}

// "1,234,567" or "1{,}234" -> "1234567": groups of exactly three digits after one to three.
void JoinThousands(std::string& text) {
  ReplaceAll(text, "{,}", ",");
  size_t at = 0;
  while (at < text.size()) {
    if (!IsDigit(text[at]) || (at > 0 && (IsDigit(text[at - 1]) || text[at - 1] == '.'))) {
      ++at;
      continue;
    }
    size_t end = at;
    while (end < text.size() && IsDigit(text[end])) ++end;
    size_t next = end;
    std::vector<size_t> commas;
    while (end - at <= 3 && next + 3 < text.size() && text[next] == ',' &&
           IsDigit(text[next + 1]) && IsDigit(text[next + 2]) && IsDigit(text[next + 3]) &&
           (next + 4 >= text.size() || !IsDigit(text[next + 4]))) {
      commas.push_back(next);
      next += 4;
    }
    for (size_t i = commas.size(); i > 0; --i) text.erase(commas[i - 1], 1);
    at = next - commas.size();
    if (at < text.size()) ++at;
  }
}

struct Canonical {
  std::string text;
  bool is_text = false;  // words, not a formula
};

Canonical Canonicalise(std::string_view raw) {
  std::string text(Strip(raw.substr(0, kMaxAnswer)));
  for (const std::string_view mark : {"\\(", "\\)", "\\[", "\\]", "\\$", "\\!"}) {
    ReplaceEscape(text, mark, "");
  }
  for (const std::string_view gap : {"\\,", "\\;", "\\:", "\\ "}) ReplaceEscape(text, gap, " ");
  for (const std::string_view gap : {"\n", "\t", "~"}) ReplaceAll(text, gap, " ");
  ReplaceAll(text, "$", "");
  Canonical out;
  out.is_text = ResolveText(text);
  for (const std::string_view word : {"\\left", "\\right", "\\bigl", "\\bigr", "\\Bigl", "\\Bigr",
                                      "\\big", "\\Big", "\\displaystyle", "\\quad", "\\qquad"}) {
    ReplaceCommand(text, word, "");
  }
  ReplaceCommand(text, "\\dfrac", "\\frac");
  ReplaceCommand(text, "\\tfrac", "\\frac");
  ReplaceCommand(text, "\\cfrac", "\\frac");
  ReplaceCommand(text, "\\leq", "\\le");
  ReplaceCommand(text, "\\geq", "\\ge");
  ReplaceCommand(text, "\\neq", "\\ne");
  for (const std::string_view degree : {"^{\\circ}", "^\\circ", "\\circ", "\\degree", "°"}) {
    ReplaceAll(text, degree, "");
  }
  ReplaceAll(text, "\\%", "");
  ReplaceAll(text, "%", "");
  ReplaceAll(text, "\\lbrace", "\\{");
  ReplaceAll(text, "\\rbrace", "\\}");
  ReplaceAll(text, "−", "-");
  // One letter, or a function of one, before an equals sign names what was asked for.
  const size_t equals = text.find('=');
  if (equals != std::string::npos && text.find('=', equals + 1) == std::string::npos) {
    const std::string_view left = Strip(std::string_view(text).substr(0, equals));
    const bool is_name = left.size() == 1 && IsLetter(left[0]);
    const bool is_function = left.size() == 4 && IsLetter(left[0]) && left[1] == '(' &&
                             IsLetter(left[2]) && left[3] == ')';
    if (is_name || is_function) text.erase(0, equals + 1);
  }
  if (const size_t in = text.find("\\in");
      in != std::string::npos && in + 3 < text.size() && !IsLetter(text[in + 3]) &&
      Strip(std::string_view(text).substr(0, in)).size() == 1) {
    text.erase(0, in + 3);
  }
  text = Strip(text);
  while (!text.empty() && (text.back() == '.' || text.back() == ',')) text.pop_back();
  out.is_text |= HasWord(text);
  if (!out.is_text) JoinThousands(text);
  out.text = Strip(text);
  return out;
}

std::string TextForm(std::string_view text) {
  std::string out;
  for (char c : text) {
    if (IsSpace(c) || c == '{' || c == '}') continue;
    out += c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  }
  if (out.size() == 3 && out.front() == '(' && out.back() == ')') out = out.substr(1, 1);
  return out;
}

// Splits at `divider` outside brackets and braces.
std::vector<std::string> SplitOutside(std::string_view text, std::string_view divider) {
  std::vector<std::string> out;
  int depth = 0;
  size_t start = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '(' || c == '[' || c == '{') ++depth;
    if (c == ')' || c == ']' || c == '}') --depth;
    if (depth == 0 && text.substr(i, divider.size()) == divider &&
        (divider[0] != '\\' || i + divider.size() >= text.size() ||
         !IsLetter(text[i + divider.size()]))) {
      out.emplace_back(Strip(text.substr(start, i - start)));
      start = i + divider.size();
      i = start - 1;
    }
  }
  out.emplace_back(Strip(text.substr(start)));
  return out;
}

bool IsSameForm(const std::string& a, const std::string& b, int depth);

bool IsSameInOrder(const std::vector<std::string>& a, const std::vector<std::string>& b,
                   int depth) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!IsSameForm(a[i], b[i], depth)) return false;
  }
  return true;
}

bool IsSameSet(const std::vector<std::string>& a, std::vector<std::string> b, int depth) {
  if (a.size() != b.size()) return false;
  for (const std::string& x : a) {
    const auto found = std::find_if(b.begin(), b.end(),
                                    [&](const std::string& y) { return IsSameForm(x, y, depth); });
    if (found == b.end()) return false;
    b.erase(found);
  }
  return true;
}

// "a \pm b" is the list of both.
std::vector<std::string> ExpandSigns(std::vector<std::string> parts) {
  std::vector<std::string> out;
  for (std::string& part : parts) {
    const size_t at = part.find("\\pm");
    if (at == std::string::npos || part.find("\\pm", at + 3) != std::string::npos) {
      out.push_back(std::move(part));
      continue;
    }
    for (const char sign : {'+', '-'}) {
      std::string one = part;
      one.replace(at, 3, 1, sign);
      out.push_back(std::move(one));
    }
  }
  return out;
}

struct Bracketed {
  char open = 0, close = 0;
  std::vector<std::string> parts;  // two or more
};

// "(1, 2)", "[0, \infty)", "\{1, 2\}" as a whole.
std::optional<Bracketed> SplitBrackets(std::string_view text) {
  Bracketed out;
  if (text.size() > 4 && text.substr(0, 2) == "\\{" && text.substr(text.size() - 2) == "\\}") {
    out.open = '{', out.close = '}';
    out.parts = SplitOutside(text.substr(2, text.size() - 4), ",");
    return out;
  }
  if (text.size() < 3 || (text.front() != '(' && text.front() != '[') ||
      (text.back() != ')' && text.back() != ']')) {
    return std::nullopt;
  }
  int depth = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '(' || text[i] == '[') ++depth;
    if (text[i] == ')' || text[i] == ']') --depth;
    if (depth == 0 && i + 1 < text.size()) return std::nullopt;
  }
  out.open = text.front(), out.close = text.back();
  out.parts = SplitOutside(text.substr(1, text.size() - 2), ",");
  if (out.parts.size() < 2) return std::nullopt;
  return out;
}

// Rows of a matrix environment as a whole; its kind of bracket does not matter.
std::optional<std::vector<std::vector<std::string>>> SplitMatrix(std::string_view text) {
  constexpr std::string_view kBegin = "\\begin{";
  if (text.substr(0, kBegin.size()) != kBegin) return std::nullopt;
  const size_t name_end = text.find('}');
  if (name_end == std::string_view::npos) return std::nullopt;
  const std::string name(text.substr(kBegin.size(), name_end - kBegin.size()));
  const std::string end = "\\end{" + name + "}";
  if (name.find("matrix") == std::string::npos && name != "array") return std::nullopt;
  if (text.size() < name_end + 1 + end.size() || text.substr(text.size() - end.size()) != end) {
    return std::nullopt;
  }
  std::vector<std::vector<std::string>> rows;
  for (const std::string& row :
       SplitOutside(text.substr(name_end + 1, text.size() - end.size() - name_end - 1), "\\\\")) {
    if (!row.empty()) rows.push_back(SplitOutside(row, "&"));
  }
  return rows;
}

bool IsSameValue(const std::string& a, const std::string& b) {
  for (int sample = 0; sample < kSamples; ++sample) {
    const auto x = EvaluateMath(a, sample), y = EvaluateMath(b, sample);
    if (!x.has_value() || !y.has_value()) return false;
    const double scale = std::max({1e-12, std::abs(*x), std::abs(*y)});
    if (std::abs(*x - *y) > kTolerance * scale) return false;
  }
  return true;
}

bool IsSameForm(const std::string& a, const std::string& b, int depth) {
  if (TextForm(a) == TextForm(b)) return !TextForm(a).empty();
  if (depth >= kMaxNesting || HasWord(a) || HasWord(b)) return false;
  if (const auto x = SplitMatrix(a), y = SplitMatrix(b); x.has_value() && y.has_value()) {
    if (x->size() != y->size()) return false;
    for (size_t i = 0; i < x->size(); ++i) {
      if (!IsSameInOrder((*x)[i], (*y)[i], depth + 1)) return false;
    }
    return true;
  }
  const std::vector<std::string> union_a = SplitOutside(a, "\\cup"),
                                 union_b = SplitOutside(b, "\\cup");
  if (union_a.size() > 1 || union_b.size() > 1) return IsSameSet(union_a, union_b, depth + 1);
  if (const auto x = SplitBrackets(a), y = SplitBrackets(b); x.has_value() && y.has_value()) {
    if (x->open != y->open || x->close != y->close) return false;
    return x->open == '{' ? IsSameSet(ExpandSigns(x->parts), ExpandSigns(y->parts), depth + 1)
                          : IsSameInOrder(x->parts, y->parts, depth + 1);
  }
  const std::vector<std::string> list_a = ExpandSigns(SplitOutside(a, ",")),
                                 list_b = ExpandSigns(SplitOutside(b, ","));
  if (list_a.size() > 1 || list_b.size() > 1) return IsSameSet(list_a, list_b, depth + 1);
  const std::vector<std::string> sides_a = SplitOutside(a, "="), sides_b = SplitOutside(b, "=");
  if (sides_a.size() == 2 && sides_b.size() == 2) {
    return IsSameSet(sides_a, sides_b, depth + 1);
  }
  return IsSameValue(a, b);
}

}  // namespace

std::optional<std::string> LastBoxed(std::string_view output) {
  std::optional<std::string> out;
  for (const std::string_view name : {"\\boxed", "\\fbox"}) {
    for (size_t at = output.rfind(name); at != std::string_view::npos;
         at = at == 0 ? std::string_view::npos : output.rfind(name, at - 1)) {
      size_t open = at + name.size();
      while (open < output.size() && output[open] == ' ') ++open;
      if (open >= output.size()) continue;
      if (output[open] != '{') {  // \boxed 7
        if (!IsDigit(output[open])) continue;
        size_t end = open;
        while (end < output.size() && IsDigit(output[end])) ++end;
        return std::string(output.substr(open, end - open));
      }
      const size_t close = ClosingBrace(output, open);
      if (close == std::string_view::npos) continue;
      return std::string(Strip(output.substr(open + 1, close - open - 1)));
    }
  }
  return out;
}

std::optional<double> LastNumber(std::string_view text) {
  for (size_t end = text.size(); end > 0;) {
    while (end > 0 && !IsDigit(text[end - 1])) --end;
    if (end == 0) return std::nullopt;
    size_t start = end;
    while (start > 0 &&
           (IsDigit(text[start - 1]) || text[start - 1] == ',' || text[start - 1] == '.')) {
      --start;
    }
    std::string digits;
    for (char c : text.substr(start, end - start)) {
      if (c != ',') digits += c;
    }
    while (!digits.empty() && digits.front() == '.' && digits.size() > 1 && digits[1] == '.') {
      digits.erase(0, 1);
    }
    if (!digits.empty() && digits.front() == '.') digits.insert(0, "0");
    double value = 0;
    const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error == std::errc()) {
      // A minus belongs to the number unless it stands between two: 7-3.
      size_t sign = start;
      while (sign > 0 && text[sign - 1] == '$') --sign;
      const bool is_negative =
          sign > 0 && text[sign - 1] == '-' && (sign < 2 || !IsDigit(text[sign - 2]));
      return is_negative ? -value : value;
    }
    end = start;
  }
  return std::nullopt;
}

std::optional<std::string> FindMathAnswer(std::string_view output) {
  if (std::optional<std::string> boxed = LastBoxed(output)) return boxed;
  size_t best = std::string_view::npos;
  for (const std::string_view lead : {"answer is", "Answer:", "answer:", "Answer is"}) {
    const size_t at = output.rfind(lead);
    if (at != std::string_view::npos && (best == std::string_view::npos || at + lead.size() > best))
      best = at + lead.size();
  }
  if (best != std::string_view::npos) {
    std::string_view line = Strip(output.substr(best, output.find('\n', best) - best));
    while (!line.empty() && (line.front() == ':' || line.front() == '*')) {
      line = Strip(line.substr(1));
    }
    while (!line.empty() && (line.back() == '*' || line.back() == '.')) line.remove_suffix(1);
    if (!line.empty()) return std::string(Strip(line));
  }
  const size_t close = output.rfind('$');
  if (close != std::string_view::npos && close > 0) {
    const size_t open = output.rfind('$', close - 1);
    if (open != std::string_view::npos && close > open + 1) {
      return std::string(Strip(output.substr(open + 1, close - open - 1)));
    }
  }
  size_t end = output.size();
  while (end > 0 && !IsDigit(output[end - 1])) --end;
  size_t start = end;
  while (start > 0 && (IsDigit(output[start - 1]) || output[start - 1] == '.' ||
                       output[start - 1] == ',' || output[start - 1] == '-')) {
    --start;
  }
  if (start == end) return std::nullopt;
  return std::string(output.substr(start, end - start));
}

bool IsSameMathAnswer(std::string_view a, std::string_view b) {
  const Canonical x = Canonicalise(a), y = Canonicalise(b);
  if (x.text.empty() || y.text.empty()) return false;
  if (x.is_text || y.is_text) return TextForm(x.text) == TextForm(y.text);
  return IsSameForm(x.text, y.text, 0);
}

}  // namespace oscar
