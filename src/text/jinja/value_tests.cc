// The tests of the template language ("x is y").
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "text/jinja/builtins.h"
#include "text/jinja/interpreter.h"

namespace oscar::jinja {
namespace {

using Predicate = bool (*)(const Value&);

template <Predicate kHolds>
Result<bool> Simple(Interpreter& in, const Value& input, const Arguments& arguments) {
  if (!arguments.positional.empty() || !arguments.keywords.empty()) {
    return Unexpected(in.Error("the test takes no arguments"));
  }
  return kHolds(input);
}

Result<Value> OneArgument(Interpreter& in, const Arguments& arguments) {
  if (arguments.positional.size() != 1 || !arguments.keywords.empty()) {
    return Unexpected(in.Error("the test takes one argument"));
  }
  return arguments.positional[0];
}

bool Defined(const Value& value) { return !value.IsUndefined(); }
bool NotDefined(const Value& value) { return value.IsUndefined(); }
bool IsNoneTest(const Value& value) { return value.IsNone(); }
bool IsBoolean(const Value& value) { return value.kind() == Kind::kBool; }
bool IsTrueTest(const Value& value) { return IsBoolean(value) && value.boolean(); }
bool IsFalseTest(const Value& value) { return IsBoolean(value) && !value.boolean(); }
bool IsIntegerTest(const Value& value) { return value.kind() == Kind::kInt; }
bool IsFloatTest(const Value& value) { return value.kind() == Kind::kFloat; }
bool IsNumberTest(const Value& value) { return value.IsNumber(); }
bool IsStringTest(const Value& value) { return value.IsString(); }
bool IsMapping(const Value& value) { return value.IsDict(); }
bool IsCallable(const Value& value) { return value.kind() == Kind::kCallable; }
bool IsSequence(const Value& value) {
  return value.IsList() || value.IsDict() || value.IsString() || value.IsUndefined();
}
bool IsIterable(const Value& value) { return IsSequence(value) || value.kind() == Kind::kLoop; }

template <bool kUpper>
Result<bool> Cased(Interpreter& in, const Value& input, const Arguments&) {
  OSCAR_ASSIGN_OR_RETURN(MarkedText text, ToText(in, input));
  OSCAR_ASSIGN_OR_RETURN(
      const Value held, CallMethod(in, Value(std::move(text)), kUpper ? "isupper" : "islower", {}));
  return held.boolean();
}

template <int kRemainder>
Result<bool> Parity(Interpreter& in, const Value& input, const Arguments&) {
  if (!input.IsInteger()) return Unexpected(in.Error("even and odd need an integer"));
  return std::abs(input.integer() % 2) == kRemainder;
}

Result<bool> DivisibleBy(Interpreter& in, const Value& input, const Arguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(const Value divisor, OneArgument(in, arguments));
  if (!input.IsInteger() || !divisor.IsInteger()) {
    return Unexpected(in.Error("divisibleby needs integers"));
  }
  if (divisor.integer() == 0) return Unexpected(in.Error("division by zero"));
  return divisor.integer() == -1 || input.integer() % divisor.integer() == 0;
}

template <bool kEqual>
Result<bool> Equality(Interpreter& in, const Value& input, const Arguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(const Value other, OneArgument(in, arguments));
  OSCAR_ASSIGN_OR_RETURN(const bool same, Equal(in, input, other));
  return same == kEqual;
}

enum class Order : uint8_t { kLess, kLessEqual, kGreater, kGreaterEqual };
template <Order kOrder>
Result<bool> Ordered(Interpreter& in, const Value& input, const Arguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(const Value other, OneArgument(in, arguments));
  const auto order = Compare(in, input, other);
  if (!order.has_value()) return Unexpected(in.Located(order.error()));
  switch (kOrder) {
    case Order::kLess:
      return *order < 0;
    case Order::kLessEqual:
      return *order <= 0;
    case Order::kGreater:
      return *order > 0;
    case Order::kGreaterEqual:
      return *order >= 0;
  }
}

Result<bool> In(Interpreter& in, const Value& input, const Arguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(const Value container, OneArgument(in, arguments));
  return in.Contains(container, input);
}

Result<bool> SameAs(Interpreter& in, const Value& input, const Arguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(const Value other, OneArgument(in, arguments));
  if (input.kind() != other.kind()) return false;
  return Equal(in, input, other);
}

constexpr std::array kTests = {
    Test{"boolean", Simple<IsBoolean>},
    Test{"callable", Simple<IsCallable>},
    Test{"defined", Simple<Defined>},
    Test{"divisibleby", DivisibleBy},
    Test{"eq", Equality<true>},
    Test{"equalto", Equality<true>},
    Test{"==", Equality<true>},
    Test{"even", Parity<0>},
    Test{"false", Simple<IsFalseTest>},
    Test{"float", Simple<IsFloatTest>},
    Test{"ge", Ordered<Order::kGreaterEqual>},
    Test{">=", Ordered<Order::kGreaterEqual>},
    Test{"gt", Ordered<Order::kGreater>},
    Test{"greaterthan", Ordered<Order::kGreater>},
    Test{">", Ordered<Order::kGreater>},
    Test{"in", In},
    Test{"integer", Simple<IsIntegerTest>},
    Test{"iterable", Simple<IsIterable>},
    Test{"le", Ordered<Order::kLessEqual>},
    Test{"<=", Ordered<Order::kLessEqual>},
    Test{"lower", Cased<false>},
    Test{"lt", Ordered<Order::kLess>},
    Test{"lessthan", Ordered<Order::kLess>},
    Test{"<", Ordered<Order::kLess>},
    Test{"mapping", Simple<IsMapping>},
    Test{"ne", Equality<false>},
    Test{"!=", Equality<false>},
    Test{"none", Simple<IsNoneTest>},
    Test{"number", Simple<IsNumberTest>},
    Test{"odd", Parity<1>},
    Test{"sameas", SameAs},
    Test{"sequence", Simple<IsSequence>},
    Test{"string", Simple<IsStringTest>},
    Test{"true", Simple<IsTrueTest>},
    Test{"undefined", Simple<NotDefined>},
    Test{"upper", Cased<true>},
};

}  // namespace

const Test* FindTest(std::string_view name) {
  const auto it = std::find_if(kTests.begin(), kTests.end(),
                               [&](const Test& test) { return test.name == name; });
  return it == kTests.end() ? nullptr : &*it;
}

}  // namespace oscar::jinja
