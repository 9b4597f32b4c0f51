// Whatever a model writes, in whichever format: the parser reads the same however the text is cut,
// gives calls of known tools with arguments that are objects, and invents and loses nothing.
#include <nlohmann/json.hpp>
#include <string>

#include "fuzz_util.h"
#include "toolcall/answer_parser.h"

namespace {

using oscar::AnswerSyntax;
using oscar::CallFormat;
using oscar::ParsedPiece;
using oscar::ReasoningKind;

// Bytes that no text has stand for what the formats are made of, so that mutations meet it.
constexpr const char* kPieces[] = {"<tool_call>",
                                   "</tool_call>",
                                   "{\"name\": \"f\", \"arguments\": ",
                                   "{\"n\": 1}",
                                   "}",
                                   "<think>",
                                   "</think>",
                                   "<function=f>",
                                   "<function=",
                                   "<parameter=n>",
                                   "\n</parameter>",
                                   "</function>",
                                   "<|python_tag|>",
                                   "{\"name\": \"f\", \"parameters\": {}}",
                                   "f.call(n=1)",
                                   "; ",
                                   "<arg_key>n",
                                   "</arg_key>",
                                   "<arg_value>1",
                                   "</arg_value>",
                                   "<minimax:tool_call>",
                                   "</minimax:tool_call>",
                                   "<invoke name=\"f\">",
                                   "</invoke>",
                                   "<parameter name=\"n\">1",
                                   "</parameter>",
                                   "[TOOL_CALLS]",
                                   "[ARGS]",
                                   "[CALL_ID]123456789",
                                   "[{\"name\": \"f\"}]",
                                   "[THINK]",
                                   "[/THINK]",
                                   "<|start|>assistant",
                                   "<|channel|>",
                                   "analysis",
                                   "commentary",
                                   "final",
                                   " to=functions.f",
                                   "<|constrain|>json",
                                   "<|message|>",
                                   "<|end|>",
                                   "<|call|>",
                                   "<|return|>",
                                   "<|start|>",
                                   "f",
                                   "\"",
                                   "\\",
                                   "é"};

std::string Expand(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x80) {
      text += c;
    } else {
      text += kPieces[(byte - 0x80) % std::size(kPieces)];
    }
  }
  return text;
}

struct Read {
  std::string content, reasoning, calls;
  size_t num_calls = 0;
  bool operator==(const Read&) const = default;
};

template <typename NextSize>
Read Parse(const AnswerSyntax& syntax, std::string_view text, bool is_cut, NextSize next) {
  const auto parser = oscar::MakeAnswerParser(syntax);
  OSCAR_CHECK(parser != nullptr);
  ParsedPiece piece;
  for (size_t at = 0; at < text.size() && !parser->ended();) {
    const size_t size = std::min(next(), text.size() - at);
    parser->Push(text.substr(at, size), &piece);
    at += size;
  }
  parser->Finish(is_cut, &piece);
  Read read = {piece.content, piece.reasoning, "", piece.tool_calls.size()};
  for (size_t i = 0; i < piece.tool_calls.size(); ++i) {
    const oscar::ToolCallDelta& call = piece.tool_calls[i];
    OSCAR_CHECK(call.index == i && !call.id.empty());
    OSCAR_CHECK(syntax.tools->Has(call.name), "{}", call.name);
    const auto arguments = nlohmann::json::parse(call.arguments, nullptr, false);
    OSCAR_CHECK(arguments.is_object(), "{}", call.arguments);
    read.calls += call.name + call.arguments;
  }
  return read;
}

bool IsSubsequence(std::string_view part, std::string_view whole) {
  size_t at = 0;
  for (const char c : whole) {
    if (at < part.size() && part[at] == c) ++at;
  }
  return at == part.size();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  static const auto tools = std::make_shared<const oscar::ToolSet>(nlohmann::ordered_json::parse(
      R"([{"function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}},
          {"function": {"name": "fg"}}])"));
  constexpr CallFormat kFormats[] = {
      CallFormat::kHermes,  CallFormat::kQwen3Coder, CallFormat::kLlama3, CallFormat::kGlm,
      CallFormat::kMiniMax, CallFormat::kMistral,    CallFormat::kHarmony};
  AnswerSyntax syntax;
  syntax.calls = kFormats[data[0] % std::size(kFormats)];
  syntax.tools = tools;
  syntax.harmony = syntax.calls == CallFormat::kHarmony;
  syntax.parallel_calls = (data[1] & 1) == 0;
  if ((data[1] & 2) != 0) {
    syntax.reasoning = oscar::TagsOf(syntax.calls == CallFormat::kMistral ? ReasoningKind::kMistral
                                                                          : ReasoningKind::kThink);
    syntax.starts_in_reasoning = (data[1] & 4) != 0;
  }
  const bool is_cut = (data[1] & 8) != 0;
  const std::string text = Expand(oscar::FuzzText(data + 2, size - 2));

  const Read whole = Parse(syntax, text, is_cut, [&] { return text.size(); });
  uint32_t random = data[1] * 2654435761u + 1;
  const auto some = [&random] {
    random = random * 1664525u + 1013904223u;
    return size_t{1} + (random >> 24) % 24;
  };
  // With one call the rest of a piece behind it is dropped, whatever it holds.
  OSCAR_CHECK(Parse(syntax, text, is_cut, [] { return size_t{1}; }) == whole, "{}", text);
  OSCAR_CHECK(Parse(syntax, text, is_cut, some) == whole, "{}", text);
  if (syntax.harmony) return 0;
  OSCAR_CHECK(IsSubsequence(whole.content, text), "{} of {}", whole.content, text);
  OSCAR_CHECK(IsSubsequence(whole.reasoning, text), "{} of {}", whole.reasoning, text);
  if (whole.num_calls == 0 && !syntax.reasoning.has_value()) {
    OSCAR_CHECK(whole.content == text, "{} of {}", whole.content, text);
  }
  return 0;
}
