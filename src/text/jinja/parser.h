// Recursive descent over the tokens of a template, with the precedences of Jinja.
#pragma once

#include <string_view>

#include "oscar/status.h"
#include "text/jinja/ast.h"

namespace oscar::jinja {

Result<SyntaxTree> ParseTemplate(std::string_view source);

}  // namespace oscar::jinja
