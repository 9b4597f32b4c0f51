#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "scoring/math_answer.h"
#include "scoring/math_canonical.h"
#include "scoring/math_expression.h"

namespace oscar {
namespace {

constexpr int kMaxNesting = 8;
constexpr int kMinPoints = 3;

// What one comparison may read: comparing lists reads every pair. [bytes of expressions]
class Work {
 public:
  bool Spend(size_t bytes) {
    left_ -= static_cast<int64_t>(bytes) + kPerStep;
    return left_ > 0;
  }

 private:
  static constexpr int64_t kPerStep = 16;
  int64_t left_ = int64_t{1} << 20;
};

std::string LowerWords(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    for (const std::string_view joint : {" and ", " or "}) {
      if (text.substr(i, joint.size()) == joint) {
        if (out.empty() || out.back() != ',') out += ',';
        i += joint.size() - 1;
        break;
      }
    }
    const char c = text[i];
    if (c == ' ' || c == '{' || c == '}') continue;
    out += c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  }
  if (out.size() == 3 && out.front() == '(' && out.back() == ')') out = out.substr(1, 1);
  return out;
}

// The text without the spaces that mean nothing: all but those between two numbers and at the end
// of a command's name.
std::string Compact(std::string_view text) {
  std::string out;
  bool in_command = false, space = false;
  for (size_t i = 0; i < text.size(); ++i) {
    char c = text[i];
    if (c == '{' && i + 2 < text.size() && text[i + 2] == '}' && text[i + 1] != '\\' &&
        !out.empty() && (out.back() == '_' || out.back() == '^')) {
      c = text[i + 1];
      i += 2;
    }
    if (c == ' ') {
      space = true;
      continue;
    }
    if (space && !out.empty() &&
        ((IsMathDigit(out.back()) && IsMathDigit(c)) || (in_command && IsMathLetter(c)))) {
      out += ' ';
      in_command = false;
    }
    space = false;
    in_command = c == '\\' || (in_command && IsMathLetter(c));
    out += c;
  }
  return out;
}

// Calls visit(i) for every index outside brackets and braces; visit returns how many bytes it took.
template <typename Visit>
void VisitOutside(std::string_view text, const Visit& visit) {
  int depth = 0;
  for (size_t i = 0; i < text.size();) {
    const char c = text[i];
    if (c == '(' || c == '[' || c == '{') ++depth;
    if (c == ')' || c == ']' || c == '}') --depth;
    const size_t taken = depth == 0 ? visit(i) : 0;
    i += std::max<size_t>(taken, 1);
  }
}

bool StandsAt(std::string_view text, size_t at, std::string_view token) {
  if (text.substr(at, token.size()) != token) return false;
  const size_t end = at + token.size();
  return token[0] != '\\' || !IsMathLetter(token.back()) || end >= text.size() ||
         !IsMathLetter(text[end]);
}

std::vector<std::string> SplitOutside(std::string_view text, std::string_view divider) {
  std::vector<std::string> out;
  size_t start = 0;
  VisitOutside(text, [&](size_t i) -> size_t {
    if (!StandsAt(text, i, divider)) return 0;
    out.emplace_back(StripSpace(text.substr(start, i - start)));
    start = i + divider.size();
    return divider.size();
  });
  out.emplace_back(StripSpace(text.substr(start)));
  return out;
}

// a < b <= c: sides and what stands between them. One side where there is no relation.
struct Chain {
  std::vector<std::string> sides;
  std::vector<std::string> relations;

  bool HasOnly(std::string_view relation) const {
    return !relations.empty() && std::all_of(relations.begin(), relations.end(),
                                             [&](const std::string& r) { return r == relation; });
  }
  // Written from the smaller to the larger side.
  void Ascend() {
    if (!std::all_of(relations.begin(), relations.end(),
                     [](const std::string& r) { return r == ">" || r == "\\ge"; })) {
      return;
    }
    std::reverse(sides.begin(), sides.end());
    std::reverse(relations.begin(), relations.end());
    for (std::string& r : relations) r = r == ">" ? "<" : "\\le";
  }
};

Chain SplitRelations(std::string_view text) {
  Chain out;
  size_t start = 0;
  VisitOutside(text, [&](size_t i) -> size_t {
    for (const std::string_view relation : {"=", "<", ">", "\\le", "\\ge", "\\ne"}) {
      if (!StandsAt(text, i, relation)) continue;
      out.sides.emplace_back(StripSpace(text.substr(start, i - start)));
      out.relations.emplace_back(relation);
      start = i + relation.size();
      return relation.size();
    }
    return 0;
  });
  out.sides.emplace_back(StripSpace(text.substr(start)));
  return out;
}

enum class NameKind { kNone, kLetter, kFunction };

// What may stand before an equals sign as the name of what was asked for: x, x_1, \theta, AB, f(x),
// f^{-1}(x), (x, y).
NameKind KindOfName(std::string_view text) {
  size_t at = 0;
  const auto skip_group = [&](char open, char close) {
    if (at >= text.size() || text[at] != open) return;
    const size_t end = text.find(close, at);
    if (end != std::string_view::npos) at = end + 1;
  };
  if (text.empty()) return NameKind::kNone;
  if (text.front() == '(') {
    const bool letters = text.back() == ')' && std::all_of(text.begin(), text.end(), [](char c) {
                           return IsMathLetter(c) || c == ',' || c == ' ' || c == '(' || c == ')';
                         });
    return letters ? NameKind::kFunction : NameKind::kNone;
  }
  const size_t backslash = text.front() == '\\' ? 1 : 0;
  at = backslash;
  while (at < text.size() && IsMathLetter(text[at])) ++at;
  const std::string_view word = text.substr(backslash, at - backslash);
  const bool is_segment = word.size() == 2 && word[0] <= 'Z' && word[1] <= 'Z';
  if (word.empty() || (backslash == 0 && word.size() > 1 && !is_segment)) return NameKind::kNone;
  if (backslash == 1 && (word == "sqrt" || word == "frac")) return NameKind::kNone;
  if (at < text.size() && text[at] == '_') {
    ++at;
    if (at < text.size() && text[at] != '{') ++at;
    skip_group('{', '}');
  }
  if (at == text.size()) return NameKind::kLetter;
  if (text.substr(at, 5) == "^{-1}") at += 5;
  const size_t bracket = at;
  skip_group('(', ')');
  return at > bracket && at == text.size() ? NameKind::kFunction : NameKind::kNone;
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

// The parts of a list; of a set, whose braces do not matter.
std::vector<std::string> ListOf(std::string_view text) {
  if (text.size() > 4 && text.starts_with("\\{") && text.ends_with("\\}") &&
      text.find("\\}") == text.size() - 2) {
    text = text.substr(2, text.size() - 4);
  }
  return ExpandSigns(SplitOutside(text, ","));
}

struct Bracketed {
  char open = 0, close = 0;
  std::vector<std::string> parts;  // two or more
};

// "(1, 2)", "[0, \infty)" as a whole.
std::optional<Bracketed> SplitBrackets(std::string_view text) {
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
  Bracketed out{text.front(), text.back(), SplitOutside(text.substr(1, text.size() - 2), ",")};
  if (out.parts.size() < 2) return std::nullopt;
  return out;
}

using Matrix = std::vector<std::vector<std::string>>;

// Rows of a matrix environment as a whole; its kind of bracket does not matter.
std::optional<Matrix> SplitMatrix(std::string_view text) {
  constexpr std::string_view kBegin = "\\begin{";
  // An array is written inside brackets of its own.
  if (text.size() > 2 && (text.front() == '(' || text.front() == '[') &&
      (text.back() == ')' || text.back() == ']')) {
    text = StripSpace(text.substr(1, text.size() - 2));
  }
  if (!text.starts_with(kBegin)) return std::nullopt;
  const size_t name_end = text.find('}');
  if (name_end == std::string_view::npos) return std::nullopt;
  const std::string name(text.substr(kBegin.size(), name_end - kBegin.size()));
  if (name.find("matrix") == std::string::npos && name != "array") return std::nullopt;
  const std::string end = "\\end{" + name + "}";
  if (text.size() < name_end + 1 + end.size() || !text.ends_with(end)) return std::nullopt;
  std::string_view inside = text.substr(name_end + 1, text.size() - end.size() - name_end - 1);
  if (name == "array" && StripSpace(inside).starts_with('{')) {  // the columns' alignment
    inside = inside.substr(std::min(inside.find('}'), inside.size() - 1) + 1);
  }
  Matrix rows;
  for (const std::string& row : SplitOutside(inside, "\\\\")) {
    if (!row.empty()) rows.push_back(SplitOutside(row, "&"));
  }
  return rows;
}

class Comparison {
 public:
  bool IsSame(std::string_view a, std::string_view b, int depth);

 private:
  bool IsSameInOrder(const std::vector<std::string>& a, const std::vector<std::string>& b,
                     int depth) {
    if (a.size() != b.size()) return false;
    for (size_t i = 0; i < a.size(); ++i) {
      if (!IsSame(a[i], b[i], depth)) return false;
    }
    return true;
  }

  bool IsSameSet(const std::vector<std::string>& a, std::vector<std::string> b, int depth) {
    if (a.size() != b.size()) return false;
    for (const std::string& x : a) {
      const auto found = std::find_if(b.begin(), b.end(),
                                      [&](const std::string& y) { return IsSame(x, y, depth); });
      if (found == b.end()) return false;
      b.erase(found);
    }
    return true;
  }

  std::optional<MathValue> Evaluate(const std::string& text, int point) {
    return work_.Spend(text.size()) ? EvaluateMath(text, point) : std::nullopt;
  }

  bool IsSameValue(const std::string& a, const std::string& b);
  bool IsProportional(const Chain& a, const Chain& b, bool sign_matters);
  bool IsSameChain(Chain a, Chain b, int depth);
  bool StatesValue(const Chain& chain, const std::string& value, int depth);
  std::optional<std::string> TakeName(std::vector<std::string>& parts);

  Work work_;
};

// The same at every point where both are real; at every point where they are nowhere.
bool Comparison::IsSameValue(const std::string& a, const std::string& b) {
  int points = 0, same = 0, real_points = 0, real_same = 0;
  for (int point = 0; point < kMathPoints; ++point) {
    const auto x = Evaluate(a, point), y = Evaluate(b, point);
    if (!x || !y) return false;
    const bool is_same = IsSameMathValue(*x, *y);
    if (!x->has_letters && !y->has_letters) return is_same;
    if (!x->is_defined || !y->is_defined) continue;
    ++points;
    same += is_same ? 1 : 0;
    if (x->leaves_reals || y->leaves_reals) continue;
    ++real_points;
    real_same += is_same ? 1 : 0;
    if (!is_same && real_points >= kMinPoints) return false;
  }
  if (real_points >= kMinPoints) return real_same == real_points;
  return points >= kMinPoints && same == points;
}

// Whether one equation is the other times a constant.
bool Comparison::IsProportional(const Chain& a, const Chain& b, bool sign_matters) {
  const auto difference = [](const Chain& c) {
    return "((" + c.sides[0] + ")-(" + c.sides[1] + "))";
  };
  const std::string over = difference(b), ratio = difference(a) + "/" + over;
  std::optional<MathValue> first, first_over;
  int points = 0;
  bool varies = false;
  for (int point = 0; point < kMathPoints; ++point) {
    const auto x = Evaluate(ratio, point), y = Evaluate(over, point);
    if (!x || !y || !y->has_letters) return false;
    if (!x->is_defined || !y->is_defined || x->leaves_reals) continue;
    ++points;
    if (!first) {
      first = x, first_over = y;
      if (x->exact == uint64_t{0} || std::abs(x->value) <= 4 * x->error) return false;
      if (sign_matters && !(x->value.real() > 0.0)) return false;
      continue;
    }
    if (!IsSameMathValue(*first, *x)) return false;
    varies |= !IsSameMathValue(*first_over, *y);
  }
  return points >= kMinPoints && varies;
}

bool Comparison::IsSameChain(Chain a, Chain b, int depth) {
  a.Ascend();
  b.Ascend();
  if (a.relations != b.relations) return false;
  if (a.sides.size() > 2) return IsSameInOrder(a.sides, b.sides, depth);
  const std::string& relation = a.relations[0];
  const bool symmetric = relation == "=" || relation == "\\ne";
  if (IsProportional(a, b, !symmetric)) return true;
  if (!symmetric) return IsSameInOrder(a.sides, b.sides, depth);
  if (IsSameSet(a.sides, b.sides, depth)) return true;
  // y = ... and f(x) = ... ask for the same.
  const NameKind x = KindOfName(a.sides[0]), y = KindOfName(b.sides[0]);
  return x != NameKind::kNone && y != NameKind::kNone && x != y &&
         IsSame(a.sides[1], b.sides[1], depth);
}

// "x = 5" and "2 + 3 = 5" state 5.
bool Comparison::StatesValue(const Chain& chain, const std::string& value, int depth) {
  if (!chain.HasOnly("=")) return false;
  std::vector<std::string> sides = chain.sides;
  if (KindOfName(sides.front()) != NameKind::kNone) {
    sides.erase(sides.begin());
  } else if (KindOfName(sides.back()) != NameKind::kNone) {
    sides.pop_back();
  }
  return std::all_of(sides.begin(), sides.end(),
                     [&](const std::string& side) { return IsSame(side, value, depth); });
}

// Strips "x =" from the parts of a list that have it, where all name the same.
std::optional<std::string> Comparison::TakeName(std::vector<std::string>& parts) {
  std::optional<std::string> name;
  std::vector<std::string> out = parts;
  for (std::string& part : out) {
    const Chain chain = SplitRelations(part);
    if (chain.relations.empty()) continue;
    if (chain.sides.size() != 2 || chain.relations[0] != "=" ||
        KindOfName(chain.sides[0]) == NameKind::kNone || (name && *name != chain.sides[0])) {
      return std::nullopt;
    }
    name = chain.sides[0];
    part = chain.sides[1];
  }
  if (name) parts = std::move(out);
  return name;
}

bool Comparison::IsSame(std::string_view a, std::string_view b, int depth) {
  const auto unwrap = [](std::string_view text) {
    text = StripSpace(text);
    while (text.size() > 2 && text.front() == '{' && ClosingBrace(text, 0) == text.size() - 1) {
      text = StripSpace(text.substr(1, text.size() - 2));
    }
    return text;
  };
  if (!work_.Spend(a.size() + b.size())) return false;
  a = unwrap(a), b = unwrap(b);
  if (a.empty() || b.empty()) return false;
  if (Compact(a) == Compact(b)) return true;
  if (depth >= kMaxNesting || HasWord(a) || HasWord(b)) return false;
  if (const auto x = SplitMatrix(a), y = SplitMatrix(b); x && y) {
    if (x->size() != y->size()) return false;
    for (size_t i = 0; i < x->size(); ++i) {
      if (!IsSameInOrder((*x)[i], (*y)[i], depth + 1)) return false;
    }
    return true;
  }
  const std::vector<std::string> union_a = SplitOutside(a, "\\cup"),
                                 union_b = SplitOutside(b, "\\cup");
  if (union_a.size() > 1 || union_b.size() > 1) return IsSameSet(union_a, union_b, depth + 1);
  if (const auto x = SplitBrackets(a), y = SplitBrackets(b); x && y) {
    return x->open == y->open && x->close == y->close &&
           IsSameInOrder(x->parts, y->parts, depth + 1);
  }
  std::vector<std::string> list_a = ListOf(a), list_b = ListOf(b);
  if (list_a.size() > 1 || list_b.size() > 1 || list_a[0] != a || list_b[0] != b) {
    const auto name_a = TakeName(list_a), name_b = TakeName(list_b);
    return (!name_a || !name_b || *name_a == *name_b) && IsSameSet(list_a, list_b, depth + 1);
  }
  const Chain chain_a = SplitRelations(a), chain_b = SplitRelations(b);
  if (!chain_a.relations.empty() && !chain_b.relations.empty()) {
    return IsSameChain(chain_a, chain_b, depth + 1);
  }
  if (!chain_a.relations.empty()) return StatesValue(chain_a, list_b[0], depth + 1);
  if (!chain_b.relations.empty()) return StatesValue(chain_b, list_a[0], depth + 1);
  return IsSameValue(list_a[0], list_b[0]);
}

bool HasLetter(std::string_view text) {
  return std::any_of(text.begin(), text.end(), IsMathLetter);
}

bool IsSameCanonical(const CanonicalMath& x, const CanonicalMath& y) {
  if (x.text.empty() || y.text.empty()) return false;
  if (!x.modulus.empty() && !y.modulus.empty() && x.modulus != y.modulus) return false;
  if (x.is_words || y.is_words) return LowerWords(x.text) == LowerWords(y.text);
  if (Comparison().IsSame(x.text, y.text, 0)) return true;
  if (!x.without_unit.empty() && !HasLetter(y.text)) {
    return Comparison().IsSame(x.without_unit, y.text, 0);
  }
  if (!y.without_unit.empty() && !HasLetter(x.text)) {
    return Comparison().IsSame(x.text, y.without_unit, 0);
  }
  return false;
}

}  // namespace

bool IsSameMathAnswer(std::string_view a, std::string_view b) {
  a = StripSpace(a), b = StripSpace(b);
  if (a.size() > kMaxMathAnswer || b.size() > kMaxMathAnswer) return a == b;
  if (IsSameCanonical(CanonicaliseMath(a, true), CanonicaliseMath(b, true))) return true;
  // "100,200" may also be a list of two.
  const bool has_list =
      a.find(',') != std::string_view::npos && b.find(',') != std::string_view::npos;
  return has_list && IsSameCanonical(CanonicaliseMath(a, false), CanonicaliseMath(b, false));
}

bool IsMathExpression(std::string_view text) {
  text = StripSpace(text);
  if (text.empty() || text.size() > kMaxMathAnswer) return false;
  const CanonicalMath canonical = CanonicaliseMath(text, true);
  if (canonical.is_words) return false;
  const std::string& plain =
      canonical.without_unit.empty() ? canonical.text : canonical.without_unit;
  const Chain chain = SplitRelations(plain);
  return (chain.relations.empty() || chain.HasOnly("=")) &&
         EvaluateMath(chain.sides.back(), 0).has_value();
}

}  // namespace oscar
