// The filters of the template language.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "text/jinja/builtins.h"
#include "text/jinja/interpreter.h"
#include "text/unicode.h"

namespace oscar::jinja {
namespace {

using Args = std::vector<std::optional<Value>>;

Result<Value> Text(Interpreter& in, const Value& input, const Arguments& arguments,
                   MarkedText (*function)(const MarkedText&)) {
  OSCAR_RETURN_IF_ERROR(BindArguments(arguments, "filter", {}).has_value()
                            ? Status()
                            : in.Error("the filter takes no arguments"));
  OSCAR_ASSIGN_OR_RETURN(const MarkedText text, ToText(in, input));
  OSCAR_RETURN_IF_ERROR(in.ChargeSteps(text.size() / kReadBytesPerStep));
  return in.NewText(function(text));
}

Result<int64_t> Integer(Interpreter& in, const std::optional<Value>& value, int64_t fallback) {
  if (!value.has_value() || value->IsNone()) return fallback;
  if (!value->IsInteger()) {
    return Unexpected(in.Error(fmt::format("expected an integer, not {}", TypeName(*value))));
  }
  return value->integer();
}

Result<MarkedText> OptionalText(Interpreter& in, const std::optional<Value>& value) {
  return value.has_value() ? ToText(in, *value) : MarkedText();
}

bool Flag(const std::optional<Value>& value) { return value.has_value() && IsTrue(*value); }

// value.a.b.0 for "a.b.0"; `fallback` where a step is undefined.
Result<Value> AttributePath(Interpreter& in, const Value& value, const Value& path,
                            const std::optional<Value>& fallback = std::nullopt) {
  Value current = value;
  if (path.IsInteger()) return in.GetItem(value, path);
  if (!path.IsString()) return Unexpected(in.Error("an attribute must be a name"));
  std::string_view rest = path.str();
  while (true) {
    const size_t dot = rest.find('.');
    const std::string_view part = rest.substr(0, dot);
    int64_t index = 0;
    const auto [stop, error] = std::from_chars(part.data(), part.data() + part.size(), index);
    const bool is_index = error == std::errc() && stop == part.data() + part.size();
    OSCAR_ASSIGN_OR_RETURN(
        current, in.GetItem(current, is_index ? Value(index) : Value::Text(std::string(part))));
    if (current.IsUndefined() && fallback.has_value()) return *fallback;
    if (dot == std::string_view::npos) return current;
    rest.remove_prefix(dot + 1);
  }
}

Result<Value> Abs(Interpreter& in, const Value& input, const Arguments&) {
  if (input.IsInteger()) {
    if (input.integer() == INT64_MIN) return Unexpected(in.Error("an integer exceeds 64 bits"));
    return Value(std::abs(input.integer()));
  }
  if (input.IsNumber()) return Value(std::fabs(input.number()));
  return Unexpected(in.Error(fmt::format("abs needs a number, not {}", TypeName(input))));
}

Result<Value> Default(Interpreter&, const Value& input, const Arguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(const Args args,
                         BindArguments(arguments, "default", {"default_value", "boolean"}));
  if (input.IsUndefined() || (Flag(args[1]) && !IsTrue(input))) {
    return args[0].value_or(Value(MarkedText()));
  }
  return input;
}

Result<Value> DictSort(Interpreter& in, const Value& input, const Arguments& arguments) {
  if (!arguments.positional.empty() || !arguments.keywords.empty()) {
    return Unexpected(in.Error("arguments of dictsort are not supported"));
  }
  if (!input.IsDict()) return Unexpected(in.Error("dictsort needs a dict"));
  std::vector<std::pair<std::string, Value>> pairs;
  for (const auto& [key, value] : input.dict().items) {
    if (!key.IsString()) return Unexpected(in.Error("dictsort needs string keys"));
    OSCAR_ASSIGN_OR_RETURN(Value pair, in.NewList({key, value}, true));
    OSCAR_RETURN_IF_ERROR(in.ChargeBytes(key.text().size()));
    pairs.emplace_back(Lower(key.text()).text(), std::move(pair));
  }
  std::stable_sort(pairs.begin(), pairs.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Value> out;
  for (auto& pair : pairs) out.push_back(std::move(pair.second));
  return in.NewList(std::move(out));
}

Result<Value> First(Interpreter& in, const Value& input, const Arguments&) {
  if (input.IsString()) {
    if (input.text().empty()) return Value::MakeUndefined("there is no first item");
    return in.NewText(input.text().Slice(0, DecodeUtf8(input.str(), 0).length));
  }
  OSCAR_ASSIGN_OR_RETURN(const auto items, in.Iterate(input));
  return items.empty() ? Value::MakeUndefined("there is no first item") : items.front();
}

Result<Value> Last(Interpreter& in, const Value& input, const Arguments&) {
  OSCAR_ASSIGN_OR_RETURN(const auto items, in.Iterate(input));
  return items.empty() ? Value::MakeUndefined("there is no last item") : items.back();
}

// A Python literal, perhaps with spaces and underscores around; nothing where it is no number.
std::optional<double> ParseFloat(std::string_view text) {
  const MarkedText stripped = Strip(MarkedText(std::string(text), false), std::nullopt, true, true);
  const std::string& digits = stripped.text();
  if (digits.empty() || digits.find_first_not_of("0123456789.eE+-") != std::string::npos) {
    return std::nullopt;
  }
  double value = 0;
  const char* begin = digits.data() + (digits[0] == '+' ? 1 : 0);
  const auto [stop, error] = std::from_chars(begin, digits.data() + digits.size(), value);
  if (error != std::errc() || stop != digits.data() + digits.size()) return std::nullopt;
  return value;
}

Result<Value> Float(Interpreter& in, const Value& input, const Arguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(const Args args, BindArguments(arguments, "float", {"default"}));
  if (input.IsNumber()) return Value(input.number());
  if (input.IsString()) {
    OSCAR_RETURN_IF_ERROR(in.ChargeBytes(input.text().size()));
    if (const auto value = ParseFloat(input.str())) return Value(*value);
  }
  return args[0].value_or(Value(0.0));
}

Result<Value> Int(Interpreter& in, const Value& input, const Arguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(const Args args, BindArguments(arguments, "int", {"default", "base"}));
  OSCAR_ASSIGN_OR_RETURN(const int64_t base, Integer(in, args[1], 10));
  if (base < 2 || base > 36) return Unexpected(in.Error("the base of int must be in 2..36"));
  const Value fallback = args[0].value_or(Value(int64_t{0}));
  const auto truncate = [&](double value) -> Value {
    constexpr double kLimit = 9.2233720368547748e18;
    return std::fabs(value) < kLimit ? Value(static_cast<int64_t>(value)) : fallback;
  };
  if (input.IsInteger()) return Value(input.integer());
  if (input.IsNumber()) return truncate(input.number());
  if (!input.IsString()) return fallback;
  OSCAR_RETURN_IF_ERROR(in.ChargeBytes(input.text().size()));
  const MarkedText stripped = Strip(input.text(), std::nullopt, true, true);
  std::string digits = stripped.text();
  digits.erase(std::remove(digits.begin(), digits.end(), '_'), digits.end());
  const char* end = digits.data() + digits.size();
  const char* begin = digits.data() + (digits.starts_with('+') ? 1 : 0);
  int64_t value = 0;
  const auto [stop, error] = std::from_chars(begin, end, value, static_cast<int>(base));
  if (error == std::errc() && stop == end && begin != end) return Value(value);
  if (const auto number = ParseFloat(input.str())) return truncate(*number);
  return fallback;
}

Result<Value> Indent(Interpreter& in, const Value& input, const Arguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(const Args args,
                         BindArguments(arguments, "indent", {"width", "first", "blank"}));
  std::string indention;
  if (args[0].has_value() && args[0]->IsString()) {
    indention = args[0]->str();
  } else {
    OSCAR_ASSIGN_OR_RETURN(const int64_t width, Integer(in, args[0], 4));
    if (width > 1024) return Unexpected(in.Error("indent of more than 1024"));
    indention.resize(static_cast<size_t>(std::max<int64_t>(width, 0)), ' ');
  }
  const bool blank = Flag(args[2]);
  OSCAR_ASSIGN_OR_RETURN(const MarkedText text, ToText(in, input));
  OSCAR_RETURN_IF_ERROR(in.ChargeBytes(
      text.size() + indention.size() * (1 + static_cast<size_t>(std::count(
                                                text.text().begin(), text.text().end(), '\n')))));
  MarkedText out;
  if (Flag(args[1])) out.Append(indention, false);
  const std::string_view source = text.text();
  for (size_t begin = 0, line = 0;; ++line) {
    const size_t newline = source.find('\n', begin);
    const size_t end = newline == std::string_view::npos ? source.size() : newline + 1;
    const bool empty = end == begin || source[begin] == '\n';
    if (line > 0 && (blank || !empty)) out.Append(indention, false);
    out.Append(text.Slice(begin, end));
    if (newline == std::string_view::npos) break;
    begin = end;
  }
  return in.NewText(std::move(out));
}

Result<Value> Items(Interpreter& in, const Value& input, const Arguments&) {
  if (input.IsUndefined()) return in.NewList({});
  if (!input.IsDict()) {
    return Unexpected(in.Error(fmt::format("items needs a dict, not {}", TypeName(input))));
  }
  return CallMethod(in, input, "items", {});
}

Result<Value> Join(Interpreter& in, const Value& input, const Arguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(const Args args, BindArguments(arguments, "join", {"d", "attribute"}));
  OSCAR_ASSIGN_OR_RETURN(const MarkedText separator, OptionalText(in, args[0]));
  OSCAR_ASSIGN_OR_RETURN(auto items, in.Iterate(input));
  MarkedText out;
  for (size_t i = 0; i < items.size(); ++i) {
    if (args[1].has_value()) {
      OSCAR_ASSIGN_OR_RETURN(items[i], AttributePath(in, items[i], *args[1]));
    }
    OSCAR_ASSIGN_OR_RETURN(const MarkedText piece, ToText(in, items[i]));
    OSCAR_RETURN_IF_ERROR(in.ChargeBytes(separator.size()));
    if (i > 0) out.Append(separator);
    out.Append(piece);
  }
  return in.NewText(std::move(out));
}

Result<Value> Length(Interpreter& in, const Value& input, const Arguments&) {
  switch (input.kind()) {
    case Kind::kUndefined:
      return Value(int64_t{0});
    case Kind::kString:
      OSCAR_RETURN_IF_ERROR(in.ChargeSteps(input.text().size() / 64));
      return Value(static_cast<int64_t>(CountCodePoints(input.str())));
    case Kind::kList:
      return Value(static_cast<int64_t>(input.list().items.size()));
    case Kind::kDict:
      return Value(static_cast<int64_t>(input.dict().items.size()));
    default:
      return Unexpected(in.Error(fmt::format("{} has no length", TypeName(input))));
  }
}

Result<Value> ToList(Interpreter& in, const Value& input, const Arguments&) {
  OSCAR_ASSIGN_OR_RETURN(auto items, in.Iterate(input));
  return in.NewList(std::move(items));
}

Result<Value> Map(Interpreter& in, const Value& input, const Arguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(auto items, in.Iterate(input));
  if (arguments.positional.empty()) {
    OSCAR_ASSIGN_OR_RETURN(const Args args,
                           BindArguments(arguments, "map", {"attribute", "default"}));
    if (!args[0].has_value()) return Unexpected(in.Error("map needs a filter or an attribute"));
    for (Value& item : items) {
      OSCAR_ASSIGN_OR_RETURN(item, AttributePath(in, item, *args[0], args[1]));
    }
    return in.NewList(std::move(items));
  }
  const Filter* filter =
      arguments.positional[0].IsString() ? FindFilter(arguments.positional[0].str()) : nullptr;
  if (filter == nullptr) return Unexpected(in.Error("map needs the name of a filter"));
  Arguments rest = arguments;
  rest.positional.erase(rest.positional.begin());
  for (Value& item : items) {
    OSCAR_RETURN_IF_ERROR(in.ChargeSteps(1));
    OSCAR_ASSIGN_OR_RETURN(item, filter->function(in, item, rest));
  }
  return in.NewList(std::move(items));
}

// select, reject, selectattr and rejectattr.
Result<Value> Choose(Interpreter& in, const Value& input, const Arguments& arguments,
                     bool by_attribute, bool keep) {
  OSCAR_ASSIGN_OR_RETURN(const auto items, in.Iterate(input));
  Arguments rest = arguments;
  Value attribute;
  if (by_attribute) {
    if (rest.positional.empty()) return Unexpected(in.Error("the filter needs an attribute"));
    attribute = rest.positional.front();
    rest.positional.erase(rest.positional.begin());
  }
  const Test* test = nullptr;
  if (!rest.positional.empty()) {
    test = rest.positional[0].IsString() ? FindTest(rest.positional[0].str()) : nullptr;
    if (test == nullptr) return Unexpected(in.Error("the filter needs the name of a test"));
    rest.positional.erase(rest.positional.begin());
  }
  std::vector<Value> out;
  for (const Value& item : items) {
    OSCAR_RETURN_IF_ERROR(in.ChargeSteps(1));
    Value subject = item;
    if (by_attribute) {
      OSCAR_ASSIGN_OR_RETURN(subject, AttributePath(in, item, attribute));
    }
    bool held = IsTrue(subject);
    if (test != nullptr) {
      OSCAR_ASSIGN_OR_RETURN(held, test->function(in, subject, rest));
    }
    if (held == keep) out.push_back(item);
  }
  return in.NewList(std::move(out));
}

Result<Value> Select(Interpreter& in, const Value& input, const Arguments& arguments) {
  return Choose(in, input, arguments, false, true);
}
Result<Value> Reject(Interpreter& in, const Value& input, const Arguments& arguments) {
  return Choose(in, input, arguments, false, false);
}
Result<Value> SelectAttribute(Interpreter& in, const Value& input, const Arguments& arguments) {
  return Choose(in, input, arguments, true, true);
}
Result<Value> RejectAttribute(Interpreter& in, const Value& input, const Arguments& arguments) {
  return Choose(in, input, arguments, true, false);
}

// What to compare of each item: an attribute if asked, in lower case unless told otherwise.
Result<std::vector<Value>> SortKeys(Interpreter& in, const std::vector<Value>& items,
                                    const std::optional<Value>& attribute, bool case_sensitive) {
  std::vector<Value> keys;
  keys.reserve(items.size());
  for (const Value& item : items) {
    Value key = item;
    if (attribute.has_value() && !attribute->IsNone()) {
      OSCAR_ASSIGN_OR_RETURN(key, AttributePath(in, item, *attribute));
    }
    if (key.IsString() && !case_sensitive) {
      OSCAR_ASSIGN_OR_RETURN(key, in.NewText(Lower(key.text())));
    }
    keys.push_back(std::move(key));
  }
  return keys;
}

Status CheckComparable(Interpreter& in, const std::vector<Value>& keys) {
  const auto all = [&](auto predicate) { return std::all_of(keys.begin(), keys.end(), predicate); };
  if (keys.size() < 2 || all([](const Value& key) { return key.IsNumber(); }) ||
      all([](const Value& key) { return key.IsString(); })) {
    return {};
  }
  return in.Error("the values must be all numbers or all strings");
}

Result<Value> Sort(Interpreter& in, const Value& input, const Arguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(
      const Args args,
      BindArguments(arguments, "sort", {"reverse", "case_sensitive", "attribute"}));
  OSCAR_ASSIGN_OR_RETURN(const auto items, in.Iterate(input));
  OSCAR_ASSIGN_OR_RETURN(const auto keys, SortKeys(in, items, args[2], Flag(args[1])));
  OSCAR_RETURN_IF_ERROR(CheckComparable(in, keys));
  std::vector<size_t> order(items.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  const bool reverse = Flag(args[0]);
  Status status;  // the first failure; everything counts as equal after it
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    if (!status.ok()) return false;
    const auto compared = reverse ? Compare(in, keys[b], keys[a]) : Compare(in, keys[a], keys[b]);
    if (!compared.has_value()) status = compared.error();
    return compared.value_or(0) < 0;
  });
  OSCAR_RETURN_IF_ERROR(status);
  std::vector<Value> out;
  for (const size_t i : order) out.push_back(items[i]);
  return in.NewList(std::move(out));
}

Result<Value> Extreme(Interpreter& in, const Value& input, const Arguments& arguments, int sign) {
  OSCAR_ASSIGN_OR_RETURN(const Args args,
                         BindArguments(arguments, "max", {"case_sensitive", "attribute"}));
  OSCAR_ASSIGN_OR_RETURN(const auto items, in.Iterate(input));
  if (items.empty()) return Value::MakeUndefined("no aggregated item, sequence was empty");
  OSCAR_ASSIGN_OR_RETURN(const auto keys, SortKeys(in, items, args[1], Flag(args[0])));
  OSCAR_RETURN_IF_ERROR(CheckComparable(in, keys));
  size_t best = 0;
  for (size_t i = 1; i < keys.size(); ++i) {
    OSCAR_ASSIGN_OR_RETURN(const int order, Compare(in, keys[i], keys[best]));
    if (order * sign > 0) best = i;
  }
  return items[best];
}

Result<Value> Max(Interpreter& in, const Value& input, const Arguments& arguments) {
  return Extreme(in, input, arguments, 1);
}
Result<Value> Min(Interpreter& in, const Value& input, const Arguments& arguments) {
  return Extreme(in, input, arguments, -1);
}

Result<Value> Sum(Interpreter& in, const Value& input, const Arguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(const Args args, BindArguments(arguments, "sum", {"attribute", "start"}));
  OSCAR_ASSIGN_OR_RETURN(const auto items, in.Iterate(input));
  Value total = args[1].value_or(Value(int64_t{0}));
  for (const Value& item : items) {
    Value value = item;
    if (args[0].has_value() && !args[0]->IsNone()) {
      OSCAR_ASSIGN_OR_RETURN(value, AttributePath(in, item, *args[0]));
    }
    if (!total.IsNumber() || !value.IsNumber()) return Unexpected(in.Error("sum needs numbers"));
    int64_t sum = 0;
    if (total.IsInteger() && value.IsInteger()) {
      if (__builtin_add_overflow(total.integer(), value.integer(), &sum)) {
        return Unexpected(in.Error("an integer exceeds 64 bits"));
      }
      total = Value(sum);
    } else {
      total = Value(total.number() + value.number());
    }
  }
  return total;
}

Result<Value> ReplaceFilter(Interpreter& in, const Value& input, const Arguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(const Args args,
                         BindArguments(arguments, "replace", {"old", "new", "count"}, 2));
  Arguments converted;
  OSCAR_ASSIGN_OR_RETURN(MarkedText text, ToText(in, input));
  for (const size_t i : {0, 1}) {
    OSCAR_ASSIGN_OR_RETURN(MarkedText piece, ToText(in, *args[i]));
    converted.positional.emplace_back(std::move(piece));
  }
  if (args[2].has_value() && !args[2]->IsNone()) converted.positional.push_back(*args[2]);
  return CallMethod(in, Value(std::move(text)), "replace", converted);
}

Result<Value> Reverse(Interpreter& in, const Value& input, const Arguments&) {
  OSCAR_ASSIGN_OR_RETURN(auto items, in.Iterate(input));
  std::reverse(items.begin(), items.end());
  if (!input.IsString()) return in.NewList(std::move(items));
  MarkedText out;
  for (const Value& item : items) out.Append(item.text());
  return in.NewText(std::move(out));
}

Result<Value> Round(Interpreter& in, const Value& input, const Arguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(const Args args,
                         BindArguments(arguments, "round", {"precision", "method"}));
  OSCAR_ASSIGN_OR_RETURN(const int64_t precision, Integer(in, args[0], 0));
  if (!input.IsNumber()) return Unexpected(in.Error("round needs a number"));
  if (precision < 0 || precision > 20) {
    return Unexpected(in.Error("round supports a precision of 0 to 20"));
  }
  OSCAR_ASSIGN_OR_RETURN(const MarkedText method_text, OptionalText(in, args[1]));
  std::string_view method = "common";
  if (args[1].has_value()) method = method_text.text();
  const double value = input.number();
  if (method == "common") {
    // Decimal rounding of the exact binary value, ties to even: what printf does.
    std::array<char, 512> buffer;
    std::snprintf(buffer.data(), buffer.size(), "%.*f", static_cast<int>(precision), value);
    return Value(std::strtod(buffer.data(), nullptr));
  }
  if (method != "ceil" && method != "floor") {
    return Unexpected(in.Error("the method of round must be common, ceil or floor"));
  }
  const double scale = std::pow(10.0, static_cast<double>(precision));
  return Value((method == "ceil" ? std::ceil(value * scale) : std::floor(value * scale)) / scale);
}

Result<Value> Same(Interpreter&, const Value& input, const Arguments&) { return input; }

Result<Value> String(Interpreter& in, const Value& input, const Arguments&) {
  OSCAR_ASSIGN_OR_RETURN(MarkedText text, ToText(in, input));
  return Value(std::move(text));
}

// Jinja's own title: words are cut at whitespace and opening brackets, not at every non-letter.
MarkedText TitleText(const MarkedText& text) {
  bool start = true;
  return ChangeCase(text, [&](char32_t c, size_t) {
    if (c == '-' || c == '(' || c == '{' || c == '[' || c == '<' || IsPythonSpace(c)) {
      start = true;
      return c;
    }
    return std::exchange(start, false) ? ToUpper(c) : ToLower(c);
  });
}

Result<Value> Title(Interpreter& in, const Value& input, const Arguments& arguments) {
  return Text(in, input, arguments, TitleText);
}
Result<Value> UpperFilter(Interpreter& in, const Value& input, const Arguments& arguments) {
  return Text(in, input, arguments, Upper);
}
Result<Value> LowerFilter(Interpreter& in, const Value& input, const Arguments& arguments) {
  return Text(in, input, arguments, Lower);
}
Result<Value> CapitalizeFilter(Interpreter& in, const Value& input, const Arguments& arguments) {
  return Text(in, input, arguments, Capitalize);
}

Result<Value> Trim(Interpreter& in, const Value& input, const Arguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(const Args args, BindArguments(arguments, "trim", {"chars"}));
  OSCAR_ASSIGN_OR_RETURN(const MarkedText text, ToText(in, input));
  if (args[0].has_value() && !args[0]->IsNone()) {
    if (!args[0]->IsString()) return Unexpected(in.Error("trim needs a string of characters"));
    OSCAR_RETURN_IF_ERROR(in.ChargeSteps(args[0]->text().size()));
  }
  std::optional<std::string_view> characters;
  if (args[0].has_value() && !args[0]->IsNone()) characters = args[0]->str();
  MarkedText stripped = Strip(text, characters, true, true);
  OSCAR_RETURN_IF_ERROR(in.ChargeSteps((text.size() - stripped.size()) / kReadBytesPerStep));
  return in.NewText(std::move(stripped));
}

Result<Value> ToJsonFilter(Interpreter& in, const Value& input, const Arguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(
      const Args args,
      BindArguments(arguments, "tojson", {"ensure_ascii", "indent", "separators", "sort_keys"}));
  JsonStyle style;
  style.ensure_ascii = Flag(args[0]);
  style.sort_keys = Flag(args[3]);
  if (args[1].has_value() && !args[1]->IsNone()) {
    OSCAR_ASSIGN_OR_RETURN(const int64_t indent, Integer(in, args[1], 0));
    if (indent < 0 || indent > 64) return Unexpected(in.Error("indent of tojson must be 0..64"));
    style.indent = static_cast<int>(indent);
    style.item_separator.pop_back();  // no space where a line ends
  }
  if (args[2].has_value() && !args[2]->IsNone()) {
    const bool pair = args[2]->IsList() && args[2]->list().items.size() == 2 &&
                      args[2]->list().items[0].IsString() && args[2]->list().items[1].IsString();
    if (!pair) return Unexpected(in.Error("separators of tojson must be two strings"));
    style.item_separator = args[2]->list().items[0].str();
    style.key_separator = args[2]->list().items[1].str();
  }
  auto json = ToJson(in, input, style);
  if (!json.has_value()) return Unexpected(in.Located(json.error()));
  // A request chose the names and the shape as well, so all of it counts as the request's.
  return Value(MarkedText(std::move(json).value(), HasInput(input)));
}

Result<Value> Unique(Interpreter& in, const Value& input, const Arguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(const Args args,
                         BindArguments(arguments, "unique", {"case_sensitive", "attribute"}));
  OSCAR_ASSIGN_OR_RETURN(const auto items, in.Iterate(input));
  OSCAR_ASSIGN_OR_RETURN(const auto keys, SortKeys(in, items, args[1], Flag(args[0])));
  std::vector<Value> out;
  std::vector<Value> seen;
  for (size_t i = 0; i < items.size(); ++i) {
    bool known = false;
    for (size_t j = 0; j < seen.size() && !known; ++j) {
      OSCAR_ASSIGN_OR_RETURN(known, Equal(in, seen[j], keys[i]));
    }
    if (known) continue;
    seen.push_back(keys[i]);
    out.push_back(items[i]);
  }
  return in.NewList(std::move(out));
}

Result<Value> WordCount(Interpreter& in, const Value& input, const Arguments&) {
  OSCAR_ASSIGN_OR_RETURN(const MarkedText text, ToText(in, input));
  OSCAR_RETURN_IF_ERROR(in.ChargeSteps(text.size() / kReadBytesPerStep));
  int64_t count = 0;
  bool in_word = false;
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = DecodeUtf8(text.text(), at);
    const bool word = IsWordCharacter(step.code_point);
    count += word && !in_word;
    in_word = word;
    at += step.length;
  }
  return Value(count);
}

constexpr std::array kFilters = {
    Filter{"abs", Abs},
    Filter{"capitalize", CapitalizeFilter},
    Filter{"count", Length},
    Filter{"d", Default},
    Filter{"default", Default},
    Filter{"dictsort", DictSort},
    Filter{"first", First},
    Filter{"float", Float},
    Filter{"indent", Indent},
    Filter{"int", Int},
    Filter{"items", Items},
    Filter{"join", Join},
    Filter{"last", Last},
    Filter{"length", Length},
    Filter{"list", ToList},
    Filter{"lower", LowerFilter},
    Filter{"map", Map},
    Filter{"max", Max},
    Filter{"min", Min},
    Filter{"reject", Reject},
    Filter{"rejectattr", RejectAttribute},
    Filter{"replace", ReplaceFilter},
    Filter{"reverse", Reverse},
    Filter{"round", Round},
    Filter{"safe", Same},
    Filter{"select", Select},
    Filter{"selectattr", SelectAttribute},
    Filter{"sort", Sort},
    Filter{"string", String},
    Filter{"sum", Sum},
    Filter{"title", Title},
    Filter{"tojson", ToJsonFilter},
    Filter{"trim", Trim},
    Filter{"unique", Unique},
    Filter{"upper", UpperFilter},
    Filter{"wordcount", WordCount},
};

}  // namespace

const Filter* FindFilter(std::string_view name) {
  const auto it = std::find_if(kFilters.begin(), kFilters.end(),
                               [&](const Filter& filter) { return filter.name == name; });
  return it == kFilters.end() ? nullptr : &*it;
}

Result<std::vector<std::optional<Value>>> BindArguments(
    const Arguments& arguments, std::string_view function,
    std::initializer_list<std::string_view> parameters, size_t required) {
  std::vector<std::optional<Value>> bound(parameters.size());
  if (arguments.positional.size() > parameters.size()) {
    return Unexpected(
        InvalidArgument(fmt::format("{} takes at most {} arguments", function, parameters.size())));
  }
  for (size_t i = 0; i < arguments.positional.size(); ++i) bound[i] = arguments.positional[i];
  for (const auto& [name, value] : arguments.keywords) {
    const auto it = std::find(parameters.begin(), parameters.end(), name);
    if (it == parameters.end()) {
      return Unexpected(
          InvalidArgument(fmt::format("{} takes no argument \"{}\"", function, name)));
    }
    auto& slot = bound[static_cast<size_t>(it - parameters.begin())];
    if (slot.has_value()) {
      return Unexpected(
          InvalidArgument(fmt::format("{} got two values for \"{}\"", function, name)));
    }
    slot = value;
  }
  for (size_t i = 0; i < required; ++i) {
    if (!bound[i].has_value()) {
      return Unexpected(InvalidArgument(
          fmt::format("{} needs an argument \"{}\"", function, *(parameters.begin() + i))));
    }
  }
  return bound;
}

}  // namespace oscar::jinja
