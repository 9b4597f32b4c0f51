#include "scoring/math_expression.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <numbers>
#include <string>
#include <utility>

namespace oscar {
namespace {

using Complex = std::complex<double>;
__extension__ using Wide = unsigned __int128;

constexpr int kMaxDepth = 96;
constexpr size_t kMaxLength = 4096;
constexpr int kMaxFactors = 200;             // of a factorial or a binomial, exactly
constexpr double kMaxExponent = 1073741824;  // of a power by multiplication
constexpr double kEpsilon = std::numeric_limits<double>::epsilon();
// Stands for infinity: finite, so that -infinity and 2 infinity stay apart from it.
constexpr double kInfinity = 7.7e150;
// The largest prime below 2^61 that is 1 modulo 4, so that -1 has a root: i.
constexpr uint64_t kPrime = 2305843009213693921u;
constexpr uint64_t kImaginary = 583529827753931384u;

uint64_t AddResidue(uint64_t a, uint64_t b) { return (a + b) % kPrime; }
uint64_t NegateResidue(uint64_t a) { return a == 0 ? 0 : kPrime - a; }
uint64_t MultiplyResidue(uint64_t a, uint64_t b) {
  // 2^61 = kPrime + 31: folding the high part down twice leaves less than 2 kPrime.
  constexpr int kBits = 61;
  constexpr uint64_t kRest = (uint64_t{1} << kBits) - kPrime;
  Wide x = static_cast<Wide>(a) * b;
  for (int i = 0; i < 2; ++i) x = (x & ((Wide{1} << kBits) - 1)) + (x >> kBits) * kRest;
  return static_cast<uint64_t>(x) % kPrime;
}
uint64_t PowerResidue(uint64_t base, uint64_t exponent) {
  uint64_t out = 1;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) out = MultiplyResidue(out, base);
    base = MultiplyResidue(base, base);
  }
  return out;
}
uint64_t InverseResidue(uint64_t a) { return PowerResidue(a, kPrime - 2); }

bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsLetter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

struct Value {
  Complex v;
  double error = 0;
  std::optional<uint64_t> exact;
};

// The rounding of a number that is whole where `whole` says so.
double RoundingOf(double v, bool whole) {
  constexpr double kExact = 9007199254740992;  // 2^53
  return whole && std::abs(v) <= kExact ? 0.0 : kEpsilon * std::abs(v);
}

Value Whole(int64_t n) {
  const uint64_t size = static_cast<uint64_t>(n < 0 ? -n : n) % kPrime;
  const auto v = static_cast<double>(n);
  return {v, RoundingOf(v, true), n < 0 ? NegateResidue(size) : size};
}
Value Inexact(Complex v) { return {v, kEpsilon * std::abs(v), std::nullopt}; }

Value Add(const Value& a, const Value& b) {
  Value out{a.v + b.v, 0, std::nullopt};
  out.error = a.error + b.error + kEpsilon * std::abs(out.v);
  if (a.exact && b.exact) out.exact = AddResidue(*a.exact, *b.exact);
  return out;
}
Value Negate(const Value& a) {
  // Adding 0.0 turns -0 into 0: the root of (-4, -0) would lie on the other side of the cut.
  Value out{Complex(-a.v.real() + 0.0, -a.v.imag() + 0.0), a.error, std::nullopt};
  if (a.exact) out.exact = NegateResidue(*a.exact);
  return out;
}
Value Multiply(const Value& a, const Value& b) {
  Value out{a.v * b.v, 0, std::nullopt};
  out.error = std::abs(a.v) * b.error + std::abs(b.v) * a.error + a.error * b.error +
              2 * kEpsilon * std::abs(out.v);
  if (a.exact && b.exact) out.exact = MultiplyResidue(*a.exact, *b.exact);
  return out;
}
Value Divide(const Value& a, const Value& b) {
  Value out{a.v / b.v, 0, std::nullopt};
  const double size = std::abs(b.v);
  out.error = (a.error + std::abs(out.v) * b.error) / size + 4 * kEpsilon * std::abs(out.v);
  if (b.exact == uint64_t{0}) out.v = std::numeric_limits<double>::quiet_NaN();
  if (a.exact && b.exact && *b.exact != 0) {
    out.exact = MultiplyResidue(*a.exact, InverseResidue(*b.exact));
  }
  return out;
}

// The whole number that a value is exactly.
std::optional<int64_t> AsWhole(const Value& a, double limit) {
  const double n = a.v.real();
  if (!a.exact || a.v.imag() != 0.0 || n != std::floor(n) || std::abs(n) > limit) return {};
  const auto whole = static_cast<int64_t>(n);
  return Whole(whole).exact == a.exact ? std::optional<int64_t>(whole) : std::nullopt;
}

using Function = Complex (*)(Complex);

Complex RealOr(Complex x, double low, double high, double (*real)(double), Function complex) {
  return x.imag() == 0.0 && x.real() >= low && x.real() <= high ? Complex(real(x.real()))
                                                                : complex(x);
}
Complex ArcSine(Complex x) {
  return RealOr(
      x, -1, 1, [](double r) { return std::asin(r); }, [](Complex c) { return std::asin(c); });
}
Complex ArcCosine(Complex x) {
  return RealOr(
      x, -1, 1, [](double r) { return std::acos(r); }, [](Complex c) { return std::acos(c); });
}
Complex ArcTangent(Complex x) {
  return RealOr(
      x, -HUGE_VAL, HUGE_VAL, [](double r) { return std::atan(r); },
      [](Complex c) { return std::atan(c); });
}

struct NamedFunction {
  std::string_view name;
  Function function;
  Function inverse;  // of name^{-1}; none where that is a power
};

constexpr auto kFunctions = std::to_array<NamedFunction>({
    {"sin", [](Complex x) { return std::sin(x); }, ArcSine},
    {"cos", [](Complex x) { return std::cos(x); }, ArcCosine},
    {"tan", [](Complex x) { return std::tan(x); }, ArcTangent},
    {"sec", [](Complex x) { return 1.0 / std::cos(x); },
     [](Complex x) { return ArcCosine(1.0 / x); }},
    {"csc", [](Complex x) { return 1.0 / std::sin(x); },
     [](Complex x) { return ArcSine(1.0 / x); }},
    {"cot", [](Complex x) { return 1.0 / std::tan(x); },
     [](Complex x) { return std::numbers::pi / 2 - ArcTangent(x); }},
    {"sinh", [](Complex x) { return std::sinh(x); }, [](Complex x) { return std::asinh(x); }},
    {"cosh", [](Complex x) { return std::cosh(x); }, [](Complex x) { return std::acosh(x); }},
    {"tanh", [](Complex x) { return std::tanh(x); }, [](Complex x) { return std::atanh(x); }},
    {"arcsin", ArcSine, nullptr},
    {"arccos", ArcCosine, nullptr},
    {"arctan", ArcTangent, nullptr},
    {"arccot", [](Complex x) { return std::numbers::pi / 2 - ArcTangent(x); }, nullptr},
    {"arcsec", [](Complex x) { return ArcCosine(1.0 / x); }, nullptr},
    {"arccsc", [](Complex x) { return ArcSine(1.0 / x); }, nullptr},
    {"ln", [](Complex x) { return std::log(x); }, nullptr},
    {"exp", [](Complex x) { return std::exp(x); }, nullptr},
    {"Re", [](Complex x) { return Complex(x.real()); }, nullptr},
    {"Im", [](Complex x) { return Complex(x.imag()); }, nullptr},
    {"log", [](Complex x) { return std::log10(x); }, nullptr},
    {"lg", [](Complex x) { return std::log10(x); }, nullptr},
});
constexpr size_t kNumTrigonometric = 6;

const NamedFunction* FindFunction(std::string_view name) {
  const auto* const found = std::find_if(kFunctions.begin(), kFunctions.end(),
                                         [&](const NamedFunction& f) { return f.name == name; });
  return found == kFunctions.end() ? nullptr : found;
}

constexpr auto kGreek = std::to_array<std::string_view>(
    {"alpha", "beta",   "gamma", "delta", "epsilon", "varepsilon", "zeta",     "eta",   "theta",
     "iota",  "kappa",  "mu",    "nu",    "xi",      "rho",        "sigma",    "tau",   "upsilon",
     "phi",   "varphi", "chi",   "psi",   "omega",   "lambda",     "Gamma",    "Delta", "Theta",
     "Sigma", "Phi",    "Psi",   "Omega", "Lambda",  "Pi",         "vartheta", "ell"});

bool IsGreek(std::string_view name) {
  return std::find(kGreek.begin(), kGreek.end(), name) != kGreek.end();
}

// Recursive descent; `ok_` falls at the first thing it does not know and stays down.
class Parser {
 public:
  Parser(std::string_view text, int point) : text_(text), point_(point) {}

  std::optional<MathValue> Run() {
    const Value value = Group();
    SkipSpace();
    if (!ok_ || at_ != text_.size()) return std::nullopt;
    MathValue out;
    out.value = value.v;
    out.error = value.error;
    out.exact = value.exact;
    out.is_defined = value.exact.has_value() || IsFinite(value);
    out.has_letters = has_letters_;
    out.leaves_reals = leaves_reals_;
    return out;
  }

 private:
  static bool IsFinite(const Value& a) {
    return std::isfinite(a.v.real()) && std::isfinite(a.v.imag()) && std::isfinite(a.error);
  }
  Value Fail() {
    ok_ = false;
    return {};
  }
  void SkipSpace() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
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

  // f(x), with what the error of x makes of it.
  template <typename F>
  Value Lift(const Value& x, const F& f) {
    const Complex in(x.v.real(), x.v.imag() + 0.0);
    const double step = x.error;
    Value out{f(in), 0, std::nullopt};
    out.error = std::max(std::abs(f(in + step) - out.v), std::abs(f(in - step) - out.v)) +
                4 * kEpsilon * std::abs(out.v);
    if (in.imag() == 0.0 && out.v.imag() != 0.0) leaves_reals_ = true;
    return out;
  }

  // What braces hold: n \choose k divides all of it.
  Value Group() {
    const Value value = Sum();
    return ok_ && TakeCommand("choose") ? Binomial(value, Sum()) : value;
  }

  Value Sum() {
    if (++depth_ > kMaxDepth) return Fail();
    Value value = Product();
    while (ok_) {
      if (Take('+')) {
        value = Add(value, Product());
      } else if (Take('-')) {
        value = Add(value, Negate(Product()));
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
    if (c == '|') return open_bars_ == 0;
    if (IsDigit(c) || IsLetter(c) || c == '(' || c == '{' || c == '.') return true;
    const std::string_view name = PeekCommand();
    return !name.empty() && name != "rfloor" && name != "rceil" && name != "choose";
  }

  Value Product() {
    Value value = Signed();
    while (ok_) {
      const size_t before = at_;
      if (Take('*') || TakeCommand("cdot") || TakeCommand("times")) {
        value = Multiply(value, Signed());
      } else if (Take('/') || TakeCommand("div")) {
        value = Divide(value, Signed());
      } else if (StartsFactor()) {
        // "1 2" is no product: the gap between two numbers says nothing about what is meant.
        if (before == number_end_ && (IsDigit(Peek()) || Peek() == '.')) return Fail();
        value = Multiply(value, Power());
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
    return negative ? Negate(value) : value;
  }

  // A braced group, or one digit, letter or command: what follows ^, _ and \frac.
  Value Argument() {
    if (++depth_ > kMaxDepth) return Fail();
    Value value;
    if (IsDigit(Peek())) {
      value = Whole(text_[at_++] - '0');
    } else if (Take('-')) {
      value = Negate(Argument());
    } else {
      value = Primary();
    }
    --depth_;
    return value;
  }

  Value Power() {
    Value value = Primary();
    // Degrees are an angle inside a trigonometric function and a unit elsewhere.
    while (ok_ && TakeCommand("degree")) {
      if (in_trigonometric_ > 0) value = Multiply(value, Inexact(std::numbers::pi / 180));
    }
    if (ok_ && Take('!')) {
      if (Peek() == '!') return Fail();  // the double factorial
      value = Factorial(value);
    }
    if (!ok_ || !Take('^')) return value;
    return Raise(value, Argument());
  }

  Value Factorial(const Value& n) {
    if (const auto whole = AsWhole(n, kMaxFactors); whole && *whole >= 0) {
      Value out = Whole(1);
      for (int64_t i = 2; i <= *whole; ++i) out = Multiply(out, Whole(i));
      return out;
    }
    if (n.v.imag() != 0.0) return Fail();
    return Lift(n, [](Complex x) { return Complex(std::tgamma(x.real() + 1.0)); });
  }

  Value Binomial(const Value& n, const Value& k) {
    const auto whole = AsWhole(k, kMaxFactors);
    if (!whole) {
      return Divide(Factorial(n), Multiply(Factorial(k), Factorial(Add(n, Negate(k)))));
    }
    if (*whole < 0) return Whole(0);
    // The approximation is divided at every step, lest it overflow; the residue once.
    Value out = Whole(1);
    uint64_t below = 1;
    for (int64_t i = 0; i < *whole; ++i) {
      const auto divisor = static_cast<double>(i + 1);
      out = Multiply(out, Add(n, Whole(-i)));
      out.v /= divisor;
      out.error = out.error / divisor + kEpsilon * std::abs(out.v);
      below = MultiplyResidue(below, static_cast<uint64_t>(i + 1));
    }
    if (out.exact) out.exact = MultiplyResidue(*out.exact, InverseResidue(below));
    return out;
  }

  Value Raise(const Value& base, const Value& exponent) {
    if (const auto n = AsWhole(exponent, kMaxExponent)) {
      Value out = Whole(1), square = base;
      for (auto left = static_cast<uint64_t>(*n < 0 ? -*n : *n); left > 0; left >>= 1) {
        if (left & 1) out = Multiply(out, square);
        if (left > 1) square = Multiply(square, square);
      }
      return *n < 0 ? Divide(Whole(1), out) : out;
    }
    const auto power = [](Complex b, Complex e) {
      if (b.imag() == 0.0 && b.real() >= 0.0 && e.imag() == 0.0) {
        return Complex(std::pow(b.real(), e.real()));
      }
      return b == 0.0 ? Complex(0.0) : std::exp(e * std::log(Complex(b.real(), b.imag() + 0.0)));
    };
    Value out = Lift(base, [&](Complex b) { return power(b, exponent.v); });
    // exp(e log b) also loses what the rounding of its argument makes.
    const double step = exponent.error + kEpsilon * std::abs(exponent.v);
    out.error += std::abs(power(base.v, exponent.v + step) - out.v);
    return out;
  }

  // Digits at the cursor, with a decimal point where `point` allows one; their count after it.
  Value Digits(bool point, int64_t& decimals) {
    std::string digits = "0";  // from_chars wants a digit before the point
    uint64_t residue = 0;
    decimals = -1;
    bool any = false;
    for (; at_ < text_.size(); ++at_) {
      const char c = text_[at_];
      if (c == '.' && point && decimals < 0) {
        decimals = 0;
      } else if (IsDigit(c)) {
        residue = AddResidue(MultiplyResidue(residue, 10), static_cast<uint64_t>(c - '0'));
        if (decimals >= 0) ++decimals;
        any = true;
      } else {
        break;
      }
      digits += c;
    }
    if (!any && decimals < 0) return Fail();
    const bool fraction = decimals >= 0;
    decimals = std::max<int64_t>(decimals, 0);
    double v = 0;
    const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), v);
    if (error == std::errc::result_out_of_range) v = HUGE_VAL;
    if (fraction && !any) return Fail();
    if (decimals > 0) {
      residue = MultiplyResidue(residue,
                                InverseResidue(PowerResidue(10, static_cast<uint64_t>(decimals))));
    }
    return {v, RoundingOf(v, decimals == 0), residue};
  }

  Value Number() {
    int64_t decimals = 0;
    const bool has_point_first = text_[at_] == '.';
    const size_t start = at_;
    Value value = Digits(/*point=*/true, decimals);
    const bool has_point = text_.substr(start, at_ - start).find('.') != std::string_view::npos;
    if (!ok_ || (at_ < text_.size() && text_[at_] == '.')) return Fail();
    if (has_point && TakeCommand("overline")) return Repeating(value, decimals);
    if (Peek() == '_') return Fail();  // a number in another base is compared as text
    if (!has_point && !has_point_first) {
      if (const auto fraction = MixedFraction()) value = Add(value, *fraction);
    }
    number_end_ = at_;
    SkipSpace();
    number_end_ = std::max(number_end_, at_);
    return value;
  }

  // 0.1\overline{6}: the digits under the bar come again and again.
  Value Repeating(const Value& before, int64_t decimals) {
    if (!Take('{')) return Fail();
    int64_t none = 0;
    const size_t start = at_;
    const Value period = Digits(/*point=*/false, none);
    const auto length = static_cast<int64_t>(at_ - start);
    if (!ok_ || !Take('}')) return Fail();
    const Value scale = Raise(Whole(10), Whole(decimals));
    const Value nines = Add(Raise(Whole(10), Whole(length)), Whole(-1));
    return Add(before, Divide(period, Multiply(nines, scale)));
  }

  // What makes a mixed number of the whole one before it: \frac{1}{2}, \frac12 or " 1/2".
  std::optional<Value> MixedFraction() {
    const size_t start = at_;
    const auto digits = [&]() -> std::optional<Value> {
      if (at_ >= text_.size() || !IsDigit(text_[at_])) return std::nullopt;
      int64_t none = 0;
      return Digits(/*point=*/false, none);
    };
    const auto argument = [&]() -> std::optional<Value> {
      if (!Take('{')) {
        if (!IsDigit(Peek())) return std::nullopt;
        return Whole(text_[at_++] - '0');
      }
      SkipSpace();
      const auto value = digits();
      return value && Take('}') ? value : std::nullopt;
    };
    std::optional<Value> top, bottom;
    if (TakeCommand("frac")) {
      top = argument();
      if (top) bottom = argument();
    } else if (at_ > 0 && text_[at_ - 1] == ' ') {
      top = digits();
      if (top && at_ < text_.size() && text_[at_] == '/') {
        ++at_;
        bottom = digits();
      }
    }
    if (top && bottom && std::abs(top->v) < std::abs(bottom->v)) return Divide(*top, *bottom);
    at_ = start;
    return std::nullopt;
  }

  // The value of a letter, perhaps with an index: a fraction by its name and the point, with a
  // power of two below.
  Value Letter(std::string name) {
    if (Take('_')) {
      name += '_';
      if (Take('{')) {
        while (at_ < text_.size() && text_[at_] != '}') name += text_[at_++];
        if (!Take('}')) return Fail();
      } else if (at_ < text_.size()) {
        name += text_[at_++];
      }
    }
    if (name == "i") return {Complex(0.0, 1.0), kEpsilon, kImaginary};
    if (name == "e") return Inexact(std::numbers::e);
    has_letters_ = true;
    uint64_t hash = 1469598103934665603u + static_cast<uint64_t>(point_) * 7919u;
    for (char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
    hash ^= hash >> 29;
    constexpr int kPositive = 4;
    constexpr std::array<int, 4> kShift = {20, 18, 16, 19};  // [1/4,1) [1,4) [4,16) [1/2,2)
    const auto top = static_cast<int64_t>((1u << 18) + hash % (3u << 18));
    bool negative = false;
    if (point_ >= kPositive) {
      const uint64_t id = name.size() == 1 ? static_cast<uint64_t>(name[0] - 'A') : hash >> 40;
      negative = (((id >> ((point_ - kPositive) / 2)) ^ static_cast<uint64_t>(point_)) & 1) != 0;
    }
    const int shift = kShift[static_cast<size_t>(point_) % kShift.size()];
    constexpr uint64_t kHalf = (kPrime + 1) / 2;
    const Value scale{std::ldexp(1.0, -shift), 0,
                      PowerResidue(kHalf, static_cast<uint64_t>(shift))};
    return Multiply(Whole(negative ? -top : top), scale);
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
      const int bars = std::exchange(open_bars_, 0);
      const Value value = Group();
      open_bars_ = bars;
      return Take(c == '(' ? ')' : c == '[' ? ']' : '}') ? value : Fail();
    }
    if (c == '|') {
      ++at_;
      ++open_bars_;
      const Value value = Sum();
      --open_bars_;
      return Take('|') ? Magnitude(value) : Fail();
    }
    if (c == '\\') return Command();
    return Fail();
  }

  static Value Magnitude(const Value& a) {
    if (a.v.imag() == 0.0 && (a.exact == uint64_t{0} || std::abs(a.v.real()) > a.error)) {
      return a.v.real() < 0.0 ? Negate(a) : a;
    }
    return {std::abs(a.v), a.error + kEpsilon * std::abs(a.v), std::nullopt};
  }

  // The whole number below or above, or the one that the value is but for rounding.
  static Value Rounded(const Value& a, bool up) {
    const double near = std::round(a.v.real());
    if (std::abs(near) > 1e15 || a.v.imag() != 0.0) return Inexact(HUGE_VAL);
    const bool is_near = std::abs(a.v.real() - near) <= 4 * a.error;
    return Whole(static_cast<int64_t>(is_near ? near
                                      : up    ? std::ceil(a.v.real())
                                              : std::floor(a.v.real())));
  }

  Value Command() {
    const std::string_view name = PeekCommand();
    if (name.empty()) return Fail();
    at_ += 1 + name.size();
    if (name == "pi") return Inexact(std::numbers::pi);
    if (name == "infty") return Inexact(kInfinity);
    if (name == "frac") {
      const Value top = Argument();
      return Divide(top, Argument());
    }
    if (name == "binom") {
      const Value n = Argument();
      return Binomial(n, Argument());
    }
    if (name == "lfloor" || name == "lceil") {
      const bool up = name == "lceil";
      const Value inside = Sum();
      return TakeCommand(up ? "rceil" : "rfloor") ? Rounded(inside, up) : Fail();
    }
    if (name == "sqrt") return Root();
    if (const NamedFunction* function = FindFunction(name)) return Apply(*function);
    return IsGreek(name) ? Letter("\\" + std::string(name)) : Fail();
  }

  Value Root() {
    Value degree = Whole(2);
    if (Take('[')) {
      degree = Sum();
      if (!Take(']')) return Fail();
    }
    const Value inside = Argument();
    const auto n = AsWhole(degree, kMaxFactors);
    if (n == 2) return Lift(inside, [](Complex x) { return std::sqrt(x); });
    // The real root of a negative number where there is one.
    if (n && *n % 2 != 0 && inside.v.imag() == 0.0 && inside.v.real() < 0.0) {
      return Negate(Raise(Negate(inside), Divide(Whole(1), degree)));
    }
    return Raise(inside, Divide(Whole(1), degree));
  }

  Value Apply(const NamedFunction& named) {
    std::optional<Value> base, power;
    if (named.name == "log" && Take('_')) base = Argument();
    if (Take('^')) power = Argument();
    const bool trigonometric = &named < kFunctions.data() + kNumTrigonometric;
    in_trigonometric_ += trigonometric ? 1 : 0;
    // sin 2x takes the product of what follows, up to a sign; sin(x) y takes the bracket.
    const bool bracket = Peek() == '(' || Peek() == '{' || Peek() == '[';
    Value inside = Power();
    while (
        ok_ && !bracket &&
        (IsDigit(Peek()) || IsLetter(Peek()) || PeekCommand() == "pi" || IsGreek(PeekCommand()))) {
      inside = Multiply(inside, Power());
    }
    in_trigonometric_ -= trigonometric ? 1 : 0;
    if (!ok_) return {};
    if (named.inverse != nullptr && power && AsWhole(*power, 1) == -1) {
      return Lift(inside, named.inverse);
    }
    const Function logarithm = [](Complex x) { return std::log(x); };
    Value value = base ? Divide(Lift(inside, logarithm), Lift(*base, logarithm))
                       : Lift(inside, named.function);
    return power ? Raise(value, *power) : value;
  }

  std::string_view text_;
  int point_;
  size_t at_ = 0;
  size_t number_end_ = std::string_view::npos;  // where the last number ended
  int depth_ = 0;
  int open_bars_ = 0;
  int in_trigonometric_ = 0;
  bool ok_ = true;
  bool has_letters_ = false;
  bool leaves_reals_ = false;
};

}  // namespace

std::optional<MathValue> EvaluateMath(std::string_view latex, int point) {
  if (latex.empty() || latex.size() > kMaxLength) return std::nullopt;
  return Parser(latex, point).Run();
}

bool IsSameMathValue(const MathValue& a, const MathValue& b) {
  if (!a.is_defined || !b.is_defined) return false;
  const double size = std::max(std::abs(a.value), std::abs(b.value));
  const double rounding = 4 * (a.error + b.error), distance = std::abs(a.value - b.value);
  if (a.exact && b.exact) {
    // Residues of different values agree by accident once in 2^61, or by intent: the
    // approximations must not contradict them.
    return *a.exact == *b.exact && !(distance > 1e-6 * size + 1e3 * rounding);
  }
  // Where cancellation has left no digits nothing can be said.
  if (!std::isfinite(size) || rounding > 1e-7 * std::max(1.0, size)) return false;
  return distance <= rounding;
}

}  // namespace oscar
