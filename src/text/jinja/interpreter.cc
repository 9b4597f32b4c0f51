#include "text/jinja/interpreter.h"

#include <fmt/core.h>

#include <algorithm>

#include "text/jinja/callable.h"
#include "text/jinja/lexer.h"
#include "text/unicode.h"

namespace oscar::jinja {
namespace {

Symbol FindSymbol(const SyntaxTree& tree, std::string_view name) {
  const auto it = std::find(tree.names.begin(), tree.names.end(), name);
  return static_cast<Symbol>(it - tree.names.begin());  // past the end: no expression names it
}

}  // namespace

class Interpreter::Nested {
 public:
  explicit Nested(Interpreter* interpreter) : interpreter_(interpreter) { ++interpreter_->depth_; }
  ~Nested() { --interpreter_->depth_; }
  bool TooDeep() const { return interpreter_->depth_ > interpreter_->options_.limits.depth; }

 private:
  Interpreter* interpreter_;
};

void Interpreter::SetGlobal(Symbol symbol, Value value) {
  SetVariable(root_, symbol, std::move(value));
}

Result<MarkedText> Interpreter::Render() {
  OSCAR_ASSIGN_OR_RETURN(const Flow flow, Execute(tree_.body, root_));
  (void)flow;  // break and continue end in their loops
  return std::move(output_);
}

Status Interpreter::Error(std::string_view message) const { return TemplateError(line_, message); }

Status Interpreter::Located(const Status& status) const {
  const bool lost = status.code() == StatusCode::kInvalidArgument &&
                    !status.message().starts_with("template line ");
  return lost ? Error(status.message()) : status;
}

Status Interpreter::ChargeSteps(size_t steps) {
  steps_ += std::min(steps, options_.limits.steps + 1);
  if (steps_ <= options_.limits.steps) return {};
  return ResourceExhausted(
      fmt::format("template line {}: more than {} steps", line_, options_.limits.steps));
}

Status Interpreter::ChargeBytes(size_t bytes) {
  const size_t limit = options_.limits.work_bytes;
  if (bytes > limit || work_bytes_ > limit - bytes) {
    return ResourceExhausted(
        fmt::format("template line {}: more than {} bytes of intermediate text", line_, limit));
  }
  work_bytes_ += bytes;
  return {};
}

Result<Value> Interpreter::NewText(MarkedText text) {
  OSCAR_RETURN_IF_ERROR(ChargeBytes(text.size()));
  return Value(std::move(text));
}

Result<Value> Interpreter::NewList(std::vector<Value> items, bool is_tuple) {
  OSCAR_RETURN_IF_ERROR(ChargeBytes(items.size() * sizeof(Value)));
  auto list = MakeList(std::move(items), is_tuple);
  if (!list.has_value()) return Unexpected(Located(list.error()));
  return list;
}

Result<Value> Interpreter::NewDict(std::vector<std::pair<Value, Value>> items) {
  OSCAR_RETURN_IF_ERROR(ChargeBytes(items.size() * 2 * sizeof(Value)));
  size_t scanned = 0;  // keys that are no strings are looked for one by one
  for (size_t i = 0; i < items.size(); ++i) scanned += items[i].first.IsString() ? 0 : i;
  OSCAR_RETURN_IF_ERROR(ChargeSteps(scanned / 8));
  auto dict = MakeDict(std::move(items));
  if (!dict.has_value()) return Unexpected(Located(dict.error()));
  return dict;
}

Namespace* Interpreter::NewNamespace() { return &namespaces_.emplace_back(); }

Status Interpreter::Emit(std::string_view text) {
  if (out_->size() + text.size() > options_.limits.output_bytes) {
    return ResourceExhausted(fmt::format("template line {}: more than {} bytes of output", line_,
                                         options_.limits.output_bytes));
  }
  OSCAR_RETURN_IF_ERROR(ChargeBytes(text.size()));
  out_->Append(text, false);
  return {};
}

Status Interpreter::Emit(const MarkedText& text) {
  if (out_->size() + text.size() > options_.limits.output_bytes) {
    return ResourceExhausted(fmt::format("template line {}: more than {} bytes of output", line_,
                                         options_.limits.output_bytes));
  }
  OSCAR_RETURN_IF_ERROR(ChargeBytes(text.size()));
  out_->Append(text);
  return {};
}

Status Interpreter::Print(const Value& value) {
  if (value.IsString()) return Emit(value.text());
  OSCAR_ASSIGN_OR_RETURN(const MarkedText text, ToText(*this, value));
  return Emit(text);
}

void Interpreter::SetVariable(Scope& scope, Symbol symbol, Value value) {
  for (auto& [name, existing] : scope.variables) {
    if (name == symbol) {
      existing = std::move(value);
      return;
    }
  }
  scope.variables.emplace_back(symbol, std::move(value));
}

void Interpreter::Retire(std::unique_ptr<Scope> scope) {
  if (scope->captured) retired_.push_back(std::move(scope));
}

Status Interpreter::Assign(const Target& target, const Value& value, Scope& scope) {
  switch (target.kind) {
    case Target::Kind::kName:
      OSCAR_RETURN_IF_ERROR(ChargeSteps(scope.variables.size() / kNamesPerStep));
      SetVariable(scope, target.symbol, value);
      return {};
    case Target::Kind::kAttribute: {
      Expr name;
      name.symbol = target.symbol;
      OSCAR_ASSIGN_OR_RETURN(const Value object, EvaluateName(name, scope));
      if (object.kind() != Kind::kNamespace) {
        return Error(fmt::format("cannot set attribute \"{}\" of {}: only namespaces change",
                                 target.attribute, TypeName(object)));
      }
      for (auto& [attribute, existing] : object.space()->attributes) {
        if (attribute == target.attribute) {
          existing = value;
          return {};
        }
      }
      object.space()->attributes.emplace_back(target.attribute, value);
      return {};
    }
    case Target::Kind::kTuple: {
      OSCAR_ASSIGN_OR_RETURN(const auto items, Iterate(value));
      if (items.size() != target.parts.size()) {
        return Error(fmt::format("cannot unpack {} values into {} names", items.size(),
                                 target.parts.size()));
      }
      for (size_t i = 0; i < items.size(); ++i) {
        OSCAR_RETURN_IF_ERROR(Assign(target.parts[i], items[i], scope));
      }
      return {};
    }
  }
  return {};
}

Result<Interpreter::Flow> Interpreter::Execute(const Block& block, Scope& scope) {
  const Nested nested(this);
  if (nested.TooDeep()) return Unexpected(Error("calls are nested too deeply"));
  for (const auto& statement : block) {
    OSCAR_ASSIGN_OR_RETURN(const Flow flow, Execute(*statement, scope));
    if (flow != Flow::kNormal) return flow;
  }
  return Flow::kNormal;
}

Result<Value> Interpreter::Capture(const Block& block, Scope& scope) {
  MarkedText captured;
  MarkedText* const outer = std::exchange(out_, &captured);
  auto flow = Execute(block, scope);
  out_ = outer;
  if (!flow.has_value()) return Unexpected(flow.error());
  return Value(std::move(captured));
}

Result<Interpreter::Flow> Interpreter::ExecuteIf(const Statement& statement, Scope& scope) {
  for (size_t i = 0; i < statement.exprs.size(); ++i) {
    OSCAR_ASSIGN_OR_RETURN(const Value condition, Evaluate(*statement.exprs[i], scope));
    if (IsTrue(condition)) return Execute(statement.blocks[i], scope);
  }
  if (statement.blocks.size() > statement.exprs.size()) {
    return Execute(statement.blocks.back(), scope);
  }
  return Flow::kNormal;
}

Result<Interpreter::Flow> Interpreter::ExecuteFor(const Statement& statement, Scope& scope) {
  OSCAR_ASSIGN_OR_RETURN(const Value iterable, Evaluate(*statement.exprs[0], scope));
  OSCAR_ASSIGN_OR_RETURN(auto items, Iterate(iterable));
  const Target& target = statement.targets[0];
  const auto charge = [&]() -> Status {
    if (++iterations_ <= options_.limits.loop_iterations) return {};
    return ResourceExhausted(fmt::format("template line {}: more than {} loop iterations", line_,
                                         options_.limits.loop_iterations));
  };
  if (statement.exprs[1] != nullptr) {
    // The filter runs before the loop, so that loop.length counts what is left.
    std::vector<Value> kept;
    for (Value& item : items) {
      OSCAR_RETURN_IF_ERROR(charge());
      auto inner = std::make_unique<Scope>();
      inner->parent = &scope;
      OSCAR_RETURN_IF_ERROR(Assign(target, item, *inner));
      OSCAR_ASSIGN_OR_RETURN(const Value keep, Evaluate(*statement.exprs[1], *inner));
      if (IsTrue(keep)) kept.push_back(std::move(item));
    }
    items = std::move(kept);
  }
  const auto execute_else = [&]() -> Result<Flow> {
    if (statement.blocks.size() < 2) return Flow::kNormal;
    auto inner = std::make_unique<Scope>();
    inner->parent = &scope;
    auto flow = Execute(statement.blocks[1], *inner);
    Retire(std::move(inner));
    return flow;
  };
  if (items.empty()) return execute_else();
  bool ran_through = false;  // some iteration reached the end of its body
  const Symbol loop_symbol = FindSymbol(tree_, "loop");
  auto loop = std::make_shared<LoopState>();
  loop->items = std::make_shared<const std::vector<Value>>(std::move(items));
  loop->depth0 = loop_depth_;
  for (const Value& item : *loop->items) loop->depth = std::max(loop->depth, DepthOf(item) + 1);
  const int outer_depth = loop_depth_;
  Result<Flow> result = Flow::kNormal;
  auto inner = std::make_unique<Scope>();
  for (size_t i = 0; i < loop->items->size(); ++i) {
    if (Status status = charge(); !status.ok()) {
      result = Unexpected(std::move(status));
      break;
    }
    if (inner->captured) {
      Retire(std::move(inner));
      inner = std::make_unique<Scope>();
    }
    inner->parent = &scope;
    inner->variables.clear();
    loop->index0 = i;
    SetVariable(*inner, loop_symbol, Value(loop));
    if (Status status = Assign(target, (*loop->items)[i], *inner); !status.ok()) {
      result = Unexpected(std::move(status));
      break;
    }
    loop_depth_ = outer_depth + 1;
    result = Execute(statement.blocks[0], *inner);
    loop_depth_ = outer_depth;
    if (!result.has_value() || *result == Flow::kBreak) break;
    ran_through |= *result == Flow::kNormal;
  }
  Retire(std::move(inner));
  if (!result.has_value()) return result;
  // Jinja notes that a loop had items where the body ends, which break and continue jump over.
  return ran_through ? Flow::kNormal : execute_else();
}

Result<Value> Interpreter::MakeMacro(const Macro& macro, Scope& scope) {
  for (Scope* at = &scope; at != nullptr && !at->captured; at = at->parent) at->captured = true;
  OSCAR_RETURN_IF_ERROR(ChargeBytes(sizeof(Callable) + sizeof(Scope)));
  auto callable = std::make_shared<Callable>();
  callable->type = Callable::Type::kMacro;
  callable->name = macro.name;
  callable->macro = &macro;
  callable->closure = &scope;
  return Value(std::shared_ptr<const Callable>(std::move(callable)));
}

Result<Value> Interpreter::CallMacro(const Callable& callable, const Arguments& arguments) {
  const Macro& macro = *callable.macro;
  const Nested nested(this);
  if (nested.TooDeep()) return Unexpected(Error("macros call each other too deeply"));
  auto scope = std::make_unique<Scope>();
  scope->parent = callable.closure;
  const size_t count = macro.parameters.size();
  std::vector<std::optional<Value>> values(count);
  std::vector<Value> extra;
  for (size_t i = 0; i < arguments.positional.size(); ++i) {
    if (i < count) {
      values[i] = arguments.positional[i];
    } else {
      extra.push_back(arguments.positional[i]);
    }
  }
  if (!extra.empty() && !macro.takes_extra_positional) {
    return Unexpected(
        Error(fmt::format("macro \"{}\" takes at most {} arguments", macro.name, count)));
  }
  std::vector<std::pair<Value, Value>> extra_keywords;
  std::optional<Value> caller;
  for (const auto& [name, value] : arguments.keywords) {
    const auto it = std::find(macro.parameter_names.begin(), macro.parameter_names.end(), name);
    if (it != macro.parameter_names.end()) {
      auto& slot = values[static_cast<size_t>(it - macro.parameter_names.begin())];
      if (slot.has_value()) {
        return Unexpected(
            Error(fmt::format("macro \"{}\" got two values for \"{}\"", macro.name, name)));
      }
      slot = value;
    } else if (name == "caller" && macro.takes_caller) {
      caller = value;
    } else if (macro.takes_extra_keywords) {
      extra_keywords.emplace_back(Value::Text(name), value);
    } else {
      return Unexpected(
          Error(fmt::format("macro \"{}\" takes no argument \"{}\"", macro.name, name)));
    }
  }
  const size_t first_default = count - macro.defaults.size();
  for (size_t i = 0; i < count; ++i) {
    Value value = Value::MakeUndefined(
        fmt::format("parameter \"{}\" was not provided", macro.parameter_names[i]));
    if (values[i].has_value()) {
      value = std::move(*values[i]);
    } else if (i >= first_default) {
      OSCAR_ASSIGN_OR_RETURN(value, Evaluate(*macro.defaults[i - first_default], *scope));
    }
    SetVariable(*scope, macro.parameters[i], std::move(value));
  }
  if (macro.takes_extra_positional) {
    OSCAR_ASSIGN_OR_RETURN(Value list, NewList(std::move(extra), true));
    SetVariable(*scope, FindSymbol(tree_, "varargs"), std::move(list));
  }
  if (macro.takes_extra_keywords) {
    OSCAR_ASSIGN_OR_RETURN(Value dict, NewDict(std::move(extra_keywords)));
    SetVariable(*scope, FindSymbol(tree_, "kwargs"), std::move(dict));
  }
  if (macro.takes_caller) {
    SetVariable(*scope, FindSymbol(tree_, "caller"),
                caller.value_or(Value::MakeUndefined("no caller defined")));
  }
  const int loop_depth = std::exchange(loop_depth_, 0);
  auto text = Capture(macro.body, *scope);
  loop_depth_ = loop_depth;
  Retire(std::move(scope));
  return text;
}

Result<Interpreter::Flow> Interpreter::Execute(const Statement& statement, Scope& scope) {
  line_ = statement.line;
  OSCAR_RETURN_IF_ERROR(ChargeSteps(1));
  switch (statement.kind) {
    case StatementKind::kText:
      OSCAR_RETURN_IF_ERROR(Emit(statement.text));
      return Flow::kNormal;
    case StatementKind::kPrint: {
      OSCAR_ASSIGN_OR_RETURN(const Value value, Evaluate(*statement.exprs[0], scope));
      OSCAR_RETURN_IF_ERROR(Print(value));
      return Flow::kNormal;
    }
    case StatementKind::kIf:
      return ExecuteIf(statement, scope);
    case StatementKind::kFor:
      return ExecuteFor(statement, scope);
    case StatementKind::kSet: {
      OSCAR_ASSIGN_OR_RETURN(const Value value, Evaluate(*statement.exprs[0], scope));
      OSCAR_RETURN_IF_ERROR(Assign(statement.targets[0], value, scope));
      return Flow::kNormal;
    }
    case StatementKind::kSetBlock: {
      auto inner = std::make_unique<Scope>();
      inner->parent = &scope;
      auto value = Capture(statement.blocks[0], *inner);
      Retire(std::move(inner));
      if (!value.has_value()) return Unexpected(value.error());
      if (statement.exprs[0] != nullptr) {
        value = EvaluateFilter(*statement.exprs[0], &*value, scope);
        if (!value.has_value()) return Unexpected(value.error());
      }
      OSCAR_RETURN_IF_ERROR(Assign(statement.targets[0], *value, scope));
      return Flow::kNormal;
    }
    case StatementKind::kMacro: {
      OSCAR_ASSIGN_OR_RETURN(Value macro, MakeMacro(*statement.macro, scope));
      SetVariable(scope, statement.symbol, std::move(macro));
      return Flow::kNormal;
    }
    case StatementKind::kCallBlock: {
      const Expr& call = *statement.exprs[0];
      OSCAR_ASSIGN_OR_RETURN(const Value callee, Evaluate(*call.children[0], scope));
      OSCAR_ASSIGN_OR_RETURN(Arguments arguments, EvaluateArguments(call, scope));
      OSCAR_ASSIGN_OR_RETURN(Value caller, MakeMacro(*statement.macro, scope));
      arguments.keywords.emplace_back("caller", std::move(caller));
      OSCAR_ASSIGN_OR_RETURN(const Value value, Call(callee, arguments));
      OSCAR_RETURN_IF_ERROR(Print(value));
      return Flow::kNormal;
    }
    case StatementKind::kFilterBlock: {
      auto inner = std::make_unique<Scope>();
      inner->parent = &scope;
      const auto body = Capture(statement.blocks[0], *inner);
      Retire(std::move(inner));
      if (!body.has_value()) return Unexpected(body.error());
      OSCAR_ASSIGN_OR_RETURN(const Value value, EvaluateFilter(*statement.exprs[0], &*body, scope));
      OSCAR_RETURN_IF_ERROR(Print(value));
      return Flow::kNormal;
    }
    case StatementKind::kWith: {
      auto inner = std::make_unique<Scope>();
      inner->parent = &scope;
      for (size_t i = 0; i < statement.targets.size(); ++i) {
        OSCAR_ASSIGN_OR_RETURN(const Value value, Evaluate(*statement.exprs[i], scope));
        OSCAR_RETURN_IF_ERROR(Assign(statement.targets[i], value, *inner));
      }
      auto flow = Execute(statement.blocks[0], *inner);
      Retire(std::move(inner));
      return flow;
    }
    case StatementKind::kScope: {
      auto inner = std::make_unique<Scope>();
      inner->parent = &scope;
      auto flow = Execute(statement.blocks[0], *inner);
      Retire(std::move(inner));
      return flow;
    }
    case StatementKind::kBreak:
      return Flow::kBreak;
    case StatementKind::kContinue:
      return Flow::kContinue;
  }
  return Flow::kNormal;
}

}  // namespace oscar::jinja
