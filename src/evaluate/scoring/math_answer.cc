#include "scoring/math_answer.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "scoring/math_canonical.h"

namespace oscar {
namespace {

constexpr size_t kMaxLine = 1024;  // of a statement of the answer

char At(std::string_view text, size_t at) { return at < text.size() ? text[at] : '\0'; }

bool EqualsIgnoringCase(std::string_view text, std::string_view lower) {
  return text.size() == lower.size() &&
         std::equal(text.begin(), text.end(), lower.begin(), [](char a, char b) {
           return (a >= 'A' && a <= 'Z' ? static_cast<char>(a - 'A' + 'a') : a) == b;
         });
}

bool IsGroupOfThree(std::string_view text, size_t at) {
  return IsMathDigit(At(text, at)) && IsMathDigit(At(text, at + 1)) &&
         IsMathDigit(At(text, at + 2)) && !IsMathDigit(At(text, at + 3));
}

struct NumberToken {
  size_t begin = 0, end = 0;
  std::string text;       // as an expression: -1234.5, 2/5, 1 1/2, 100^{2}
  bool is_number = true;  // no: a time, a date, a version
};

// Reads tokens from left to right, each byte once.
class NumberScanner {
 public:
  explicit NumberScanner(std::string_view text) : text_(text) {}

  std::optional<NumberToken> Next() {
    while (at_ < text_.size()) {
      const bool starts =
          IsMathDigit(text_[at_]) || (text_[at_] == '.' && IsMathDigit(At(text_, at_ + 1)));
      if (!starts) {
        ++at_;
        continue;
      }
      const size_t begin = at_;
      const bool is_index = IsIndex(begin);
      NumberToken token = Read();
      if (is_index) continue;
      token.begin = begin;
      token.end = at_;
      if (IsNegative(begin)) token.text.insert(token.text.begin(), '-');
      return token;
    }
    return std::nullopt;
  }

 private:
  // The power of a unit or the index of a letter: m^2, m^{2}, x_1, cm2.
  bool IsIndex(size_t at) const {
    if (at > 1 && text_[at - 1] == '{') --at;
    if (at == 0) return false;
    if (text_[at - 1] == '^' || text_[at - 1] == '_') return true;
    size_t start = at;
    while (start > 0 && at - start < 3 && IsMathLetter(text_[start - 1])) --start;
    const std::string_view word = text_.substr(start, at - start);
    return word.size() == 1 || word == "cm" || word == "mm" || word == "km" || word == "ft" ||
           word == "in";
  }

  // A minus next to the number, before or after a currency sign, unless it stands between two.
  bool IsNegative(size_t begin) const {
    constexpr std::string_view kMinus = "−";
    std::string_view before = text_.substr(0, begin);
    const auto skip_currency = [&] {
      for (const std::string_view sign : {"\\$", "$", "€", "£"}) {
        if (before.ends_with(sign)) before.remove_suffix(sign.size());
      }
    };
    skip_currency();
    if (before.ends_with('-')) {
      before.remove_suffix(1);
    } else if (before.ends_with(kMinus)) {
      before.remove_suffix(kMinus.size());
    } else {
      return false;
    }
    const char last = before.empty() ? ' ' : before.back();
    return !IsMathDigit(last) && !IsMathLetter(last) && last != ')' && last != '-' && last != '%';
  }

  void Digits(std::string& out) {
    while (IsMathDigit(At(text_, at_))) out += text_[at_++];
  }

  // Digits with thousands separators and decimals.
  std::string Decimal() {
    std::string out;
    Digits(out);
    bool grouped = out.size() <= 3 && !out.empty();
    while (grouped) {
      grouped = false;
      for (const std::string_view mark :
           {"{,}", "\\,", ",\\!", ",", "\u00a0", "\u2009", "\u202f"}) {
        if (text_.substr(at_, mark.size()) == mark && IsGroupOfThree(text_, at_ + mark.size())) {
          at_ += mark.size();
          Digits(out);
          grouped = true;
          break;
        }
      }
    }
    if (At(text_, at_) == '.' && IsMathDigit(At(text_, at_ + 1))) {
      out += out.empty() ? "0." : ".";
      ++at_;
      Digits(out);
    }
    return out;
  }

  bool Follows(char c) const { return At(text_, at_) == c && IsMathDigit(At(text_, at_ + 1)); }

  NumberToken Read() {
    NumberToken token;
    token.text = Decimal();
    while (Follows(':') || Follows('.')) {
      token.is_number = false;
      ++at_;
      Digits(token.text);
    }
    if (token.text.find('.') == std::string::npos && Follows(' ')) {  // 1 1/2
      size_t slash = at_ + 1;
      while (IsMathDigit(At(text_, slash))) ++slash;
      if (At(text_, slash) == '/' && IsMathDigit(At(text_, slash + 1)) && slash - at_ <= 4) {
        token.text += ' ';
        ++at_;
        Digits(token.text);
      }
    }
    for (int i = 0; Follows('/'); ++i) {
      token.is_number &= i == 0;
      token.text += '/';
      ++at_;
      token.text += Decimal();
    }
    if (At(text_, at_) == '^') Exponent(token.text);
    return token;
  }

  void Exponent(std::string& out) {
    size_t next = at_ + 1;
    const bool braced = At(text_, next) == '{';
    if (braced) ++next;
    std::string digits;
    if (At(text_, next) == '-') digits += text_[next++];
    if (!IsMathDigit(At(text_, next))) return;
    at_ = next;
    Digits(digits);
    if (braced && At(text_, at_) == '}') ++at_;
    out += "^{" + digits + "}";
  }

  std::string_view text_;
  size_t at_ = 0;
};

// A formula between its delimiters.
struct Formula {
  std::string_view inside;
  size_t end = 0;  // after the closing delimiter
};

// Formulas from left to right; `visit` returns whether to go on.
template <typename Visit>
void VisitFormulas(std::string_view text, const Visit& visit) {
  size_t open = std::string_view::npos;
  char closer = '\0';  // of the open formula
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i], next = At(text, i + 1);
    if (c == '\n' && next == '\n') open = std::string_view::npos;
    if (c == '\\') {
      if (next == '(' || next == '[') {
        open = i + 2;
        closer = next == '(' ? ')' : ']';
      } else if (open != std::string_view::npos && next == closer) {
        if (!visit(Formula{StripSpace(text.substr(open, i - open)), i + 2})) return;
        open = std::string_view::npos;
      }
      ++i;
      continue;
    }
    if (c != '$') continue;
    const size_t width = next == '$' ? 2 : 1;
    const char after = At(text, i + width);
    const bool is_open = open != std::string_view::npos && closer == '$';
    // Display formulas may stand on lines of their own.
    if (is_open && (width == 2 || (!IsMathSpace(text[i - 1]) && !IsMathDigit(after)))) {
      const Formula formula{StripSpace(text.substr(open, i - open)), i + width};
      open = std::string_view::npos;
      if (!formula.inside.empty() && !visit(formula)) return;
    } else if (after != '\0' && (width == 2 || !IsMathSpace(after))) {
      open = i + width;
      closer = '$';
    }
    i += width - 1;
  }
}

// The formula that the text begins with.
std::optional<Formula> LeadingFormula(std::string_view text) {
  if (!text.starts_with('$') && !text.starts_with("\\(") && !text.starts_with("\\[")) return {};
  std::optional<Formula> out;
  VisitFormulas(text, [&](const Formula& formula) {
    const auto before = static_cast<size_t>(formula.inside.data() - text.data());
    if (StripSpace(text.substr(0, before)).size() <= 2) out = formula;
    return false;
  });
  return out;
}

std::string_view RestOfLine(std::string_view text) {
  text = text.substr(0, kMaxLine);
  return text.substr(0, text.find('\n'));
}

std::string_view SkipMarks(std::string_view text, std::string_view marks) {
  const size_t first = text.find_first_not_of(marks);
  return first == std::string_view::npos ? std::string_view() : text.substr(first);
}

// What follows the last "answer is", "Answer:" or a heading that ends with "answer", to the end of
// the output.
std::optional<std::string_view> AfterLead(std::string_view output) {
  constexpr std::string_view kLead = "answer";
  for (size_t at = output.size() < kLead.size() ? 0 : output.size() - kLead.size() + 1; at > 0;) {
    --at;
    if (!EqualsIgnoringCase(output.substr(at, kLead.size()), kLead)) continue;
    const std::string_view rest = SkipMarks(output.substr(at + kLead.size()), " \t*_");
    std::string_view stated;
    if (rest.starts_with(':') || rest.starts_with('=')) {
      stated = rest.substr(1);
    } else if (rest.starts_with("is") && !IsMathLetter(At(rest, 2))) {
      stated = rest.substr(2);
    } else {
      if (!rest.starts_with('\n')) continue;
      const size_t line = output.rfind('\n', at);
      const char first = At(output, line == std::string_view::npos ? 0 : line + 1);
      if (first != '#' && first != '*') continue;
      stated = rest;
    }
    stated = SkipMarks(stated, " \t\r\n:*_=");
    if (!stated.empty()) return stated;
  }
  return std::nullopt;
}

// One sentence of a line, without the remark that explains the answer.
std::string_view Sentence(std::string_view line) {
  for (size_t i = 0; i + 2 < line.size(); ++i) {
    if (line[i] == '.' && line[i + 1] == ' ' && line[i + 2] >= 'A' && line[i + 2] <= 'Z') {
      line = line.substr(0, i);
      break;
    }
  }
  for (const std::string_view remark : {" because ", " since ", ", which ", ", since ", " (that ",
                                        " (which ", " (since ", " (i.e", " (or ", " (because "}) {
    line = line.substr(0, line.find(remark));
  }
  const size_t last = line.find_last_not_of(" \t\r*_.");
  return last == std::string_view::npos ? std::string_view() : line.substr(0, last + 1);
}

bool HasDigit(std::string_view text) { return std::any_of(text.begin(), text.end(), IsMathDigit); }

// The number in a formula or a box: all of it where it is an expression, else the only one. The
// formula itself, which is then no number, where it holds several.
std::optional<std::string> NumberIn(std::string_view formula) {
  if (!HasDigit(formula)) return std::nullopt;
  if (IsMathExpression(formula)) return std::string(formula);
  NumberScanner scanner(formula);
  const auto first = scanner.Next();
  if (first && first->is_number && !scanner.Next()) return first->text;
  return std::string(formula);
}

// The number that begins the text, after currency signs and marks of emphasis.
std::optional<NumberToken> LeadingNumber(std::string_view text) {
  std::string_view rest = text;
  for (bool any = true; any;) {
    any = false;
    for (const std::string_view mark : {" ", "*", "_", "\\$", "$", "€", "£", "-", "−", "\\("}) {
      if (!rest.starts_with(mark)) continue;
      rest.remove_prefix(mark.size());
      any = true;
    }
  }
  if (rest.empty() || !(IsMathDigit(rest[0]) || rest[0] == '.')) return std::nullopt;
  auto token = NumberScanner(text).Next();
  const bool leads = token && token->is_number && token->begin == text.size() - rest.size();
  return leads ? token : std::nullopt;
}

// "#### 18", the mark of GSM8K's solutions: alone on its line, or on the last one. Elsewhere it is
// a heading.
std::optional<std::string> AfterMark(std::string_view output) {
  constexpr std::string_view kMark = "####";
  const size_t end = output.find_last_not_of(" \t\r\n") + 1;  // 0 where there is nothing else
  for (size_t at = output.rfind(kMark); at != std::string_view::npos;
       at = at == 0 ? std::string_view::npos : output.rfind(kMark, at - 1)) {
    const size_t start = at + kMark.size();
    const std::string_view line = RestOfLine(output.substr(start));
    const auto token = LeadingNumber(line);
    if (!token) continue;
    const std::string_view rest = line.substr(token->end);
    const bool is_alone = std::none_of(rest.begin(), rest.end(),
                                       [](char c) { return IsMathLetter(c) || IsMathDigit(c); });
    if (is_alone || start + line.size() >= end) return token->text;
  }
  return std::nullopt;
}

std::optional<std::string> NumberAfterLead(std::string_view output) {
  const auto stated = AfterLead(output);
  if (!stated) return std::nullopt;
  if (const auto formula = LeadingFormula(stated->substr(0, kMaxLine))) {
    if (auto number = NumberIn(formula->inside)) return number;
  }
  const std::string_view sentence = Sentence(RestOfLine(*stated));
  if (const auto token = LeadingNumber(sentence)) {
    // 6 x 7 = 42
    const size_t equals = sentence.rfind('=');
    if (equals != std::string_view::npos && equals > token->end) {
      if (const auto result = LeadingNumber(sentence.substr(equals + 1))) return result->text;
    }
    return token->text;
  }
  if (HasDigit(sentence) && IsMathExpression(sentence)) return std::string(sentence);
  return LastNumber(sentence);
}

}  // namespace

std::optional<std::string> LastBoxed(std::string_view output) {
  struct Brace {
    size_t open;
    bool is_box;
  };
  std::vector<Brace> braces;
  size_t best_open = 0, best_end = 0;  // inside of the box that opens last
  size_t last = 0;                     // after the last byte that is no space
  for (size_t i = 0; i < output.size(); ++i) {
    const char c = output[i];
    if (IsMathSpace(c)) continue;
    const std::string_view before = output.substr(0, last);
    last = i + 1;
    const bool starts = c == '{' || IsMathDigit(c);
    const bool is_box = starts && (before.ends_with("\\boxed") || before.ends_with("\\fbox"));
    if (c == '\\' && i + 1 < output.size() && !IsMathSpace(output[i + 1])) {
      last = ++i + 1;
    } else if (c == '{') {
      braces.push_back({i + 1, is_box});
    } else if (c == '}' && !braces.empty()) {
      const Brace brace = braces.back();
      braces.pop_back();
      if (brace.is_box && brace.open > best_open) best_open = brace.open, best_end = i;
    } else if (is_box) {  // \boxed 7
      size_t end = i;
      while (end < output.size() && IsMathDigit(output[end])) ++end;
      best_open = i, best_end = end;
      last = end;
      i = end - 1;
    }
  }
  if (best_open == 0) return std::nullopt;
  return std::string(StripSpace(output.substr(best_open, best_end - best_open)));
}

std::optional<std::string> LastNumber(std::string_view text) {
  std::optional<NumberToken> last;
  NumberScanner scanner(text);
  while (auto token = scanner.Next()) last = std::move(token);
  if (!last || !last->is_number) return std::nullopt;
  return last->text;
}

std::optional<std::string> FindMathAnswer(std::string_view output) {
  if (std::optional<std::string> boxed = LastBoxed(output)) return boxed;
  if (const auto stated = AfterLead(output)) {
    const std::string_view line = Sentence(RestOfLine(*stated));
    const auto formula = LeadingFormula(stated->substr(0, kMaxMathAnswer));
    const auto has_more = [&] {  // "$x=1$ or $x=2$"
      return formula->end < line.size() &&
             line.find_first_of("$\\", formula->end) != std::string_view::npos;
    };
    if (formula && !has_more()) return std::string(formula->inside);
    if (!line.empty()) return std::string(line);
  }
  std::optional<std::string> last;
  VisitFormulas(output, [&](const Formula& formula) {
    last = std::string(formula.inside);
    return true;
  });
  return last ? last : LastNumber(output);
}

std::optional<std::string> FindNumberAnswer(std::string_view output) {
  if (const auto boxed = LastBoxed(output)) {
    if (auto number = NumberIn(*boxed)) return number;
  }
  if (auto marked = AfterMark(output)) return marked;
  if (auto stated = NumberAfterLead(output)) return stated;
  return LastNumber(output);
}

}  // namespace oscar
