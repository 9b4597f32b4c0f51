#include "text/jinja/lexer.h"

#include <fmt/core.h>

#include <array>
#include <optional>

#include "text/unicode.h"

namespace oscar::jinja {
namespace {

constexpr size_t kMaxTokens = 1 << 20;
constexpr size_t kMaxMessageBytes = 500;

bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsNameStart(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         static_cast<uint8_t>(c) >= 0x80;
}
bool IsNamePart(char c) { return IsNameStart(c) || IsDigit(c); }

// End of the whitespace that starts at `at`.
size_t SkipSpace(std::string_view text, size_t at) {
  while (at < text.size()) {
    const Utf8Step step = DecodeUtf8(text, at);
    if (!step.valid || !IsPythonSpace(step.code_point)) break;
    at += step.length;
  }
  return at;
}

// Length of `text` without trailing whitespace.
size_t TrimmedEnd(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    size_t at = end - 1;
    while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80) --at;
    const Utf8Step step = DecodeUtf8(text, at);
    if (!step.valid || !IsPythonSpace(step.code_point)) break;
    end = at;
  }
  return end;
}

std::string NormalizeNewlines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      out.push_back('\n');
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    } else {
      out.push_back(source[i]);
    }
  }
  if (out.ends_with('\n')) out.pop_back();
  return out;
}

int HexValue(char c) {
  if (IsDigit(c)) return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

class Lexer {
 public:
  explicit Lexer(std::string source) : source_(std::move(source)) {}

  Result<std::vector<Token>> Run() {
    while (at_ < source_.size()) OSCAR_RETURN_IF_ERROR(Step());
    Add(TokenType::kEnd, "");
    return std::move(tokens_);
  }

 private:
  std::string_view rest() const { return std::string_view(source_).substr(at_); }
  bool LooksAt(std::string_view text) const { return rest().starts_with(text); }
  Status Error(std::string_view message) const { return TemplateError(line_, message); }

  void Add(TokenType type, std::string text) { tokens_.push_back({type, std::move(text), line_}); }
  // Moves on and counts lines.
  void Advance(size_t count) {
    for (size_t i = at_; i < at_ + count; ++i) line_ += source_[i] == '\n';
    at_ += count;
    line_start_ = at_ > 0 && source_[at_ - 1] == '\n';
  }

  // Text up to a tag whose opening is at `end`, less what the tag's sign or lstrip_blocks take.
  void AddText(size_t end, char sign, bool is_block) {
    std::string_view text = std::string_view(source_).substr(at_, end - at_);
    if (sign == '-') {
      text = text.substr(0, TrimmedEnd(text));
    } else if (sign != '+' && is_block) {
      const size_t newline = text.rfind('\n');
      const size_t start = newline == std::string_view::npos ? 0 : newline + 1;
      if ((start > 0 || line_start_) && start < text.size() &&
          SkipSpace(text, start) == text.size()) {
        text = text.substr(0, start);
      }
    }
    if (!text.empty()) Add(TokenType::kText, std::string(text));
    Advance(end - at_);
  }

  Status Step() {
    if (tokens_.size() > kMaxTokens) return Error("the template has too many tokens");
    size_t open = at_;
    while (true) {
      open = source_.find('{', open);
      if (open == std::string::npos || open + 1 >= source_.size()) {
        AddText(source_.size(), '+', false);
        return {};
      }
      const char kind = source_[open + 1];
      if (kind == '{' || kind == '%' || kind == '#') break;
      ++open;
    }
    const char kind = source_[open + 1];
    char sign = open + 2 < source_.size() ? source_[open + 2] : '\0';
    if (sign != '-' && sign != '+') sign = '\0';
    AddText(open, sign, kind != '{');
    Advance(sign == '\0' ? 2 : 3);
    if (kind == '#') return SkipComment();
    if (kind == '%') {
      if (const auto after = MatchRaw(at_)) return Raw(*after);
    }
    Add(kind == '{' ? TokenType::kVariableBegin : TokenType::kBlockBegin, "");
    return Tag(kind == '{');
  }

  Status SkipComment() {
    const size_t close = source_.find("#}", at_);
    if (close == std::string::npos) return Error("the comment is not closed by #}");
    const char sign = close > at_ ? source_[close - 1] : '\0';
    Advance(close + 2 - at_);
    AfterBlock(sign);
    return {};
  }

  // What the end of a block or comment takes with it.
  void AfterBlock(char sign) {
    if (sign == '-') {
      Advance(SkipSpace(source_, at_) - at_);
    } else if (sign != '+' && at_ < source_.size() && source_[at_] == '\n') {
      Advance(1);
    }
  }

  // After "{%" and its sign: the position behind "raw %}" where that is what follows.
  std::optional<size_t> MatchRaw(size_t at) const {
    at = SkipSpace(source_, at);
    if (!std::string_view(source_).substr(at).starts_with("raw")) return std::nullopt;
    at = SkipSpace(source_, at + 3);
    if (std::string_view(source_).substr(at).starts_with("-%}")) {
      return SkipSpace(source_, at + 3);
    }
    if (std::string_view(source_).substr(at).starts_with("%}")) return at + 2;
    return std::nullopt;
  }

  Status Raw(size_t begin) {
    Advance(begin - at_);
    for (size_t open = source_.find("{%", at_); open != std::string::npos;
         open = source_.find("{%", open + 1)) {
      size_t at = open + 2;
      char sign = at < source_.size() ? source_[at] : '\0';
      if (sign == '-' || sign == '+') {
        ++at;
      } else {
        sign = '\0';
      }
      at = SkipSpace(source_, at);
      if (!std::string_view(source_).substr(at).starts_with("endraw")) continue;
      at = SkipSpace(source_, at + 6);
      char closing = at < source_.size() ? source_[at] : '\0';
      if (closing == '-' || closing == '+') {
        ++at;
      } else {
        closing = '\0';
      }
      if (!std::string_view(source_).substr(at).starts_with("%}")) continue;
      AddText(open, sign, true);
      Advance(at + 2 - at_);
      AfterBlock(closing);
      return {};
    }
    return Error("{% raw %} is not closed by {% endraw %}");
  }

  // Tokens up to the end of a tag.
  Status Tag(bool is_variable) {
    const std::string_view close = is_variable ? "}}" : "%}";
    std::string brackets;  // closing ones that are due
    while (true) {
      Advance(SkipSpace(source_, at_) - at_);
      if (at_ >= source_.size()) {
        return Error(fmt::format("the template ends inside a tag; {} is missing", close));
      }
      if (tokens_.size() > kMaxTokens) return Error("the template has too many tokens");
      if (brackets.empty()) {
        const char sign = source_[at_];
        const bool has_sign = sign == '-' || (sign == '+' && !is_variable);
        if (rest().substr(has_sign ? 1 : 0).starts_with(close)) {
          Add(is_variable ? TokenType::kVariableEnd : TokenType::kBlockEnd, "");
          Advance(has_sign ? 3 : 2);
          if (!is_variable) {
            AfterBlock(has_sign ? sign : '\0');
          } else if (has_sign) {
            Advance(SkipSpace(source_, at_) - at_);
          }
          return {};
        }
      }
      const char c = source_[at_];
      if (IsDigit(c)) {
        OSCAR_RETURN_IF_ERROR(Number());
      } else if (IsNameStart(c)) {
        size_t end = at_ + 1;
        while (end < source_.size() && IsNamePart(source_[end])) ++end;
        Add(TokenType::kName, source_.substr(at_, end - at_));
        Advance(end - at_);
      } else if (c == '"' || c == '\'') {
        OSCAR_RETURN_IF_ERROR(String(c));
      } else {
        OSCAR_RETURN_IF_ERROR(Operator(&brackets));
      }
    }
  }

  Status Operator(std::string* brackets) {
    static constexpr std::array<std::string_view, 6> kDouble = {"//", "**", "==", "!=", ">=", "<="};
    for (const std::string_view op : kDouble) {
      if (!LooksAt(op)) continue;
      Add(TokenType::kOperator, std::string(op));
      Advance(2);
      return {};
    }
    const char c = source_[at_];
    static constexpr std::string_view kSingle = "+-/*%~[](){}><=.:|,;";
    if (kSingle.find(c) == std::string_view::npos) {
      return Error(fmt::format("unexpected character {:?}", std::string(1, c)));
    }
    if (c == '(') brackets->push_back(')');
    if (c == '[') brackets->push_back(']');
    if (c == '{') brackets->push_back('}');
    if (c == ')' || c == ']' || c == '}') {
      if (brackets->empty() || brackets->back() != c) {
        return Error(fmt::format("unexpected {:?}", std::string(1, c)));
      }
      brackets->pop_back();
    }
    Add(TokenType::kOperator, std::string(1, c));
    Advance(1);
    return {};
  }

  // Digits with single underscores between them, appended to `out`. Returns the new position.
  template <typename Accept>
  size_t Digits(size_t at, Accept accept, std::string* out) const {
    while (at < source_.size()) {
      if (accept(source_[at])) {
        out->push_back(source_[at++]);
      } else if (source_[at] == '_' && at + 1 < source_.size() && accept(source_[at + 1])) {
        ++at;
      } else {
        break;
      }
    }
    return at;
  }

  Status Number() {
    std::string text;
    const char second = at_ + 1 < source_.size() ? source_[at_ + 1] : '\0';
    size_t end = at_;
    if (source_[at_] == '0' && (second == 'x' || second == 'X')) {
      text = "0x";
      end = Digits(
          at_ + 2, [](char c) { return HexValue(c) >= 0; }, &text);
    } else if (source_[at_] == '0' && (second == 'o' || second == 'O')) {
      text = "0o";
      end = Digits(
          at_ + 2, [](char c) { return c >= '0' && c <= '7'; }, &text);
    } else if (source_[at_] == '0' && (second == 'b' || second == 'B')) {
      text = "0b";
      end = Digits(
          at_ + 2, [](char c) { return c == '0' || c == '1'; }, &text);
    } else {
      end = Digits(at_, IsDigit, &text);
      bool is_float = false;
      // After a dot ("messages.0.role") digits are an index, never the start of a fraction.
      const bool after_dot = at_ > 0 && source_[at_ - 1] == '.';
      const auto digit_at = [&](size_t at) { return at < source_.size() && IsDigit(source_[at]); };
      if (!after_dot && end < source_.size() && source_[end] == '.' && digit_at(end + 1)) {
        is_float = true;
        text.push_back('.');
        end = Digits(end + 1, IsDigit, &text);
      }
      if (!after_dot && end < source_.size() && (source_[end] == 'e' || source_[end] == 'E')) {
        size_t exponent = end + 1;
        std::string tail = "e";
        if (exponent < source_.size() && (source_[exponent] == '+' || source_[exponent] == '-')) {
          tail.push_back(source_[exponent++]);
        }
        if (digit_at(exponent)) {
          is_float = true;
          end = Digits(exponent, IsDigit, &tail);
          text += tail;
        }
      }
      Add(is_float ? TokenType::kFloat : TokenType::kInteger, text);
      Advance(end - at_);
      return {};
    }
    if (text.size() == 2) return Error("a number has no digits");
    Add(TokenType::kInteger, text);
    Advance(end - at_);
    return {};
  }

  Status String(char quote) {
    std::string out;
    size_t at = at_ + 1;
    while (at < source_.size() && source_[at] != quote) {
      if (source_[at] != '\\') {
        out.push_back(source_[at++]);
        continue;
      }
      if (at + 1 >= source_.size()) break;
      OSCAR_RETURN_IF_ERROR(Escape(&at, &out));
    }
    if (at >= source_.size()) return Error("a string is not closed");
    Add(TokenType::kString, std::move(out));
    Advance(at + 1 - at_);
    return {};
  }

  // Python's string escapes. `at` is at the backslash, and another character follows.
  Status Escape(size_t* at, std::string* out) {
    static constexpr std::string_view kNames = "abfnrtv\\'\"";
    static constexpr std::string_view kValues = "\a\b\f\n\r\t\v\\'\"";
    const char c = source_[*at + 1];
    *at += 2;
    if (const size_t simple = kNames.find(c); simple != std::string_view::npos) {
      out->push_back(kValues[simple]);
      return {};
    }
    if (c == '\n') return {};
    if (c >= '0' && c <= '7') {
      uint32_t value = static_cast<uint32_t>(c - '0');
      for (int i = 0; i < 2 && *at < source_.size(); ++i) {
        if (source_[*at] < '0' || source_[*at] > '7') break;
        value = value * 8 + static_cast<uint32_t>(source_[(*at)++] - '0');
      }
      AppendUtf8(value, out);
      return {};
    }
    const int digits = c == 'x' ? 2 : (c == 'u' ? 4 : (c == 'U' ? 8 : 0));
    if (digits == 0) {
      if (c == 'N') return Error("\\N{..} escapes are not supported");
      out->push_back('\\');
      out->push_back(c);
      return {};
    }
    uint32_t value = 0;
    for (int i = 0; i < digits; ++i) {
      const int digit = *at < source_.size() ? HexValue(source_[*at]) : -1;
      if (digit < 0) return Error(fmt::format("\\{} needs {} hexadecimal digits", c, digits));
      value = value * 16 + static_cast<uint32_t>(digit);
      ++*at;
    }
    if (value > 0x10FFFF || (value >= 0xD800 && value <= 0xDFFF)) {
      return Error(fmt::format("\\{} names no character", c));
    }
    AppendUtf8(value, out);
    return {};
  }

  std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_start_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

Status TemplateError(int line, std::string_view message) {
  // A template can put any text here, a request's as well: one line of bounded length.
  std::string text = ReplaceInvalidUtf8(message.substr(0, kMaxMessageBytes));
  if (message.size() > kMaxMessageBytes) text += "...";
  for (char& c : text) {
    if (static_cast<uint8_t>(c) < 0x20 || c == 0x7F) c = ' ';
  }
  return InvalidArgument(fmt::format("template line {}: {}", line, text));
}

Result<std::vector<Token>> Tokenize(std::string_view source) {
  if (const size_t bad = FindInvalidUtf8(source); bad != std::string_view::npos) {
    return Unexpected(
        InvalidArgument(fmt::format("the template is not valid UTF-8 at byte {}", bad)));
  }
  return Lexer(NormalizeNewlines(source)).Run();
}

}  // namespace oscar::jinja
