#include "toolcall/call_frame.h"

#include <fmt/core.h>

#include "toolcall/tool_set.h"

namespace oscar {

CallFrame FrameOf(CallFormat format, std::string_view tool) {
  const std::string quoted = JsonString(tool);
  switch (format) {
    case CallFormat::kNone:
      break;
    case CallFormat::kHermes:
      return {fmt::format("<tool_call>\n{{\"name\": {}, \"arguments\": ", quoted),
              "}\n</tool_call>", ArgumentStyle::kJson};
    case CallFormat::kQwen3Coder:
      return {fmt::format("<tool_call>\n<function={}>\n", tool), "</function>\n</tool_call>",
              ArgumentStyle::kQwenXml};
    case CallFormat::kLlama3:
      return {fmt::format("{{\"name\": {}, \"parameters\": ", quoted), "}", ArgumentStyle::kJson};
    case CallFormat::kGlm:
      return {fmt::format("<tool_call>{}\n", tool), "</tool_call>", ArgumentStyle::kGlmXml};
    case CallFormat::kMiniMax:
      return {fmt::format("<minimax:tool_call>\n<invoke name={}>\n", quoted),
              "</invoke>\n</minimax:tool_call>", ArgumentStyle::kMiniMaxXml};
    case CallFormat::kMistral:
      return {fmt::format("[TOOL_CALLS]{}[ARGS]", tool), "", ArgumentStyle::kJson};
    case CallFormat::kMistralList:
      return {fmt::format("[TOOL_CALLS][{{\"name\": {}, \"arguments\": ", quoted), "}]",
              ArgumentStyle::kJson};
    case CallFormat::kHarmony:
      return {
          fmt::format("<|channel|>commentary to=functions.{} <|constrain|>json<|message|>", tool),
          "", ArgumentStyle::kJson};
  }
  return {};
}

std::string_view BetweenCalls(CallFormat format) {
  switch (format) {
    case CallFormat::kLlama3:
      return "; ";
    case CallFormat::kHermes:
    case CallFormat::kQwen3Coder:
    case CallFormat::kGlm:
    case CallFormat::kMiniMax:
      return "\n";
    case CallFormat::kHarmony:
      return "<|end|><|start|>assistant";
    case CallFormat::kNone:
    case CallFormat::kMistral:
    case CallFormat::kMistralList:
      break;
  }
  return "";
}

}  // namespace oscar
