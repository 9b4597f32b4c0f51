// The grammar of an answer that must call a tool (tool_choice "required", or a function): frame,
// arguments by the tool's schema, end of the frame. Pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "grammar/spec.h"
#include "text/tokenizer.h"

namespace oscar {

// How arguments are spelled.
enum class ArgumentSpelling : uint8_t {
  kJson,        // one JSON object
  kQwenXml,     // <parameter=KEY>VALUE</parameter>
  kGlmXml,      // <arg_key>KEY</arg_key><arg_value>VALUE</arg_value>
  kMiniMaxXml,  // <parameter name="KEY">VALUE</parameter>
};

// One tool: text before the arguments, their JSON schema, text after them.
struct CallGrammar {
  std::string begin;
  std::string schema;  // empty: no arguments
  ArgumentSpelling spelling = ArgumentSpelling::kJson;
  std::string end;
};

// One of `calls`, and with `several` more of them, `separator` between two. Control tokens of the
// tokenizer that stand in the frames are asked for as tokens, since masks never allow their text.
// kInvalidArgument where a schema is refused (CheckGrammarSpec).
Result<GrammarSpec> ToolCallGrammar(std::span<const CallGrammar> calls, std::string_view separator,
                                    bool several, const Tokenizer& tokenizer);

}  // namespace oscar
