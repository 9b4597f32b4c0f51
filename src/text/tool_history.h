// Calls of tools in the history of a conversation, as a template wants them. Templates differ in
// what they take of OpenAI's form, and most of them fail on the rest.
#pragma once

#include <nlohmann/json_fwd.hpp>

namespace oscar {

struct ToolHistoryStyle {
  // Arguments as JSON text instead of objects.
  bool text_arguments = false;
  // Ids of nine letters and digits. Others are replaced, the same by the same.
  bool short_ids = false;
  // One call in a message: those of several follow one another, each with its results.
  bool single_calls = false;
  // Harmony: what was thought before a call is "thinking", and nothing else may be said with it.
  bool thinking = false;
};

// `messages` are normalised.
void AdaptToolHistory(const ToolHistoryStyle& style, nlohmann::ordered_json* messages);

}  // namespace oscar
