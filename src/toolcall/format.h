// The formats in which models write calls of tools and mark their reasoning: their names, and which
// one a chat template teaches. Pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "text/chat.h"
#include "text/reasoning.h"
#include "text/tokenizer.h"

namespace oscar {

enum class CallFormat : uint8_t {
  kNone,
  kHermes,       // <tool_call>{"name": ..., "arguments": ...}</tool_call>
  kQwen3Coder,   // <tool_call><function=...><parameter=...>
  kLlama3,       // {"name": ..., "parameters": ...}, <|python_tag|>
  kGlm,          // <tool_call>name<arg_key>...</arg_key><arg_value>...</arg_value></tool_call>
  kMiniMax,      // <minimax:tool_call><invoke name="..."><parameter name="...">
  kMistral,      // [TOOL_CALLS]name[ARGS]{...}
  kMistralList,  // [TOOL_CALLS][{"name": ..., "arguments": ..., "id": ...}]; read like kMistral
  kHarmony,      // <|channel|>commentary to=functions.name<|message|>{...}<|call|>
};
enum class ReasoningKind : uint8_t {
  kNone,
  kThink,    // <think> ... </think>
  kMistral,  // [THINK] ... [/THINK]
  kHarmony,  // <|channel|>analysis<|message|> ... <|end|>
};

// As `--tool-parser` and `--reasoning-parser` spell them.
std::string_view NameOf(CallFormat format);
std::string_view NameOf(ReasoningKind kind);
// By that name or by the one that vLLM knows it by.
std::optional<CallFormat> FindCallFormat(std::string_view name);
std::optional<ReasoningKind> FindReasoningKind(std::string_view name);
// All names, "hermes, qwen3_coder, ...", for messages.
std::string CallFormatNames();
std::string ReasoningKindNames();

// What the template shows the model or, where it shows nothing, what tokens the model has for it.
// `chat` may be null.
CallFormat DetectCallFormat(const ChatTemplate* chat, const Tokenizer& tokenizer);
ReasoningKind DetectReasoningKind(const ChatTemplate* chat, const Tokenizer& tokenizer);

// The tags of a kind that has tags.
std::optional<ReasoningFormat> TagsOf(ReasoningKind kind);

}  // namespace oscar
