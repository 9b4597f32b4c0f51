// The half of the parser that reads expressions; parser.cc derives the statements from it and is
// the only file to include this one.
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "oscar/status.h"
#include "text/jinja/ast.h"
#include "text/jinja/builtins.h"
#include "text/jinja/lexer.h"

namespace oscar::jinja {

// Nesting of the source, and of the tree (left-leaning chains nest without nesting the source).
inline constexpr int kMaxSourceDepth = 80;
inline constexpr int kMaxTreeDepth = 200;

class ExpressionParser {
 public:
  explicit ExpressionParser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

 protected:
  // --- tokens
  const Token& current() const { return tokens_[at_]; }
  const Token& Next() {
    const Token& token = tokens_[at_];
    if (token.type != TokenType::kEnd) ++at_;
    return token;
  }
  bool At(TokenType type) const { return current().type == type; }
  bool AtOperator(std::string_view text) const {
    return At(TokenType::kOperator) && current().text == text;
  }
  bool AtName(std::string_view text) const {
    return At(TokenType::kName) && current().text == text;
  }
  bool SkipOperator(std::string_view text) {
    if (!AtOperator(text)) return false;
    Next();
    return true;
  }
  bool SkipName(std::string_view text) {
    if (!AtName(text)) return false;
    Next();
    return true;
  }
  static std::string Describe(const Token& token) {
    switch (token.type) {
      case TokenType::kText:
        return "text";
      case TokenType::kVariableBegin:
        return "{{";
      case TokenType::kVariableEnd:
        return "}}";
      case TokenType::kBlockBegin:
        return "{%";
      case TokenType::kBlockEnd:
        return "%}";
      case TokenType::kString:
        return fmt::format("string {:?}", token.text.substr(0, 40));
      case TokenType::kEnd:
        return "end of template";
      default:
        return token.text;
    }
  }
  Status Error(std::string_view message) const { return TemplateError(current().line, message); }
  Status Expected(std::string_view what) const {
    return Error(fmt::format("expected {}, found {}", what, Describe(current())));
  }
  Status ExpectOperator(std::string_view text) {
    return SkipOperator(text) ? Status() : Expected(text);
  }
  Status ExpectName(std::string_view text) { return SkipName(text) ? Status() : Expected(text); }
  Status ExpectBlockEnd() {
    if (!At(TokenType::kBlockEnd)) return Expected("%}");
    Next();
    return {};
  }

  // --- building
  class DepthGuard {
   public:
    explicit DepthGuard(int* depth) : depth_(depth) { ++*depth_; }
    ~DepthGuard() { --*depth_; }

   private:
    int* depth_;
  };

  Symbol Intern(const std::string& name) {
    const auto [it, inserted] = symbols_.try_emplace(name, static_cast<Symbol>(tree_.names.size()));
    if (inserted) tree_.names.push_back(name);
    return it->second;
  }
  static ExprPtr Make(ExprKind kind, int line) {
    auto expr = std::make_unique<Expr>();
    expr->kind = kind;
    expr->line = line;
    return expr;
  }
  Status Adopt(Expr* parent, ExprPtr child) {
    if (child != nullptr) {
      parent->depth = std::max(parent->depth, child->depth + 1);
      if (parent->depth > kMaxTreeDepth) return Error("the expression is nested too deeply");
    }
    parent->children.push_back(std::move(child));
    return {};
  }
  Result<ExprPtr> Combine(ExprKind kind, int line, std::string text, ExprPtr left, ExprPtr right) {
    ExprPtr expr = Make(kind, line);
    expr->text = std::move(text);
    OSCAR_RETURN_IF_ERROR(Adopt(expr.get(), std::move(left)));
    if (right != nullptr) OSCAR_RETURN_IF_ERROR(Adopt(expr.get(), std::move(right)));
    return expr;
  }

  // --- expressions
  Result<ExprPtr> ParseExpression() { return ParseCondition(); }

  Result<ExprPtr> ParseCondition() {
    if (depth_ > kMaxSourceDepth) return Unexpected(Error("the expression is nested too deeply"));
    const DepthGuard guard(&depth_);
    OSCAR_ASSIGN_OR_RETURN(ExprPtr expr, ParseOr());
    while (AtName("if")) {
      const int line = Next().line;
      ExprPtr condition = Make(ExprKind::kCondition, line);
      OSCAR_ASSIGN_OR_RETURN(ExprPtr test, ParseOr());
      ExprPtr otherwise;
      if (SkipName("else")) {
        OSCAR_ASSIGN_OR_RETURN(otherwise, ParseCondition());
      }
      OSCAR_RETURN_IF_ERROR(Adopt(condition.get(), std::move(test)));
      OSCAR_RETURN_IF_ERROR(Adopt(condition.get(), std::move(expr)));
      OSCAR_RETURN_IF_ERROR(Adopt(condition.get(), std::move(otherwise)));
      expr = std::move(condition);
    }
    return expr;
  }

  Result<ExprPtr> ParseOr() {
    OSCAR_ASSIGN_OR_RETURN(ExprPtr left, ParseAnd());
    while (AtName("or")) {
      const int line = Next().line;
      OSCAR_ASSIGN_OR_RETURN(ExprPtr right, ParseAnd());
      OSCAR_ASSIGN_OR_RETURN(left,
                             Combine(ExprKind::kOr, line, "or", std::move(left), std::move(right)));
    }
    return left;
  }

  Result<ExprPtr> ParseAnd() {
    OSCAR_ASSIGN_OR_RETURN(ExprPtr left, ParseNot());
    while (AtName("and")) {
      const int line = Next().line;
      OSCAR_ASSIGN_OR_RETURN(ExprPtr right, ParseNot());
      OSCAR_ASSIGN_OR_RETURN(
          left, Combine(ExprKind::kAnd, line, "and", std::move(left), std::move(right)));
    }
    return left;
  }

  Result<ExprPtr> ParseNot() {
    if (!AtName("not")) return ParseCompare();
    if (depth_ > kMaxSourceDepth) return Unexpected(Error("the expression is nested too deeply"));
    const DepthGuard guard(&depth_);
    const int line = Next().line;
    OSCAR_ASSIGN_OR_RETURN(ExprPtr inner, ParseNot());
    return Combine(ExprKind::kNot, line, "not", std::move(inner), nullptr);
  }

  Result<ExprPtr> ParseCompare() {
    const int line = current().line;
    OSCAR_ASSIGN_OR_RETURN(ExprPtr first, ParseSum());
    ExprPtr compare;
    while (true) {
      std::string op;
      if (At(TokenType::kOperator) &&
          (current().text == "==" || current().text == "!=" || current().text == "<" ||
           current().text == "<=" || current().text == ">" || current().text == ">=")) {
        op = Next().text;
      } else if (SkipName("in")) {
        op = "in";
      } else if (AtName("not") && at_ + 1 < tokens_.size() &&
                 tokens_[at_ + 1].type == TokenType::kName && tokens_[at_ + 1].text == "in") {
        Next();
        Next();
        op = "not in";
      } else {
        break;
      }
      if (compare == nullptr) {
        compare = Make(ExprKind::kCompare, line);
        OSCAR_RETURN_IF_ERROR(Adopt(compare.get(), std::move(first)));
      }
      OSCAR_ASSIGN_OR_RETURN(ExprPtr right, ParseSum());
      OSCAR_RETURN_IF_ERROR(Adopt(compare.get(), std::move(right)));
      compare->operators.push_back(std::move(op));
    }
    return compare != nullptr ? std::move(compare) : std::move(first);
  }

  Result<ExprPtr> ParseSum() {
    OSCAR_ASSIGN_OR_RETURN(ExprPtr left, ParseConcat());
    while (AtOperator("+") || AtOperator("-")) {
      const Token op = Next();
      OSCAR_ASSIGN_OR_RETURN(ExprPtr right, ParseConcat());
      OSCAR_ASSIGN_OR_RETURN(left, Combine(ExprKind::kArithmetic, op.line, op.text, std::move(left),
                                           std::move(right)));
    }
    return left;
  }

  Result<ExprPtr> ParseConcat() {
    const int line = current().line;
    OSCAR_ASSIGN_OR_RETURN(ExprPtr first, ParseProduct());
    if (!AtOperator("~")) return first;
    ExprPtr concat = Make(ExprKind::kConcat, line);
    OSCAR_RETURN_IF_ERROR(Adopt(concat.get(), std::move(first)));
    while (SkipOperator("~")) {
      OSCAR_ASSIGN_OR_RETURN(ExprPtr next, ParseProduct());
      OSCAR_RETURN_IF_ERROR(Adopt(concat.get(), std::move(next)));
    }
    return concat;
  }

  Result<ExprPtr> ParseProduct() {
    OSCAR_ASSIGN_OR_RETURN(ExprPtr left, ParsePower());
    while (AtOperator("*") || AtOperator("/") || AtOperator("//") || AtOperator("%")) {
      const Token op = Next();
      OSCAR_ASSIGN_OR_RETURN(ExprPtr right, ParsePower());
      OSCAR_ASSIGN_OR_RETURN(left, Combine(ExprKind::kArithmetic, op.line, op.text, std::move(left),
                                           std::move(right)));
    }
    return left;
  }

  Result<ExprPtr> ParsePower() {
    OSCAR_ASSIGN_OR_RETURN(ExprPtr left, ParseUnary(true));
    while (AtOperator("**")) {
      const int line = Next().line;
      OSCAR_ASSIGN_OR_RETURN(ExprPtr right, ParseUnary(true));
      OSCAR_ASSIGN_OR_RETURN(
          left, Combine(ExprKind::kArithmetic, line, "**", std::move(left), std::move(right)));
    }
    return left;
  }

  Result<ExprPtr> ParseUnary(bool with_filter) {
    if (depth_ > kMaxSourceDepth) return Unexpected(Error("the expression is nested too deeply"));
    const DepthGuard guard(&depth_);
    ExprPtr expr;
    if (AtOperator("-") || AtOperator("+")) {
      const Token op = Next();
      OSCAR_ASSIGN_OR_RETURN(ExprPtr inner, ParseUnary(false));
      OSCAR_ASSIGN_OR_RETURN(expr, Combine(op.text == "-" ? ExprKind::kNegate : ExprKind::kPlus,
                                           op.line, op.text, std::move(inner), nullptr));
    } else {
      OSCAR_ASSIGN_OR_RETURN(expr, ParsePrimary());
    }
    OSCAR_ASSIGN_OR_RETURN(expr, ParsePostfix(std::move(expr)));
    if (!with_filter) return expr;
    return ParseFilters(std::move(expr));
  }

  Result<ExprPtr> ParsePrimary() {
    const Token token = current();
    ExprPtr expr = Make(ExprKind::kConstant, token.line);
    switch (token.type) {
      case TokenType::kName:
        Next();
        if (token.text == "true" || token.text == "True") {
          expr->constant = Value(true);
        } else if (token.text == "false" || token.text == "False") {
          expr->constant = Value(false);
        } else if (token.text != "none" && token.text != "None") {
          expr->kind = ExprKind::kName;
          expr->symbol = Intern(token.text);
          if (!macros_.empty()) {
            Macro& macro = *macros_.back();
            macro.takes_extra_positional |= token.text == "varargs";
            macro.takes_extra_keywords |= token.text == "kwargs";
            macro.takes_caller |= token.text == "caller";
          }
        }
        return expr;
      case TokenType::kString: {
        std::string text;
        while (At(TokenType::kString)) text += Next().text;
        expr->constant = Value::Text(std::move(text));
        return expr;
      }
      case TokenType::kInteger: {
        OSCAR_ASSIGN_OR_RETURN(expr->constant, ParseInteger(token));
        Next();
        return expr;
      }
      case TokenType::kFloat: {
        double value = 0;
        const char* end = token.text.data() + token.text.size();
        const auto [stop, error] = std::from_chars(token.text.data(), end, value);
        if (error != std::errc() || stop != end) return Unexpected(Expected("a number"));
        expr->constant = Value(value);
        Next();
        return expr;
      }
      default:
        break;
    }
    if (SkipOperator("(")) {
      OSCAR_ASSIGN_OR_RETURN(expr, ParseTuple(true, true));
      OSCAR_RETURN_IF_ERROR(ExpectOperator(")"));
      return expr;
    }
    if (SkipOperator("[")) {
      expr->kind = ExprKind::kList;
      while (!AtOperator("]")) {
        if (!expr->children.empty()) OSCAR_RETURN_IF_ERROR(ExpectOperator(","));
        if (AtOperator("]")) break;
        OSCAR_ASSIGN_OR_RETURN(ExprPtr item, ParseExpression());
        OSCAR_RETURN_IF_ERROR(Adopt(expr.get(), std::move(item)));
      }
      Next();
      return expr;
    }
    if (SkipOperator("{")) {
      expr->kind = ExprKind::kDict;
      while (!AtOperator("}")) {
        if (!expr->children.empty()) OSCAR_RETURN_IF_ERROR(ExpectOperator(","));
        if (AtOperator("}")) break;
        OSCAR_ASSIGN_OR_RETURN(ExprPtr key, ParseExpression());
        OSCAR_RETURN_IF_ERROR(ExpectOperator(":"));
        OSCAR_ASSIGN_OR_RETURN(ExprPtr value, ParseExpression());
        OSCAR_RETURN_IF_ERROR(Adopt(expr.get(), std::move(key)));
        OSCAR_RETURN_IF_ERROR(Adopt(expr.get(), std::move(value)));
      }
      Next();
      return expr;
    }
    return Unexpected(Expected("an expression"));
  }

  Result<Value> ParseInteger(const Token& token) const {
    std::string_view digits = token.text;
    int base = 10;
    if (digits.size() > 2 && digits[0] == '0' && digits[1] > '9') {
      base = digits[1] == 'x' ? 16 : (digits[1] == 'o' ? 8 : 2);
      digits.remove_prefix(2);
    }
    int64_t value = 0;
    const char* end = digits.data() + digits.size();
    const auto [stop, error] = std::from_chars(digits.data(), end, value, base);
    if (error != std::errc() || stop != end) {
      return Unexpected(Error(fmt::format("integer {} is too large", token.text)));
    }
    return Value(value);
  }

  bool AtTupleEnd() const {
    return At(TokenType::kVariableEnd) || At(TokenType::kBlockEnd) || AtOperator(")") ||
           AtName("in") || AtName("recursive");
  }

  // One expression, or a tuple of several. Without `with_condition` an "if" ends it.
  Result<ExprPtr> ParseTuple(bool with_condition, bool in_parentheses) {
    const int line = current().line;
    std::vector<ExprPtr> items;
    bool is_tuple = false;
    while (true) {
      if (!items.empty()) OSCAR_RETURN_IF_ERROR(ExpectOperator(","));
      if (AtTupleEnd()) break;
      auto item = with_condition ? ParseExpression() : ParseOr();
      if (!item.has_value()) return Unexpected(item.error());
      items.push_back(std::move(item).value());
      if (!AtOperator(",")) break;
      is_tuple = true;
    }
    if (!is_tuple && !items.empty()) return std::move(items.front());
    if (!is_tuple && !in_parentheses) return Unexpected(Expected("an expression"));
    ExprPtr tuple = Make(ExprKind::kTuple, line);
    for (auto& item : items) OSCAR_RETURN_IF_ERROR(Adopt(tuple.get(), std::move(item)));
    return tuple;
  }

  Result<ExprPtr> ParsePostfix(ExprPtr expr) {
    while (true) {
      if (AtOperator(".")) {
        const int line = Next().line;
        const Token token = current();
        if (token.type == TokenType::kName) {
          Next();
          OSCAR_ASSIGN_OR_RETURN(
              expr, Combine(ExprKind::kAttribute, line, token.text, std::move(expr), nullptr));
        } else if (token.type == TokenType::kInteger) {
          ExprPtr index = Make(ExprKind::kConstant, token.line);
          OSCAR_ASSIGN_OR_RETURN(index->constant, ParseInteger(token));
          Next();
          OSCAR_ASSIGN_OR_RETURN(
              expr, Combine(ExprKind::kItem, line, "", std::move(expr), std::move(index)));
        } else {
          return Unexpected(Expected("a name or number after the dot"));
        }
      } else if (AtOperator("[")) {
        OSCAR_ASSIGN_OR_RETURN(expr, ParseSubscript(std::move(expr)));
      } else if (AtOperator("(")) {
        OSCAR_ASSIGN_OR_RETURN(expr, ParseCall(std::move(expr)));
      } else {
        return expr;
      }
    }
  }

  Result<ExprPtr> ParseSubscript(ExprPtr object) {
    const int line = Next().line;
    std::array<ExprPtr, 3> bounds;
    int count = 0;  // colons seen
    if (AtOperator("]")) return Unexpected(Expected("an index"));
    while (true) {
      if (!AtOperator(":") && !AtOperator("]")) {
        OSCAR_ASSIGN_OR_RETURN(bounds[static_cast<size_t>(count)], ParseExpression());
      }
      if (count < 2 && SkipOperator(":")) {
        ++count;
        continue;
      }
      break;
    }
    if (AtOperator(",")) return Unexpected(Error("a tuple as an index is not supported"));
    OSCAR_RETURN_IF_ERROR(ExpectOperator("]"));
    if (count == 0) {
      return Combine(ExprKind::kItem, line, "", std::move(object), std::move(bounds[0]));
    }
    ExprPtr slice = Make(ExprKind::kSlice, line);
    OSCAR_RETURN_IF_ERROR(Adopt(slice.get(), std::move(object)));
    for (auto& bound : bounds) OSCAR_RETURN_IF_ERROR(Adopt(slice.get(), std::move(bound)));
    return slice;
  }

  // Arguments in parentheses, appended to `call`.
  Status ParseArguments(Expr* call) {
    OSCAR_RETURN_IF_ERROR(ExpectOperator("("));
    bool first = true;
    while (!AtOperator(")")) {
      if (!std::exchange(first, false)) {
        OSCAR_RETURN_IF_ERROR(ExpectOperator(","));
        if (AtOperator(")")) break;
      }
      if (AtOperator("*") || AtOperator("**")) {
        return Error("* and ** arguments are not supported");
      }
      if (At(TokenType::kName) && at_ + 1 < tokens_.size() &&
          tokens_[at_ + 1].type == TokenType::kOperator && tokens_[at_ + 1].text == "=") {
        const std::string name = Next().text;
        Next();
        OSCAR_ASSIGN_OR_RETURN(ExprPtr value, ParseExpression());
        call->depth = std::max(call->depth, value->depth + 1);
        if (call->depth > kMaxTreeDepth) return Error("the expression is nested too deeply");
        call->keywords.emplace_back(name, std::move(value));
      } else {
        if (!call->keywords.empty()) return Error("a positional argument follows a keyword one");
        OSCAR_ASSIGN_OR_RETURN(ExprPtr value, ParseExpression());
        OSCAR_RETURN_IF_ERROR(Adopt(call, std::move(value)));
      }
    }
    Next();
    return {};
  }

  Result<ExprPtr> ParseCall(ExprPtr callee) {
    ExprPtr call = Make(ExprKind::kCall, current().line);
    OSCAR_RETURN_IF_ERROR(Adopt(call.get(), std::move(callee)));
    OSCAR_RETURN_IF_ERROR(ParseArguments(call.get()));
    return call;
  }

  // A name with dots, as filters and tests may have.
  Result<std::string> ParseDottedName() {
    if (!At(TokenType::kName)) return Unexpected(Expected("a name"));
    std::string name = Next().text;
    while (SkipOperator(".")) {
      if (!At(TokenType::kName)) return Unexpected(Expected("a name"));
      name += "." + Next().text;
    }
    return name;
  }

  // `input` is null in a filter block. The "|" (or the block's keyword) has been read.
  Result<ExprPtr> ParseOneFilter(ExprPtr input) {
    ExprPtr expr = Make(ExprKind::kFilter, current().line);
    OSCAR_ASSIGN_OR_RETURN(expr->text, ParseDottedName());
    expr->filter = FindFilter(expr->text);
    if (expr->filter == nullptr) {
      return Unexpected(
          TemplateError(expr->line, fmt::format("no filter named \"{}\"", expr->text)));
    }
    OSCAR_RETURN_IF_ERROR(Adopt(expr.get(), std::move(input)));
    if (AtOperator("(")) OSCAR_RETURN_IF_ERROR(ParseArguments(expr.get()));
    return expr;
  }

  Result<ExprPtr> ParseTest(ExprPtr input) {
    const int line = Next().line;  // is
    const bool negated = SkipName("not");
    ExprPtr expr = Make(ExprKind::kTest, line);
    OSCAR_ASSIGN_OR_RETURN(expr->text, ParseDottedName());
    expr->test = FindTest(expr->text);
    if (expr->test == nullptr) {
      return Unexpected(TemplateError(line, fmt::format("no test named \"{}\"", expr->text)));
    }
    OSCAR_RETURN_IF_ERROR(Adopt(expr.get(), std::move(input)));
    if (AtOperator("(")) {
      OSCAR_RETURN_IF_ERROR(ParseArguments(expr.get()));
    } else if ((At(TokenType::kName) && !AtName("else") && !AtName("or") && !AtName("and")) ||
               At(TokenType::kString) || At(TokenType::kInteger) || At(TokenType::kFloat) ||
               AtOperator("[") || AtOperator("{")) {
      if (AtName("is")) return Unexpected(Error("tests cannot be chained"));
      OSCAR_ASSIGN_OR_RETURN(ExprPtr argument, ParsePrimary());
      OSCAR_ASSIGN_OR_RETURN(argument, ParsePostfix(std::move(argument)));
      OSCAR_RETURN_IF_ERROR(Adopt(expr.get(), std::move(argument)));
    }
    if (!negated) return expr;
    return Combine(ExprKind::kNot, line, "not", std::move(expr), nullptr);
  }

  Result<ExprPtr> ParseFilters(ExprPtr expr) {
    while (true) {
      if (SkipOperator("|")) {
        OSCAR_ASSIGN_OR_RETURN(expr, ParseOneFilter(std::move(expr)));
      } else if (AtName("is")) {
        OSCAR_ASSIGN_OR_RETURN(expr, ParseTest(std::move(expr)));
      } else if (AtOperator("(")) {
        OSCAR_ASSIGN_OR_RETURN(expr, ParseCall(std::move(expr)));
      } else {
        return expr;
      }
    }
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
  int loops_ = 0;
  SyntaxTree tree_;
  std::map<std::string, Symbol, std::less<>> symbols_;
  std::vector<Macro*> macros_;  // being parsed, innermost last
};

}  // namespace oscar::jinja
