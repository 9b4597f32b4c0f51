// The messages of a chat request, checked and brought into the form that chat templates read:
// roles known, contents strings, tool-call arguments objects. Pure functions.
#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>

#include "openai/api_error.h"

namespace oscar::server {

// Developer messages become system messages, lists of text parts one string joined by newlines,
// and "arguments" of tool calls that hold an object as text that object. Errors name the message:
// "messages[2].content".
ApiResult<nlohmann::ordered_json> ParseMessages(const nlohmann::ordered_json& messages,
                                                size_t max_messages);

}  // namespace oscar::server
