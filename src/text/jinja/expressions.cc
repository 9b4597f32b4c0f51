// Expressions: the half of the interpreter that computes values.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "text/jinja/callable.h"
#include "text/jinja/interpreter.h"
#include "text/jinja/lexer.h"
#include "text/unicode.h"

namespace oscar::jinja {
namespace {

std::string ObjectName(const Value& value) { return fmt::format("'{} object'", TypeName(value)); }

// Loop variables by name; nothing for unknown ones.
std::optional<Value> LoopAttribute(const LoopState& loop, std::string_view name) {
  const auto length = static_cast<int64_t>(loop.items->size());
  const auto index0 = static_cast<int64_t>(loop.index0);
  if (name == "index") return Value(index0 + 1);
  if (name == "index0") return Value(index0);
  if (name == "revindex") return Value(length - index0);
  if (name == "revindex0") return Value(length - index0 - 1);
  if (name == "first") return Value(index0 == 0);
  if (name == "last") return Value(index0 + 1 == length);
  if (name == "length") return Value(length);
  if (name == "depth") return Value(static_cast<int64_t>(loop.depth0 + 1));
  if (name == "depth0") return Value(static_cast<int64_t>(loop.depth0));
  if (name == "previtem") {
    return index0 == 0 ? Value::MakeUndefined("there is no previous item")
                       : (*loop.items)[loop.index0 - 1];
  }
  if (name == "nextitem") {
    return index0 + 1 == length ? Value::MakeUndefined("there is no next item")
                                : (*loop.items)[loop.index0 + 1];
  }
  return std::nullopt;
}

// Start, stop and count of a Python slice over `length` elements; step is not zero.
struct SliceRange {
  int64_t start = 0;
  int64_t count = 0;
};
SliceRange ResolveSlice(const std::optional<int64_t>& begin, const std::optional<int64_t>& end,
                        int64_t step, int64_t length) {
  const int64_t low = step > 0 ? 0 : -1;
  const int64_t high = step > 0 ? length : length - 1;
  const auto clamp = [&](int64_t at) {
    if (at < 0) at = at < -length ? low : at + length;
    return std::clamp(at, low, high);
  };
  const int64_t start = begin ? clamp(*begin) : (step > 0 ? 0 : length - 1);
  const int64_t stop = end ? clamp(*end) : (step > 0 ? length : -1);
  SliceRange range{start, 0};
  // Unsigned arithmetic: the step may be as negative as an integer can be.
  if (step > 0 && stop > start) {
    range.count = static_cast<int64_t>(
        (static_cast<uint64_t>(stop - start) + static_cast<uint64_t>(step) - 1) /
        static_cast<uint64_t>(step));
  } else if (step < 0 && stop < start) {
    const uint64_t magnitude = 0 - static_cast<uint64_t>(step);
    range.count = static_cast<int64_t>((static_cast<uint64_t>(start - stop) - 1) / magnitude + 1);
  }
  return range;
}

double FloorMod(double left, double right) {
  double result = std::fmod(left, right);
  if (result != 0.0 && (result < 0.0) != (right < 0.0)) result += right;
  return result;
}

}  // namespace

Result<Value> Interpreter::EvaluateName(const Expr& expr, const Scope& scope) {
  for (const Scope* at = &scope; at != nullptr; at = at->parent) {
    OSCAR_RETURN_IF_ERROR(ChargeSteps(at->variables.size() / kNamesPerStep));
    for (const auto& [symbol, value] : at->variables) {
      if (symbol == expr.symbol) return value;
    }
  }
  const std::string& name = tree_.names[expr.symbol];
  if (HasFunction(name)) {
    auto callable = std::make_shared<Callable>();
    callable->name = name;
    return Value(std::shared_ptr<const Callable>(std::move(callable)));
  }
  return Value::MakeUndefined(fmt::format("'{}' is undefined", name));
}

Result<Value> Interpreter::Evaluate(const Expr& expr, Scope& scope) {
  line_ = expr.line;
  OSCAR_RETURN_IF_ERROR(ChargeSteps(1));
  if (expr.kind == ExprKind::kConstant) return expr.constant;
  if (expr.kind == ExprKind::kName) return EvaluateName(expr, scope);
  if (depth_ >= options_.limits.depth) return Unexpected(Error("calls are nested too deeply"));
  ++depth_;
  auto result = EvaluateInner(expr, scope);
  --depth_;
  if (result.has_value()) return result;
  line_ = expr.line;
  return Unexpected(Located(result.error()));
}

Result<Value> Interpreter::EvaluateInner(const Expr& expr, Scope& scope) {
  switch (expr.kind) {
    case ExprKind::kList:
    case ExprKind::kTuple: {
      std::vector<Value> items;
      items.reserve(expr.children.size());
      for (const auto& child : expr.children) {
        OSCAR_ASSIGN_OR_RETURN(Value item, Evaluate(*child, scope));
        items.push_back(std::move(item));
      }
      return NewList(std::move(items), expr.kind == ExprKind::kTuple);
    }
    case ExprKind::kDict: {
      std::vector<std::pair<Value, Value>> items;
      for (size_t i = 0; i + 1 < expr.children.size(); i += 2) {
        OSCAR_ASSIGN_OR_RETURN(Value key, Evaluate(*expr.children[i], scope));
        OSCAR_ASSIGN_OR_RETURN(Value value, Evaluate(*expr.children[i + 1], scope));
        items.emplace_back(std::move(key), std::move(value));
      }
      return NewDict(std::move(items));
    }
    case ExprKind::kAttribute: {
      OSCAR_ASSIGN_OR_RETURN(const Value object, Evaluate(*expr.children[0], scope));
      return GetAttribute(object, expr.text);
    }
    case ExprKind::kItem: {
      OSCAR_ASSIGN_OR_RETURN(const Value object, Evaluate(*expr.children[0], scope));
      OSCAR_ASSIGN_OR_RETURN(const Value key, Evaluate(*expr.children[1], scope));
      return GetItem(object, key);
    }
    case ExprKind::kSlice:
      return EvaluateSlice(expr, scope);
    case ExprKind::kCall: {
      OSCAR_ASSIGN_OR_RETURN(const Value callee, Evaluate(*expr.children[0], scope));
      OSCAR_ASSIGN_OR_RETURN(Arguments arguments, EvaluateArguments(expr, scope));
      line_ = expr.line;
      return Call(callee, arguments);
    }
    case ExprKind::kFilter:
      return EvaluateFilter(expr, nullptr, scope);
    case ExprKind::kTest: {
      OSCAR_ASSIGN_OR_RETURN(const Value input, Evaluate(*expr.children[0], scope));
      OSCAR_ASSIGN_OR_RETURN(const Arguments arguments, EvaluateArguments(expr, scope));
      OSCAR_ASSIGN_OR_RETURN(const bool held, expr.test->function(*this, input, arguments));
      return Value(held);
    }
    case ExprKind::kNot: {
      OSCAR_ASSIGN_OR_RETURN(const Value value, Evaluate(*expr.children[0], scope));
      return Value(!IsTrue(value));
    }
    case ExprKind::kNegate:
    case ExprKind::kPlus: {
      OSCAR_ASSIGN_OR_RETURN(const Value value, Evaluate(*expr.children[0], scope));
      if (value.IsUndefined()) return Unexpected(Error(value.undefined_what()));
      if (!value.IsNumber()) {
        return Unexpected(Error(fmt::format("bad operand for {}: {}", expr.text, TypeName(value))));
      }
      const bool negate = expr.kind == ExprKind::kNegate;
      if (value.IsInteger()) {
        return negate ? IntegerArithmetic('-', 0, value.integer()) : Value(value.integer());
      }
      return Value(negate ? -value.number() : value.number());
    }
    case ExprKind::kAnd:
    case ExprKind::kOr: {
      OSCAR_ASSIGN_OR_RETURN(Value left, Evaluate(*expr.children[0], scope));
      if (IsTrue(left) == (expr.kind == ExprKind::kOr)) return left;
      return Evaluate(*expr.children[1], scope);
    }
    case ExprKind::kArithmetic: {
      OSCAR_ASSIGN_OR_RETURN(const Value left, Evaluate(*expr.children[0], scope));
      OSCAR_ASSIGN_OR_RETURN(const Value right, Evaluate(*expr.children[1], scope));
      line_ = expr.line;
      return Arithmetic(expr.text, left, right);
    }
    case ExprKind::kConcat: {
      MarkedText text;
      for (const auto& child : expr.children) {
        OSCAR_ASSIGN_OR_RETURN(const Value value, Evaluate(*child, scope));
        OSCAR_ASSIGN_OR_RETURN(const MarkedText piece, ToText(*this, value));
        text.Append(piece);
      }
      return NewText(std::move(text));
    }
    case ExprKind::kCompare:
      return EvaluateCompare(expr, scope);
    case ExprKind::kCondition: {
      OSCAR_ASSIGN_OR_RETURN(const Value condition, Evaluate(*expr.children[0], scope));
      if (IsTrue(condition)) return Evaluate(*expr.children[1], scope);
      if (expr.children[2] != nullptr) return Evaluate(*expr.children[2], scope);
      return Value::MakeUndefined("the condition was false and has no else");
    }
    default:
      return Unexpected(Internal("unknown kind of expression"));
  }
}

Result<Arguments> Interpreter::EvaluateArguments(const Expr& expr, Scope& scope) {
  Arguments arguments;
  for (size_t i = 1; i < expr.children.size(); ++i) {
    OSCAR_ASSIGN_OR_RETURN(Value value, Evaluate(*expr.children[i], scope));
    arguments.positional.push_back(std::move(value));
  }
  for (const auto& [name, child] : expr.keywords) {
    OSCAR_ASSIGN_OR_RETURN(Value value, Evaluate(*child, scope));
    arguments.keywords.emplace_back(name, std::move(value));
  }
  return arguments;
}

// `input` feeds the innermost filter of a chain that stands in a block tag.
Result<Value> Interpreter::EvaluateFilter(const Expr& expr, const Value* input, Scope& scope) {
  Value value;
  if (expr.children[0] == nullptr) {
    if (input == nullptr) return Unexpected(Internal("a filter without input"));
    value = *input;
  } else if (input != nullptr && expr.children[0]->kind == ExprKind::kFilter) {
    OSCAR_ASSIGN_OR_RETURN(value, EvaluateFilter(*expr.children[0], input, scope));
  } else {
    OSCAR_ASSIGN_OR_RETURN(value, Evaluate(*expr.children[0], scope));
  }
  OSCAR_ASSIGN_OR_RETURN(const Arguments arguments, EvaluateArguments(expr, scope));
  line_ = expr.line;
  return expr.filter->function(*this, value, arguments);
}

Result<Value> Interpreter::EvaluateCompare(const Expr& expr, Scope& scope) {
  OSCAR_ASSIGN_OR_RETURN(Value left, Evaluate(*expr.children[0], scope));
  for (size_t i = 0; i < expr.operators.size(); ++i) {
    OSCAR_ASSIGN_OR_RETURN(Value right, Evaluate(*expr.children[i + 1], scope));
    const std::string& op = expr.operators[i];
    bool held = false;
    if (op == "==" || op == "!=") {
      OSCAR_ASSIGN_OR_RETURN(const bool same, Equal(*this, left, right));
      held = same == (op == "==");
    } else if (op == "in" || op == "not in") {
      OSCAR_ASSIGN_OR_RETURN(const bool inside, Contains(right, left));
      held = inside == (op == "in");
    } else {
      for (const Value* side : {&left, &right}) {
        if (side->IsUndefined()) return Unexpected(Error(side->undefined_what()));
      }
      OSCAR_ASSIGN_OR_RETURN(const int order, Compare(*this, left, right));
      held = op == "<" ? order < 0 : op == "<=" ? order <= 0 : op == ">" ? order > 0 : order >= 0;
    }
    if (!held) return Value(false);
    left = std::move(right);
  }
  return Value(true);
}

Result<const Value*> Interpreter::FindKey(const Dict& dict, const Value& key) {
  OSCAR_RETURN_IF_ERROR(ChargeSteps(dict.FindCost(key)));
  return dict.Find(key);
}

Result<bool> Interpreter::Contains(const Value& container, const Value& item) {
  switch (container.kind()) {
    case Kind::kString:
      if (!item.IsString()) {
        return Unexpected(
            Error(fmt::format("only a string can be in a string, not {}", TypeName(item))));
      }
      OSCAR_RETURN_IF_ERROR(ChargeSteps(container.str().size() / 64));
      return FindText(container.str(), item.str()) != std::string::npos;
    case Kind::kList:
      for (const Value& candidate : container.list().items) {
        OSCAR_ASSIGN_OR_RETURN(const bool same, Equal(*this, candidate, item));
        if (same) return true;
      }
      return false;
    case Kind::kDict: {
      OSCAR_ASSIGN_OR_RETURN(const Value* found, FindKey(container.dict(), item));
      return found != nullptr;
    }
    case Kind::kUndefined:
      return false;
    default:
      return Unexpected(
          Error(fmt::format("{} cannot be searched with \"in\"", TypeName(container))));
  }
}

Result<Value> Interpreter::EvaluateSlice(const Expr& expr, Scope& scope) {
  OSCAR_ASSIGN_OR_RETURN(const Value object, Evaluate(*expr.children[0], scope));
  std::array<std::optional<int64_t>, 3> bounds;
  for (size_t i = 0; i < 3; ++i) {
    if (expr.children[i + 1] == nullptr) continue;
    OSCAR_ASSIGN_OR_RETURN(const Value bound, Evaluate(*expr.children[i + 1], scope));
    if (bound.IsNone()) continue;
    if (!bound.IsInteger()) {
      return Unexpected(Error(fmt::format("a slice needs integers, not {}", TypeName(bound))));
    }
    bounds[i] = bound.integer();
  }
  const int64_t step = bounds[2].value_or(1);
  if (step == 0) return Unexpected(Error("a slice cannot have step 0"));
  if (object.IsUndefined()) return Unexpected(Error(object.undefined_what()));
  if (object.IsList()) {
    const auto& items = object.list().items;
    const SliceRange range =
        ResolveSlice(bounds[0], bounds[1], step, static_cast<int64_t>(items.size()));
    std::vector<Value> out;
    out.reserve(static_cast<size_t>(range.count));
    for (int64_t i = 0; i < range.count; ++i) {
      out.push_back(items[static_cast<size_t>(range.start + i * step)]);
    }
    return NewList(std::move(out), object.list().is_tuple);
  }
  if (object.IsString()) {
    const MarkedText& text = object.text();
    OSCAR_RETURN_IF_ERROR(ChargeSteps(text.size() / 16));
    const std::vector<size_t> offsets = CodePointOffsets(text.text());
    const SliceRange range =
        ResolveSlice(bounds[0], bounds[1], step, static_cast<int64_t>(offsets.size()) - 1);
    if (range.count == 0) return Value(MarkedText());
    if (step == 1) {
      return NewText(text.Slice(offsets[static_cast<size_t>(range.start)],
                                offsets[static_cast<size_t>(range.start + range.count)]));
    }
    MarkedText out;
    for (int64_t i = 0; i < range.count; ++i) {
      const auto at = static_cast<size_t>(range.start + i * step);
      out.Append(text.Slice(offsets[at], offsets[at + 1]));
    }
    return NewText(std::move(out));
  }
  return Unexpected(Error(fmt::format("{} cannot be sliced", TypeName(object))));
}

Result<Value> Interpreter::GetAttribute(const Value& object, std::string_view name) {
  if (object.IsUndefined()) return Unexpected(Error(object.undefined_what()));
  if (object.kind() == Kind::kNamespace) {
    for (const auto& [attribute, value] : object.space()->attributes) {
      if (attribute == name) return value;
    }
  } else if (object.kind() == Kind::kLoop) {
    if (auto value = LoopAttribute(object.loop(), name)) return std::move(*value);
  } else if (object.kind() == Kind::kCallable && name == "name") {
    return Value::Text(object.callable().name);
  }
  if (HasMethod(object, name)) {
    auto method = std::make_shared<Callable>();
    method->type = Callable::Type::kMethod;
    method->name = name;
    method->self = object;
    return Value(std::shared_ptr<const Callable>(std::move(method)));
  }
  if (object.IsDict()) {
    if (const Value* value = object.dict().Find(name)) return *value;
  }
  return Value::MakeUndefined(fmt::format("{} has no attribute '{}'", ObjectName(object), name));
}

Result<Value> Interpreter::GetItem(const Value& object, const Value& key) {
  if (object.IsUndefined()) return Unexpected(Error(object.undefined_what()));
  if (object.IsDict()) {
    OSCAR_ASSIGN_OR_RETURN(const Value* value, FindKey(object.dict(), key));
    if (value != nullptr) return *value;
  }
  if ((object.IsList() || object.IsString()) && key.IsInteger()) {
    const bool is_list = object.IsList();
    const std::vector<size_t> offsets =
        is_list ? std::vector<size_t>() : CodePointOffsets(object.str());
    if (!is_list) OSCAR_RETURN_IF_ERROR(ChargeSteps(object.str().size() / 16));
    const auto length = is_list ? static_cast<int64_t>(object.list().items.size())
                                : static_cast<int64_t>(offsets.size()) - 1;
    int64_t index = key.integer();
    if (index < 0) index += length;
    if (index >= 0 && index < length) {
      const auto at = static_cast<size_t>(index);
      if (is_list) return object.list().items[at];
      return NewText(object.text().Slice(offsets[at], offsets[at + 1]));
    }
    return Value::MakeUndefined(
        fmt::format("{} object has no element {}", TypeName(object), key.integer()));
  }
  if (key.IsString()) return GetAttribute(object, key.str());
  OSCAR_ASSIGN_OR_RETURN(const std::string shown, Repr(*this, key));
  return Value::MakeUndefined(
      fmt::format("{} has no element {}", ObjectName(object), shown.substr(0, 80)));
}

Result<Value> Interpreter::Call(const Value& callee, const Arguments& arguments) {
  if (callee.IsUndefined()) return Unexpected(Error(callee.undefined_what()));
  if (callee.kind() != Kind::kCallable) {
    return Unexpected(Error(fmt::format("{} cannot be called", TypeName(callee))));
  }
  // Held here: the variable that named it may change during the call.
  // NOLINTNEXTLINE(performance-unnecessary-copy-initialization)
  const std::shared_ptr<const Callable> callable = callee.callable_ptr();
  switch (callable->type) {
    case Callable::Type::kMacro:
      return CallMacro(*callable, arguments);
    case Callable::Type::kMethod:
      return CallMethod(*this, callable->self, callable->name, arguments);
    case Callable::Type::kFunction:
      return CallFunction(*this, callable->name, arguments);
  }
  return Unexpected(Internal("unknown kind of callable"));
}

Result<std::vector<Value>> Interpreter::Iterate(const Value& value) {
  std::vector<Value> items;
  switch (value.kind()) {
    case Kind::kUndefined:
      return items;
    case Kind::kList:
      items = value.list().items;
      break;
    case Kind::kDict:
      items.reserve(value.dict().items.size());
      for (const auto& item : value.dict().items) items.push_back(item.first);
      break;
    case Kind::kString: {
      const auto offsets = CodePointOffsets(value.str());
      OSCAR_RETURN_IF_ERROR(ChargeBytes((offsets.size() - 1) * sizeof(MarkedText)));
      items.reserve(offsets.size() - 1);
      for (size_t i = 0; i + 1 < offsets.size(); ++i) {
        items.emplace_back(value.text().Slice(offsets[i], offsets[i + 1]));
      }
      break;
    }
    default:
      return Unexpected(Error(fmt::format("{} cannot be iterated over", TypeName(value))));
  }
  OSCAR_RETURN_IF_ERROR(ChargeBytes(items.size() * sizeof(Value)));
  return items;
}

Result<Value> Interpreter::Repeat(const Value& value, int64_t count) {
  const auto times = static_cast<size_t>(std::max<int64_t>(count, 0));
  const size_t size = value.IsString() ? value.text().size() : value.list().items.size();
  const size_t unit = value.IsString() ? size : size * sizeof(Value);
  if (unit != 0 && times > options_.limits.work_bytes / unit) {
    return Unexpected(
        ResourceExhausted(fmt::format("template line {}: a repetition exceeds the limit", line_)));
  }
  if (size == 0) return value;
  OSCAR_RETURN_IF_ERROR(ChargeBytes(unit * times));
  if (value.IsString()) {
    MarkedText text;
    for (size_t i = 0; i < times; ++i) text.Append(value.text());
    return Value(std::move(text));
  }
  std::vector<Value> items;
  for (size_t i = 0; i < times; ++i) {
    items.insert(items.end(), value.list().items.begin(), value.list().items.end());
  }
  return NewList(std::move(items), value.list().is_tuple);
}

Result<Value> Interpreter::IntegerArithmetic(char op, int64_t left, int64_t right) {
  int64_t result = 0;
  bool overflow = false;
  switch (op) {
    case '+':
      overflow = __builtin_add_overflow(left, right, &result);
      break;
    case '-':
      overflow = __builtin_sub_overflow(left, right, &result);
      break;
    case '*':
      overflow = __builtin_mul_overflow(left, right, &result);
      break;
    case 'f':  // floor division
    case '%':
      if (right == 0) return Unexpected(Error("division by zero"));
      if (right == -1) {
        if (op == '%') return Value(int64_t{0});
        overflow = __builtin_sub_overflow(int64_t{0}, left, &result);
        break;
      }
      result = op == 'f' ? left / right : left % right;
      if (left % right != 0 && (left < 0) != (right < 0)) result += op == 'f' ? -1 : right;
      break;
    default: {  // power, right >= 0
      result = 1;
      int64_t base = left;
      for (int64_t exponent = right; exponent > 0 && !overflow; exponent >>= 1) {
        if (exponent & 1) overflow = __builtin_mul_overflow(result, base, &result);
        if (exponent > 1 && !overflow) overflow = __builtin_mul_overflow(base, base, &base);
      }
    }
  }
  if (overflow) return Unexpected(Error("an integer exceeds 64 bits"));
  return Value(result);
}

Result<Value> Interpreter::Arithmetic(const std::string& op, const Value& left,
                                      const Value& right) {
  for (const Value* side : {&left, &right}) {
    if (side->IsUndefined()) return Unexpected(Error(side->undefined_what()));
  }
  if (op == "+" && left.IsString() && right.IsString()) {
    MarkedText text = left.text();
    OSCAR_RETURN_IF_ERROR(ChargeBytes(text.size()));
    text.Append(right.text());
    return NewText(std::move(text));
  }
  if (op == "+" && left.IsList() && right.IsList() &&
      left.list().is_tuple == right.list().is_tuple) {
    std::vector<Value> items = left.list().items;
    items.insert(items.end(), right.list().items.begin(), right.list().items.end());
    return NewList(std::move(items), left.list().is_tuple);
  }
  if (op == "*" && right.IsInteger() && (left.IsString() || left.IsList())) {
    return Repeat(left, right.integer());
  }
  if (op == "*" && left.IsInteger() && (right.IsString() || right.IsList())) {
    return Repeat(right, left.integer());
  }
  if (op == "%" && left.IsString()) {
    return Unexpected(Error("formatting with % is not supported; use ~ or the round filter"));
  }
  if (!left.IsNumber() || !right.IsNumber()) {
    return Unexpected(
        Error(fmt::format("cannot compute {} {} {}", TypeName(left), op, TypeName(right))));
  }
  const bool integers = left.IsInteger() && right.IsInteger();
  if (op == "/") {
    if (right.number() == 0.0) return Unexpected(Error("division by zero"));
    return Value(left.number() / right.number());
  }
  if (integers && (op != "**" || right.integer() >= 0)) {
    const char code = op == "//" ? 'f' : (op == "**" ? 'p' : op[0]);
    return IntegerArithmetic(code, left.integer(), right.integer());
  }
  const double x = left.number();
  const double y = right.number();
  if (op == "+") return Value(x + y);
  if (op == "-") return Value(x - y);
  if (op == "*") return Value(x * y);
  if (op == "**") {
    if (x == 0.0 && y < 0.0) return Unexpected(Error("zero to a negative power"));
    if (x < 0.0 && y != std::floor(y)) {
      return Unexpected(Error("a complex result is not supported"));
    }
    return Value(std::pow(x, y));
  }
  if (y == 0.0) return Unexpected(Error("division by zero"));
  if (op == "%") return Value(FloorMod(x, y));
  return Value(std::floor(x / y));
}

}  // namespace oscar::jinja
