// Filters, tests, methods and functions of the template language: tables of functions that the
// parser resolves by name, so that an unknown one is an error before anything is rendered.
#pragma once

#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "oscar/status.h"
#include "text/jinja/value.h"

namespace oscar::jinja {

class Interpreter;

// Text that is decoded and looked at, character by character: what a step pays for.
inline constexpr size_t kReadBytesPerStep = 4;

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> keywords;
};

// Arguments sorted into the named parameters; empty where not given. Errors name `function`.
Result<std::vector<std::optional<Value>>> BindArguments(
    const Arguments& arguments, std::string_view function,
    std::initializer_list<std::string_view> parameters, size_t required = 0);

using FilterFunction = Result<Value> (*)(Interpreter&, const Value& input,
                                         const Arguments& arguments);
struct Filter {
  std::string_view name;
  FilterFunction function;
};
using TestFunction = Result<bool> (*)(Interpreter&, const Value& input, const Arguments& arguments);
struct Test {
  std::string_view name;
  TestFunction function;
};

// Null for unknown names.
const Filter* FindFilter(std::string_view name);
const Test* FindTest(std::string_view name);

// Whether `name` is a method of the value, and the call of one. A method that would change its
// value exists but cannot be called.
bool HasMethod(const Value& self, std::string_view name);
Result<Value> CallMethod(Interpreter& interpreter, const Value& self, std::string_view name,
                         const Arguments& arguments);

bool HasFunction(std::string_view name);
Result<Value> CallFunction(Interpreter& interpreter, std::string_view name,
                           const Arguments& arguments);

// String operations that filters and methods share.
MarkedText Strip(const MarkedText& text, std::optional<std::string_view> characters, bool left,
                 bool right);
MarkedText ChangeCase(const MarkedText& text, const std::function<char32_t(char32_t, size_t)>& map);
MarkedText Upper(const MarkedText& text);
MarkedText Lower(const MarkedText& text);
MarkedText Capitalize(const MarkedText& text);
MarkedText Replace(const MarkedText& text, std::string_view old, const MarkedText& replacement,
                   int64_t count);
// The first place of `sought` from `begin` on, in time linear in both; npos where it is not there.
size_t FindText(std::string_view text, std::string_view sought, size_t begin = 0);
// Byte offset of each code point, and the size of the text last.
std::vector<size_t> CodePointOffsets(std::string_view text);

}  // namespace oscar::jinja
