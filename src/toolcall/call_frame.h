// CallFrame: how a format writes a call of one tool, for what makes a model write one (masks):
// `begin`, arguments in `style`, `end`. That is read as the call again.
// Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "toolcall/format.h"

namespace oscar {

// How arguments are spelled; the schema is the tool's "parameters".
enum class ArgumentStyle : uint8_t {
  kJson,  // the text of one JSON object
  // For each argument, with strings verbatim and other values as JSON:
  kQwenXml,     // <parameter=KEY>\nVALUE\n</parameter>\n
  kGlmXml,      // <arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n
  kMiniMaxXml,  // <parameter name="KEY">VALUE</parameter>\n
};

struct CallFrame {
  std::string begin, end;
  ArgumentStyle style = ArgumentStyle::kJson;
};
// Not for kNone. Markers that are single tokens of the model are spelled as text.
CallFrame FrameOf(CallFormat format, std::string_view tool);
// Between two calls of one answer.
std::string_view BetweenCalls(CallFormat format);

// The call that an answer must begin with, once its reasoning has ended: tool_choice "required" or
// a function.
struct DemandedCall {
  std::vector<std::string> tools;  // one of these
  bool several = false;            // more calls may follow the first
};

}  // namespace oscar
