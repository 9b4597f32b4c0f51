// Cuts a template into tokens, with the whitespace rules chat templates are written for: the
// newline after a block tag goes (trim_blocks), as does the indentation before one
// (lstrip_blocks), and one newline at the end of the template.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/status.h"

namespace oscar::jinja {

enum class TokenType : uint8_t {
  kText,
  kVariableBegin,
  kVariableEnd,
  kBlockBegin,
  kBlockEnd,
  kName,
  kString,
  kInteger,
  kFloat,
  kOperator,
  kEnd,
};

struct Token {
  TokenType type = TokenType::kEnd;
  std::string text;  // strings without quotes and escapes; numbers as written, without underscores
  int line = 1;
};

// Message of every error about a template: "template line 3: ...".
Status TemplateError(int line, std::string_view message);

// The last token is kEnd.
Result<std::vector<Token>> Tokenize(std::string_view source);

}  // namespace oscar::jinja
