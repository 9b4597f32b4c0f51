#include "text/jinja/parser.h"

#include <fmt/core.h>

#include <initializer_list>
#include <utility>

#include "text/jinja/expression_parser.h"

namespace oscar::jinja {
namespace {

class Parser : public ExpressionParser {
 public:
  using ExpressionParser::ExpressionParser;

  Result<SyntaxTree> Run() {
    OSCAR_ASSIGN_OR_RETURN(tree_.body, ParseBlock({}, "template"));
    return std::move(tree_);
  }

 private:
  // --- statements
  using Names = std::initializer_list<std::string_view>;

  bool AtAnyName(Names names) const {
    for (const std::string_view name : names) {
      if (AtName(name)) return true;
    }
    return false;
  }

  static std::unique_ptr<Statement> MakeStatement(StatementKind kind, int line) {
    auto statement = std::make_unique<Statement>();
    statement->kind = kind;
    statement->line = line;
    return statement;
  }

  // Statements up to a tag whose name is in `ends`; stops at that name. `what` encloses them.
  Result<Block> ParseBlock(Names ends, std::string_view what) {
    if (depth_ > kMaxSourceDepth) return Unexpected(Error("blocks are nested too deeply"));
    const DepthGuard guard(&depth_);
    const int opened = at_ > 0 ? tokens_[at_ - 1].line : 1;
    Block block;
    while (!At(TokenType::kEnd)) {
      const int line = current().line;
      if (At(TokenType::kText)) {
        auto text = MakeStatement(StatementKind::kText, line);
        text->text = Next().text;
        block.push_back(std::move(text));
      } else if (At(TokenType::kVariableBegin)) {
        Next();
        auto print = MakeStatement(StatementKind::kPrint, line);
        OSCAR_ASSIGN_OR_RETURN(ExprPtr expr, ParseTuple(true, false));
        if (!At(TokenType::kVariableEnd)) return Unexpected(Expected("}}"));
        Next();
        print->exprs.push_back(std::move(expr));
        block.push_back(std::move(print));
      } else {
        Next();
        if (AtAnyName(ends)) return block;
        if (!At(TokenType::kName)) return Unexpected(Expected("the name of a tag"));
        OSCAR_ASSIGN_OR_RETURN(auto statement, ParseStatement());
        block.push_back(std::move(statement));
      }
    }
    if (ends.size() == 0) return block;
    return Unexpected(
        TemplateError(opened, fmt::format("{} is not closed by {}", what, *(ends.end() - 1))));
  }

  // A block, its closing name and the end of that tag.
  Result<Block> ParseBody(std::string_view end, std::string_view what) {
    OSCAR_RETURN_IF_ERROR(ExpectBlockEnd());
    OSCAR_ASSIGN_OR_RETURN(Block body, ParseBlock({end}, what));
    Next();
    OSCAR_RETURN_IF_ERROR(ExpectBlockEnd());
    return body;
  }

  Result<std::unique_ptr<Statement>> ParseStatement() {
    const Token token = Next();
    auto statement = MakeStatement(StatementKind::kText, token.line);
    if (token.text == "if") return ParseIf(std::move(statement));
    if (token.text == "for") return ParseFor(std::move(statement));
    if (token.text == "set") return ParseSet(std::move(statement));
    if (token.text == "macro") return ParseMacro(std::move(statement));
    if (token.text == "call") return ParseCallBlock(std::move(statement));
    if (token.text == "with") return ParseWith(std::move(statement));
    if (token.text == "filter") {
      statement->kind = StatementKind::kFilterBlock;
      OSCAR_ASSIGN_OR_RETURN(ExprPtr filter, ParseOneFilter(nullptr));
      while (SkipOperator("|")) {
        OSCAR_ASSIGN_OR_RETURN(filter, ParseOneFilter(std::move(filter)));
      }
      statement->exprs.push_back(std::move(filter));
      OSCAR_ASSIGN_OR_RETURN(Block body, ParseBody("endfilter", "filter"));
      statement->blocks.push_back(std::move(body));
      return statement;
    }
    if (token.text == "generation") {
      // Marks what the assistant wrote, for training; as text it stands for its body.
      statement->kind = StatementKind::kScope;
      OSCAR_ASSIGN_OR_RETURN(Block body, ParseBody("endgeneration", "generation"));
      statement->blocks.push_back(std::move(body));
      return statement;
    }
    if (token.text == "break" || token.text == "continue") {
      if (loops_ == 0) {
        return Unexpected(TemplateError(token.line, fmt::format("{} outside a loop", token.text)));
      }
      statement->kind = token.text == "break" ? StatementKind::kBreak : StatementKind::kContinue;
      OSCAR_RETURN_IF_ERROR(ExpectBlockEnd());
      return statement;
    }
    for (const std::string_view name :
         {"include", "import", "from", "extends", "block", "autoescape", "do", "trans", "debug"}) {
      if (token.text == name) {
        return Unexpected(TemplateError(
            token.line, fmt::format("the tag \"{}\" is not supported in chat templates", name)));
      }
    }
    return Unexpected(TemplateError(token.line, fmt::format("unknown tag \"{}\"", token.text)));
  }

  Result<std::unique_ptr<Statement>> ParseIf(std::unique_ptr<Statement> statement) {
    statement->kind = StatementKind::kIf;
    while (true) {
      OSCAR_ASSIGN_OR_RETURN(ExprPtr condition, ParseTuple(false, false));
      OSCAR_RETURN_IF_ERROR(ExpectBlockEnd());
      OSCAR_ASSIGN_OR_RETURN(Block body, ParseBlock({"elif", "else", "endif"}, "if"));
      statement->exprs.push_back(std::move(condition));
      statement->blocks.push_back(std::move(body));
      const std::string end = Next().text;
      if (end == "elif") continue;
      if (end == "else") {
        OSCAR_ASSIGN_OR_RETURN(Block otherwise, ParseBody("endif", "if"));
        statement->blocks.push_back(std::move(otherwise));
        return statement;
      }
      OSCAR_RETURN_IF_ERROR(ExpectBlockEnd());
      return statement;
    }
  }

  Result<Target> ParseOneTarget(bool with_attribute) {
    if (depth_ > kMaxSourceDepth) return Unexpected(Error("targets are nested too deeply"));
    const DepthGuard guard(&depth_);
    if (SkipOperator("(")) {
      OSCAR_ASSIGN_OR_RETURN(Target target, ParseTarget(with_attribute));
      OSCAR_RETURN_IF_ERROR(ExpectOperator(")"));
      return target;
    }
    if (!At(TokenType::kName)) return Unexpected(Expected("a name to assign to"));
    for (const std::string_view name : {"true", "false", "none", "True", "False", "None"}) {
      if (AtName(name)) return Unexpected(Error(fmt::format("cannot assign to {}", name)));
    }
    Target target;
    target.symbol = Intern(Next().text);
    if (with_attribute && SkipOperator(".")) {
      if (!At(TokenType::kName)) return Unexpected(Expected("an attribute"));
      target.kind = Target::Kind::kAttribute;
      target.attribute = Next().text;
    }
    return target;
  }

  Result<Target> ParseTarget(bool with_attribute) {
    OSCAR_ASSIGN_OR_RETURN(Target first, ParseOneTarget(with_attribute));
    if (!AtOperator(",")) return first;
    Target tuple;
    tuple.kind = Target::Kind::kTuple;
    tuple.parts.push_back(std::move(first));
    while (SkipOperator(",")) {
      if (AtName("in") || AtOperator("=") || AtOperator(")")) break;
      OSCAR_ASSIGN_OR_RETURN(Target next, ParseOneTarget(with_attribute));
      tuple.parts.push_back(std::move(next));
    }
    return tuple;
  }

  bool Assigns(const Target& target, std::string_view name) const {
    if (target.kind == Target::Kind::kName) return tree_.names[target.symbol] == name;
    for (const Target& part : target.parts) {
      if (Assigns(part, name)) return true;
    }
    return false;
  }

  Result<std::unique_ptr<Statement>> ParseFor(std::unique_ptr<Statement> statement) {
    statement->kind = StatementKind::kFor;
    OSCAR_ASSIGN_OR_RETURN(Target target, ParseTarget(false));
    if (Assigns(target, "loop")) return Unexpected(Error("a loop cannot assign to \"loop\""));
    statement->targets.push_back(std::move(target));
    OSCAR_RETURN_IF_ERROR(ExpectName("in"));
    OSCAR_ASSIGN_OR_RETURN(ExprPtr iterable, ParseTuple(false, false));
    ExprPtr condition;
    if (SkipName("if")) {
      OSCAR_ASSIGN_OR_RETURN(condition, ParseExpression());
    }
    if (AtName("recursive")) return Unexpected(Error("recursive loops are not supported"));
    statement->exprs.push_back(std::move(iterable));
    statement->exprs.push_back(std::move(condition));
    OSCAR_RETURN_IF_ERROR(ExpectBlockEnd());
    ++loops_;
    auto body = ParseBlock({"else", "endfor"}, "for");
    --loops_;
    if (!body.has_value()) return Unexpected(body.error());
    statement->blocks.push_back(std::move(body).value());
    if (SkipName("else")) {
      OSCAR_ASSIGN_OR_RETURN(Block otherwise, ParseBody("endfor", "for"));
      statement->blocks.push_back(std::move(otherwise));
      return statement;
    }
    Next();
    OSCAR_RETURN_IF_ERROR(ExpectBlockEnd());
    return statement;
  }

  Result<std::unique_ptr<Statement>> ParseSet(std::unique_ptr<Statement> statement) {
    OSCAR_ASSIGN_OR_RETURN(Target target, ParseTarget(true));
    statement->targets.push_back(std::move(target));
    if (SkipOperator("=")) {
      statement->kind = StatementKind::kSet;
      OSCAR_ASSIGN_OR_RETURN(ExprPtr value, ParseTuple(true, false));
      statement->exprs.push_back(std::move(value));
      OSCAR_RETURN_IF_ERROR(ExpectBlockEnd());
      return statement;
    }
    statement->kind = StatementKind::kSetBlock;
    ExprPtr filter;
    while (SkipOperator("|")) {
      OSCAR_ASSIGN_OR_RETURN(filter, ParseOneFilter(std::move(filter)));
    }
    statement->exprs.push_back(std::move(filter));
    OSCAR_ASSIGN_OR_RETURN(Block body, ParseBody("endset", "set"));
    statement->blocks.push_back(std::move(body));
    return statement;
  }

  Status ParseParameters(Macro* macro) {
    OSCAR_RETURN_IF_ERROR(ExpectOperator("("));
    while (!AtOperator(")")) {
      if (!macro->parameters.empty()) OSCAR_RETURN_IF_ERROR(ExpectOperator(","));
      if (!At(TokenType::kName)) return Expected("a parameter");
      macro->parameter_names.push_back(Next().text);
      macro->parameters.push_back(Intern(macro->parameter_names.back()));
      if (SkipOperator("=")) {
        OSCAR_ASSIGN_OR_RETURN(ExprPtr value, ParseExpression());
        macro->defaults.push_back(std::move(value));
      } else if (!macro->defaults.empty()) {
        return Error("a parameter without default follows one with");
      }
    }
    Next();
    return {};
  }

  Status ParseMacroBody(Macro* macro, std::string_view end, std::string_view what) {
    const int loops = std::exchange(loops_, 0);  // break does not reach out of a macro
    macros_.push_back(macro);
    auto body = ParseBody(end, what);
    macros_.pop_back();
    loops_ = loops;
    if (!body.has_value()) return body.error();
    macro->body = std::move(body).value();
    return {};
  }

  Result<std::unique_ptr<Statement>> ParseMacro(std::unique_ptr<Statement> statement) {
    statement->kind = StatementKind::kMacro;
    statement->macro = std::make_unique<Macro>();
    if (!At(TokenType::kName)) return Unexpected(Expected("the name of a macro"));
    statement->macro->name = Next().text;
    statement->symbol = Intern(statement->macro->name);
    OSCAR_RETURN_IF_ERROR(ParseParameters(statement->macro.get()));
    OSCAR_RETURN_IF_ERROR(ParseMacroBody(statement->macro.get(), "endmacro", "macro"));
    return statement;
  }

  Result<std::unique_ptr<Statement>> ParseCallBlock(std::unique_ptr<Statement> statement) {
    statement->kind = StatementKind::kCallBlock;
    statement->macro = std::make_unique<Macro>();
    statement->macro->name = "caller";
    if (AtOperator("(")) OSCAR_RETURN_IF_ERROR(ParseParameters(statement->macro.get()));
    OSCAR_ASSIGN_OR_RETURN(ExprPtr call, ParseExpression());
    if (call->kind != ExprKind::kCall) return Unexpected(Expected("a call"));
    statement->exprs.push_back(std::move(call));
    OSCAR_RETURN_IF_ERROR(ParseMacroBody(statement->macro.get(), "endcall", "call"));
    return statement;
  }

  Result<std::unique_ptr<Statement>> ParseWith(std::unique_ptr<Statement> statement) {
    statement->kind = StatementKind::kWith;
    while (!At(TokenType::kBlockEnd)) {
      if (!statement->targets.empty()) OSCAR_RETURN_IF_ERROR(ExpectOperator(","));
      OSCAR_ASSIGN_OR_RETURN(Target target, ParseOneTarget(false));
      OSCAR_RETURN_IF_ERROR(ExpectOperator("="));
      OSCAR_ASSIGN_OR_RETURN(ExprPtr value, ParseExpression());
      statement->targets.push_back(std::move(target));
      statement->exprs.push_back(std::move(value));
    }
    OSCAR_ASSIGN_OR_RETURN(Block body, ParseBody("endwith", "with"));
    statement->blocks.push_back(std::move(body));
    return statement;
  }
};

}  // namespace

Result<SyntaxTree> ParseTemplate(std::string_view source) {
  OSCAR_ASSIGN_OR_RETURN(auto tokens, Tokenize(source));
  return Parser(std::move(tokens)).Run();
}

}  // namespace oscar::jinja
