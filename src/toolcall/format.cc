#include "toolcall/format.h"

#include <algorithm>
#include <array>
#include <span>

namespace oscar {
namespace {

template <typename T>
struct Name {
  T value;
  std::string_view name;
};

// The first name of a value is its own; the others are vLLM's.
constexpr std::array kCallFormats = {
    Name<CallFormat>{CallFormat::kHermes, "hermes"},
    Name<CallFormat>{CallFormat::kQwen3Coder, "qwen3_coder"},
    Name<CallFormat>{CallFormat::kQwen3Coder, "qwen3_xml"},
    Name<CallFormat>{CallFormat::kLlama3, "llama3_json"},
    Name<CallFormat>{CallFormat::kLlama3, "llama4_json"},
    Name<CallFormat>{CallFormat::kGlm, "glm45"},
    Name<CallFormat>{CallFormat::kGlm, "glm47"},
    Name<CallFormat>{CallFormat::kMiniMax, "minimax_m2"},
    Name<CallFormat>{CallFormat::kMistral, "mistral"},
    Name<CallFormat>{CallFormat::kMistralList, "mistral_list"},
    Name<CallFormat>{CallFormat::kHarmony, "harmony"},
    Name<CallFormat>{CallFormat::kHarmony, "openai"},
    Name<CallFormat>{CallFormat::kNone, "none"},
};
constexpr std::array kReasoningKinds = {
    Name<ReasoningKind>{ReasoningKind::kThink, "think"},
    Name<ReasoningKind>{ReasoningKind::kThink, "qwen3"},
    Name<ReasoningKind>{ReasoningKind::kThink, "deepseek_r1"},
    Name<ReasoningKind>{ReasoningKind::kThink, "glm45"},
    Name<ReasoningKind>{ReasoningKind::kThink, "minimax_m2"},
    Name<ReasoningKind>{ReasoningKind::kMistral, "mistral"},
    Name<ReasoningKind>{ReasoningKind::kHarmony, "harmony"},
    Name<ReasoningKind>{ReasoningKind::kHarmony, "openai_gptoss"},
    Name<ReasoningKind>{ReasoningKind::kNone, "none"},
};

template <typename T>
std::string_view NameIn(std::span<const Name<T>> names, T value) {
  return std::ranges::find(names, value, &Name<T>::value)->name;
}
template <typename T>
std::optional<T> Find(std::span<const Name<T>> names, std::string_view name) {
  const auto it = std::ranges::find(names, name, &Name<T>::name);
  return it != names.end() ? std::optional(it->value) : std::nullopt;
}
template <typename T>
std::string Join(std::span<const Name<T>> names) {
  std::string out;
  for (const Name<T>& name : names) {
    if (name.name != NameIn(names, name.value)) continue;
    if (!out.empty()) out += ", ";
    out += name.name;
  }
  return out;
}

bool HasTokens(const Tokenizer& tokenizer, std::string_view open, std::string_view close) {
  bool has_open = false, has_close = false;
  for (const AddedToken& token : tokenizer.added_tokens()) {
    has_open |= token.content == open;
    has_close |= token.content == close;
  }
  return has_open && has_close;
}

}  // namespace

std::string_view NameOf(CallFormat format) { return NameIn<CallFormat>(kCallFormats, format); }
std::string_view NameOf(ReasoningKind kind) { return NameIn<ReasoningKind>(kReasoningKinds, kind); }
std::optional<CallFormat> FindCallFormat(std::string_view name) {
  return Find<CallFormat>(kCallFormats, name);
}
std::optional<ReasoningKind> FindReasoningKind(std::string_view name) {
  return Find<ReasoningKind>(kReasoningKinds, name);
}
std::string CallFormatNames() { return Join<CallFormat>(kCallFormats); }
std::string ReasoningKindNames() { return Join<ReasoningKind>(kReasoningKinds); }

CallFormat DetectCallFormat(const ChatTemplate* chat, const Tokenizer& tokenizer) {
  if (chat != nullptr) {
    const auto has = [&](std::string_view text) { return chat->Mentions(text); };
    if (has("<|channel|>commentary")) return CallFormat::kHarmony;
    if (has("<minimax:tool_call>")) return CallFormat::kMiniMax;
    if (has("[TOOL_CALLS]")) return has("[ARGS]") ? CallFormat::kMistral : CallFormat::kMistralList;
    if (has("<tool_call>")) {
      if (has("<arg_key>")) return CallFormat::kGlm;
      return has("<function=") ? CallFormat::kQwen3Coder : CallFormat::kHermes;
    }
    if (has("<|python_tag|>")) return CallFormat::kLlama3;
    if (has("<|start_header_id|>") && has(R"({"name": function name, "parameters":)")) {
      return CallFormat::kLlama3;
    }
  }
  return HasTokens(tokenizer, "<tool_call>", "</tool_call>") ? CallFormat::kHermes
                                                             : CallFormat::kNone;
}

ReasoningKind DetectReasoningKind(const ChatTemplate* chat, const Tokenizer& tokenizer) {
  const auto has = [&](std::string_view text) { return chat != nullptr && chat->Mentions(text); };
  if (has("<|channel|>analysis")) return ReasoningKind::kHarmony;
  for (const ReasoningKind kind : {ReasoningKind::kThink, ReasoningKind::kMistral}) {
    const auto tags = TagsOf(kind);
    if (has(tags->open) && has(tags->close)) return kind;
  }
  // Where the template leaves it to the model.
  for (const ReasoningKind kind : {ReasoningKind::kThink, ReasoningKind::kMistral}) {
    const auto tags = TagsOf(kind);
    if (HasTokens(tokenizer, tags->open, tags->close)) return kind;
  }
  return ReasoningKind::kNone;
}

std::optional<ReasoningFormat> TagsOf(ReasoningKind kind) {
  if (kind == ReasoningKind::kThink) return ReasoningFormat{};
  if (kind == ReasoningKind::kMistral) return ReasoningFormat{"[THINK]", "[/THINK]"};
  return std::nullopt;
}

}  // namespace oscar
