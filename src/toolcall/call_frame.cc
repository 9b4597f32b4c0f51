#include "toolcall/call_frame.h"

#include <fmt/core.h>

#include "toolcall/tool_set.h"

namespace oscar {
namespace {

// A reader ends a value at any of these, with a line break before them or not.
ArgumentTags QwenTags() {
  return {"<parameter=",
          ">\n",
          "\n</parameter>\n",
          {"</parameter>", "<parameter=", "</function>"},
          "<>"};
}
ArgumentTags GlmTags() {
  return {"<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", {"</arg_value>"}, "<>"};
}
ArgumentTags MiniMaxTags() {
  return {"<parameter name=\"", "\">", "</parameter>\n", {"</parameter>"}, "\"<>"};
}

}  // namespace

CallFrame FrameOf(CallFormat format, std::string_view tool) {
  const std::string quoted = JsonString(tool);
  switch (format) {
    case CallFormat::kNone:
      break;
    case CallFormat::kHermes:
      return {fmt::format("<tool_call>\n{{\"name\": {}, \"arguments\": ", quoted),
              "}\n</tool_call>", std::nullopt};
    case CallFormat::kQwen3Coder:
      return {fmt::format("<tool_call>\n<function={}>\n", tool), "</function>\n</tool_call>",
              QwenTags()};
    case CallFormat::kLlama3:
      return {fmt::format("{{\"name\": {}, \"parameters\": ", quoted), "}", std::nullopt};
    case CallFormat::kGlm:
      return {fmt::format("<tool_call>{}\n", tool), "</tool_call>", GlmTags()};
    case CallFormat::kMiniMax:
      return {fmt::format("<invoke name={}>\n", quoted), "</invoke>", MiniMaxTags()};
    case CallFormat::kMistral:
      return {fmt::format("[TOOL_CALLS]{}[ARGS]", tool), "", std::nullopt};
    case CallFormat::kMistralList:
      return {fmt::format("{{\"name\": {}, \"arguments\": ", quoted), "}", std::nullopt};
    case CallFormat::kHarmony:
      return {
          fmt::format("<|channel|>commentary to=functions.{} <|constrain|>json<|message|>", tool),
          "", std::nullopt};
  }
  return {};
}

CallList ListOf(CallFormat format) {
  switch (format) {
    case CallFormat::kLlama3:
      return {"", "; ", ""};
    case CallFormat::kHermes:
    case CallFormat::kQwen3Coder:
    case CallFormat::kGlm:
      return {"", "\n", ""};
    case CallFormat::kMiniMax:
      return {"<minimax:tool_call>\n", "\n", "\n</minimax:tool_call>"};
    case CallFormat::kMistralList:
      return {"[TOOL_CALLS][", ", ", "]"};
    case CallFormat::kHarmony:
      return {"", "<|end|><|start|>assistant", ""};
    case CallFormat::kNone:
    case CallFormat::kMistral:
      break;
  }
  return {};
}

}  // namespace oscar
