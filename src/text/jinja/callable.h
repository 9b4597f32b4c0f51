// What a template can call: macros, methods of values, and the handful of global functions.
#pragma once

#include <cstdint>
#include <string>

#include "text/jinja/value.h"

namespace oscar::jinja {

struct Macro;  // of the syntax tree
struct Scope;  // of the interpreter

struct Callable {
  enum class Type : uint8_t { kMacro, kMethod, kFunction };
  Type type = Type::kFunction;
  std::string name;
  // kMacro: definition and the scope it was defined in. Both outlive the rendering.
  const Macro* macro = nullptr;
  Scope* closure = nullptr;
  // kMethod: the value it belongs to.
  Value self;
};

}  // namespace oscar::jinja
