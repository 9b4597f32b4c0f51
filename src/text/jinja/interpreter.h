// Evaluates a syntax tree. One object a rendering; not for sharing between threads. Every loop,
// call and copy is charged against limits, so that a hostile template ends in an error.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "oscar/status.h"
#include "text/jinja/ast.h"
#include "text/jinja/builtins.h"
#include "text/jinja/marked_text.h"
#include "text/jinja/template.h"
#include "text/jinja/value.h"

namespace oscar::jinja {

struct Scope {
  Scope* parent = nullptr;
  std::vector<std::pair<Symbol, Value>> variables;
  bool captured = false;  // a macro refers to it, so it must outlive its block
};

class Interpreter final : public Meter {
 public:
  Interpreter(const SyntaxTree& tree, const RenderOptions& options)
      : tree_(tree), options_(options) {}

  void SetGlobal(Symbol symbol, Value value);
  Result<MarkedText> Render();

  // For the built-in functions.
  Status Error(std::string_view message) const;
  // The same with the line for errors that know none.
  Status Located(const Status& status) const;
  Status ChargeBytes(size_t bytes) override;
  Status ChargeSteps(size_t steps) override;
  Result<Value> NewText(MarkedText text);
  Result<Value> NewList(std::vector<Value> items, bool is_tuple = false);
  Result<Value> NewDict(std::vector<std::pair<Value, Value>> items);
  // The elements a loop over the value visits.
  Result<std::vector<Value>> Iterate(const Value& value);
  Result<Value> GetAttribute(const Value& object, std::string_view name);
  Result<Value> GetItem(const Value& object, const Value& key);
  // Null where the dictionary does not have it.
  Result<const Value*> FindKey(const Dict& dict, const Value& key);
  Result<bool> Contains(const Value& container, const Value& item);
  Result<Value> Call(const Value& callee, const Arguments& arguments);
  Namespace* NewNamespace();
  const RenderOptions& options() const { return options_; }

 private:
  enum class Flow : uint8_t { kNormal, kBreak, kContinue };
  class Nested;

  // interpreter.cc
  Result<Flow> Execute(const Block& block, Scope& scope);
  Result<Flow> Execute(const Statement& statement, Scope& scope);
  Result<Flow> ExecuteFor(const Statement& statement, Scope& scope);
  Result<Flow> ExecuteIf(const Statement& statement, Scope& scope);
  Status Assign(const Target& target, const Value& value, Scope& scope);
  static void SetVariable(Scope& scope, Symbol symbol, Value value);
  Result<Value> Capture(const Block& block, Scope& scope);
  Status Emit(const MarkedText& text);
  Status Emit(std::string_view text);
  Status Print(const Value& value);
  Result<Value> CallMacro(const Callable& callable, const Arguments& arguments);
  Result<Value> MakeMacro(const Macro& macro, Scope& scope);
  // Takes over scopes that macros still refer to.
  void Retire(std::unique_ptr<Scope> scope);

  // expressions.cc
  Result<Value> Evaluate(const Expr& expr, Scope& scope);
  Result<Value> EvaluateInner(const Expr& expr, Scope& scope);
  Result<Value> EvaluateName(const Expr& expr, const Scope& scope);
  Result<Value> EvaluateSlice(const Expr& expr, Scope& scope);
  Result<Value> EvaluateFilter(const Expr& expr, const Value* input, Scope& scope);
  Result<Value> EvaluateCompare(const Expr& expr, Scope& scope);
  Result<Arguments> EvaluateArguments(const Expr& expr, Scope& scope);
  Result<Value> Arithmetic(const std::string& op, const Value& left, const Value& right);
  Result<Value> IntegerArithmetic(char op, int64_t left, int64_t right);
  Result<Value> Repeat(const Value& value, int64_t count);

  static constexpr size_t kNamesPerStep = 16;  // passed over in a scope

  const SyntaxTree& tree_;
  const RenderOptions& options_;
  Scope root_;
  MarkedText output_;
  MarkedText* out_ = &output_;
  size_t steps_ = 0;
  size_t iterations_ = 0;
  size_t work_bytes_ = 0;
  int depth_ = 0;
  int loop_depth_ = 0;
  int line_ = 1;
  std::deque<Namespace> namespaces_;
  std::vector<std::unique_ptr<Scope>> retired_;
};

}  // namespace oscar::jinja
