// A call of a tool that a model asks for: the program that asked the model runs it and tells the
// result in a message of the role "tool". Plain values.
#pragma once

#include <cstddef>
#include <string>

namespace oscar {

struct ToolCall {
  std::string id;         // unique in the conversation; the result refers to it
  std::string name;       // one of the request's tools
  std::string arguments;  // the text of a JSON object
};

// Part of a call. The first part of a call names it and gives its id; `arguments` is the next piece
// of the text of one JSON object.
struct ToolCallDelta {
  size_t index = 0;  // of the call in the answer, from 0
  std::string id, name;
  std::string arguments;
};

}  // namespace oscar
