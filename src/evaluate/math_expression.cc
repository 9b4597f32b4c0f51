#include "evaluate/math_expression.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string>
#include <utility>

namespace oscar {
namespace {

using Value = std::complex<double>;

constexpr int kMaxDepth = 64;
constexpr size_t kMaxLength = 4096;
// Stands for infinity: finite, so that -infinity and 2 infinity stay apart from it.
constexpr double kInfinity = 7.7e150;

bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsLetter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

using Function = Value (*)(Value);
Value Reciprocal(Value x) { return 1.0 / x; }

constexpr std::array<std::pair<std::string_view, Function>, 18> kFunctions = {{
    {"sin", [](Value x) { return std::sin(x); }},
    {"cos", [](Value x) { return std::cos(x); }},
    {"tan", [](Value x) { return std::tan(x); }},
    {"sec", [](Value x) { return Reciprocal(std::cos(x)); }},
    {"csc", [](Value x) { return Reciprocal(std::sin(x)); }},
    {"cot", [](Value x) { return Reciprocal(std::tan(x)); }},
    {"sinh", [](Value x) { return std::sinh(x); }},
    {"cosh", [](Value x) { return std::cosh(x); }},
    {"tanh", [](Value x) { return std::tanh(x); }},
    {"arcsin", [](Value x) { return std::asin(x); }},
    {"arccos", [](Value x) { return std::acos(x); }},
    {"arctan", [](Value x) { return std::atan(x); }},
    {"ln", [](Value x) { return std::log(x); }},
    {"exp", [](Value x) { return std::exp(x); }},
    {"Re", [](Value x) { return Value(x.real()); }},
    {"Im", [](Value x) { return Value(x.imag()); }},
    {"log", [](Value x) { return std::log10(x); }},
    {"lg", [](Value x) { return std::log10(x); }},
}};

// Recursive descent; `ok_` falls at the first thing it does not know and stays down.
class Parser {
 public:
  Parser(std::string_view text, int sample) : text_(text), sample_(sample) {}

  std::optional<Value> Run() {
    const Value value = Sum();
    SkipSpace();
    if (!ok_ || at_ != text_.size()) return std::nullopt;
    if (!std::isfinite(value.real()) || !std::isfinite(value.imag())) return std::nullopt;
    return value;
  }

 private:
  Value Fail() {
    ok_ = false;
    return 0.0;
  }
  void SkipSpace() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '~')) ++at_;
  }
  char Peek() {
    SkipSpace();
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool Take(char c) {
    if (Peek() != c) return false;
    ++at_;
    return true;
  }
  // The name after a backslash at the cursor, which stays there.
  std::string_view PeekCommand() {
    if (Peek() != '\\') return {};
    size_t end = at_ + 1;
    while (end < text_.size() && IsLetter(text_[end])) ++end;
    return text_.substr(at_ + 1, end - at_ - 1);
  }
  bool TakeCommand(std::string_view name) {
    if (PeekCommand() != name || name.empty()) return false;
    at_ += 1 + name.size();
    return true;
  }

  Value Sum() {
    if (++depth_ > kMaxDepth) return Fail();
    Value value = Product();
    while (ok_) {
      if (Take('+')) {
        value += Product();
      } else if (Take('-')) {
        value -= Product();
      } else {
        break;
      }
    }
    --depth_;
    return value;
  }

  // Whether something that multiplies without a sign starts here.
  bool StartsFactor() {
    const char c = Peek();
    if (IsDigit(c) || IsLetter(c) || c == '(' || c == '{' || c == '.') return true;
    const std::string_view name = PeekCommand();
    return !name.empty() && name != "cdot" && name != "times" && name != "div";
  }

  Value Product() {
    Value value = Signed();
    while (ok_) {
      if (Take('*') || TakeCommand("cdot") || TakeCommand("times")) {
        value *= Signed();
      } else if (Take('/') || TakeCommand("div")) {
        value /= Signed();
      } else if (StartsFactor()) {
        value *= Power();
      } else {
        break;
      }
    }
    return value;
  }

  Value Signed() {
    bool negative = false;
    for (int i = 0; i < kMaxDepth; ++i) {
      if (Take('-')) {
        negative = !negative;
      } else if (!Take('+')) {
        break;
      }
    }
    const Value value = Power();
    return negative ? -value : value;
  }

  // A braced group, or one digit, letter or command: what follows ^, _ and \frac.
  Value Argument() {
    if (Take('{')) {
      const Value value = Sum();
      return Take('}') ? value : Fail();
    }
    if (IsDigit(Peek())) return static_cast<double>(text_[at_++] - '0');
    if (Take('-')) return -Argument();
    return Primary();
  }

  Value Power() {
    Value value = Primary();
    while (ok_ && Take('!')) {
      const double n = value.real();
      if (value.imag() != 0.0 || n < 0.0 || n > 170.0 || n != std::floor(n)) return Fail();
      value = std::round(std::tgamma(n + 1.0));
    }
    if (!ok_ || !Take('^')) return value;
    return Raise(value, Exponent());
  }

  Value Exponent() {
    if (++depth_ > kMaxDepth) return Fail();
    const Value exponent = Argument();
    --depth_;
    return exponent;
  }

  static Value Raise(Value base, Value exponent) {
    const double n = exponent.real();
    // Whole powers by multiplication: exact for integers.
    if (exponent.imag() == 0.0 && n == std::floor(n) && std::abs(n) <= 64.0) {
      Value out = 1.0;
      for (int i = 0; i < static_cast<int>(std::abs(n)); ++i) out *= base;
      return n < 0.0 ? 1.0 / out : out;
    }
    return std::pow(base, exponent);
  }

  Value Number() {
    size_t end = at_;
    while (end < text_.size() && (IsDigit(text_[end]) || text_[end] == '.')) ++end;
    double value = 0;
    const char* first = text_.data() + at_;
    const char* last = text_.data() + end;
    std::string padded;  // from_chars wants a digit before the point
    if (*first == '.') {
      padded = "0" + std::string(first, last);
      first = padded.data(), last = padded.data() + padded.size();
    }
    const auto [stop, error] = std::from_chars(first, last, value);
    if (error != std::errc() || stop != last) return Fail();
    const bool whole = value == std::floor(value);
    at_ = end;
    if (Peek() == '_') return Fail();  // a number in another base is compared as text
    // A mixed number: 3\frac{1}{2}.
    if (whole && PeekCommand() == "frac") {
      const size_t start = at_;
      TakeCommand("frac");
      Take('{');  // or none: \frac12
      const bool digits = IsDigit(Peek());
      at_ = start;
      if (digits) {
        const Value fraction = Primary();
        if (ok_ && fraction.imag() == 0.0 && std::abs(fraction.real()) < 1.0) {
          return value + fraction;
        }
        return value * fraction;
      }
    }
    return value;
  }

  // The value of a letter, perhaps with an index: between 0.5 and 2, by its name and the sample.
  Value Letter(std::string name) {
    if (Take('_')) {
      if (Take('{')) {
        while (at_ < text_.size() && text_[at_] != '}') name += text_[at_++];
        if (!Take('}')) return Fail();
      } else if (at_ < text_.size()) {
        name += text_[at_++];
      }
    }
    if (name == "i") return Value(0.0, 1.0);
    if (name == "e") return std::numbers::e;
    uint64_t hash = 1469598103934665603u + static_cast<uint64_t>(sample_) * 7919u;
    for (char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
    hash ^= hash >> 29;
    return 0.5 + 1.5 * static_cast<double>(hash % 1000003u) / 1000003.0;
  }

  Value Primary() {
    if (++depth_ > kMaxDepth) return Fail();
    const Value value = PrimaryInside();
    --depth_;
    return value;
  }

  Value PrimaryInside() {
    const char c = Peek();
    if (IsDigit(c) || c == '.') return Number();
    if (IsLetter(c)) return Letter(std::string(1, text_[at_++]));
    if (c == '(' || c == '[' || c == '{') {
      ++at_;
      const Value value = Sum();
      return Take(c == '(' ? ')' : c == '[' ? ']' : '}') ? value : Fail();
    }
    if (c == '|') {
      ++at_;
      const Value value = Sum();
      return Take('|') ? Value(std::abs(value)) : Fail();
    }
    if (c == '\\') return Command();
    return Fail();
  }

  Value Command() {
    const std::string name(PeekCommand());
    if (name.empty()) return Fail();
    at_ += 1 + name.size();
    if (name == "pi") return std::numbers::pi;
    if (name == "infty") return kInfinity;
    if (name == "frac") {
      const Value top = Argument();
      return top / Argument();
    }
    if (name == "binom") {
      const Value n = Argument(), k = Argument();
      return std::round(std::exp(std::lgamma(n.real() + 1) - std::lgamma(k.real() + 1) -
                                 std::lgamma(n.real() - k.real() + 1)));
    }
    if (name == "sqrt") {
      Value root = 2.0;
      if (Take('[')) {
        root = Sum();
        if (!Take(']')) return Fail();
      }
      const Value inside = Argument();
      if (root == Value(2.0)) return std::sqrt(inside);
      // The real root of a negative number where there is one.
      const double n = root.real();
      if (inside.imag() == 0.0 && inside.real() < 0.0 && std::fmod(n, 2.0) == 1.0) {
        return -std::pow(-inside.real(), 1.0 / n);
      }
      return std::pow(inside, 1.0 / root);
    }
    for (const auto& [known, function] : kFunctions) {
      if (name == known) return Apply(name, function);
    }
    // Greek letters and the like stand for themselves.
    return name.size() > 1 ? Letter("\\" + name) : Fail();
  }

  Value Apply(const std::string& name, Function function) {
    std::optional<Value> base, power;
    if (name == "log" && Take('_')) base = Exponent();
    if (Take('^')) power = Exponent();
    // sin 2x takes the product of what follows, up to a sign; sin(x) y takes the bracket.
    Value inside = Power();
    while (ok_ && text_[at_ - 1] != ')' && (IsDigit(Peek()) || IsLetter(Peek()))) inside *= Power();
    if (!ok_) return 0.0;
    Value value = base.has_value() ? std::log(inside) / std::log(*base) : function(inside);
    if (power.has_value()) value = Raise(value, *power);
    return value;
  }

  std::string_view text_;
  int sample_;
  size_t at_ = 0;
  int depth_ = 0;
  bool ok_ = true;
};

}  // namespace

std::optional<std::complex<double>> EvaluateMath(std::string_view latex, int sample) {
  if (latex.empty() || latex.size() > kMaxLength) return std::nullopt;
  return Parser(latex, sample).Run();
}

}  // namespace oscar
