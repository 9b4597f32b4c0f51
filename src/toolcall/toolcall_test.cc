// Golden transcripts: what each family writes, and what is read. Every transcript is also read in
// two pieces for every cut, byte by byte, and every prefix of it is.
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "toolcall/answer_parser.h"
#include "toolcall/call_frame.h"

namespace oscar {
namespace {

using Json = nlohmann::ordered_json;
using testing::HasSubstr;

std::shared_ptr<const ToolSet> Tools() {
  static const auto tools = std::make_shared<const ToolSet>(Json::parse(R"([
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties":
      {"s": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "boolean"},
       "o": {"type": "object"}, "l": {"type": "array"}, "x": {"type": ["number", "null"]},
       "any": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "ref": {"$ref": "#/$defs/text"}},
      "$defs": {"text": {"enum": ["1", "2"]}, "loop": {"$ref": "#/$defs/loop"}}}}},
    {"type": "function", "function": {"name": "get-it.now", "parameters": null}}])"));
  return tools;
}

struct Family {
  CallFormat calls = CallFormat::kNone;
  bool reasons = false, opened = false, parallel = true;
};

AnswerSyntax SyntaxOf(const Family& family) {
  AnswerSyntax syntax;
  syntax.calls = family.calls;
  syntax.harmony = family.calls == CallFormat::kHarmony;
  syntax.tools = Tools();
  syntax.parallel_calls = family.parallel;
  const bool is_mistral = family.calls == CallFormat::kMistral;
  if (family.reasons) {
    syntax.reasoning = TagsOf(is_mistral ? ReasoningKind::kMistral : ReasoningKind::kThink);
  }
  syntax.starts_in_reasoning = family.opened;
  return syntax;
}

// "(reasoning)content|f{...}|g{...}"
std::string ReadParts(const Family& family, const std::vector<std::string>& parts,
                      bool is_cut = false) {
  const auto parser = MakeAnswerParser(SyntaxOf(family));
  ParsedPiece piece;
  for (const std::string& part : parts) {
    if (!parser->ended()) parser->Push(part, &piece);
  }
  parser->Finish(is_cut, &piece);
  std::set<std::string> ids;
  std::string read = piece.reasoning.empty() ? "" : "(" + piece.reasoning + ")";
  read += piece.content;
  for (size_t i = 0; i < piece.tool_calls.size(); ++i) {
    const ToolCallDelta& call = piece.tool_calls[i];
    EXPECT_EQ(call.index, i);
    EXPECT_TRUE(ids.insert(call.id).second);
    EXPECT_TRUE(Json::parse(call.arguments, nullptr, false).is_object()) << call.arguments;
    read += "|" + call.name + call.arguments;
  }
  return read;
}

void Check(const Family& family, const std::string& text, const std::string& expected) {
  EXPECT_EQ(ReadParts(family, {text}), expected) << text;
  for (size_t cut = 1; cut < text.size(); ++cut) {
    ASSERT_EQ(ReadParts(family, {text.substr(0, cut), text.substr(cut)}), expected)
        << text.substr(0, cut) << " >< " << text.substr(cut);
  }
  for (size_t end = 0; end <= text.size(); ++end) {
    const std::string whole = text.substr(0, end);
    std::vector<std::string> bytes;
    for (const char c : whole) bytes.emplace_back(1, c);
    const std::string read = ReadParts(family, {whole});
    ASSERT_EQ(ReadParts(family, bytes), read) << whole;
    ASSERT_EQ(ReadParts(family, bytes, true), ReadParts(family, {whole}, true)) << whole;
    const bool is_plain = !family.reasons && family.calls != CallFormat::kHarmony;
    if (is_plain && read.find('|') == whole.find('|')) {
      EXPECT_EQ(read, whole);  // nothing is lost
    }
  }
}

// What is no call comes back as it was.
void CheckText(const Family& family, const std::string& text) { Check(family, text, text); }

const std::string kNested =
    R"({"o": {"x": [1, {"y": "}{"}], "z": null}, "s": "é \"日本\" \n 🦉"})";

TEST(ToolCall, Hermes) {
  const Family qwen = {CallFormat::kHermes};
  Check(qwen, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 2}}\n</tool_call>",
        "|f{\"n\": 2}");
  Check(qwen,
        "Hi <tool_call>?\n<tool_call>\n{\"name\": \"f\", \"arguments\": " + kNested +
            "}\n</tool_call>\n<tool_call>{\"name\": \"get-it.now\"}</tool_call> bye ",
        "Hi <tool_call>?\nbye |f" + kNested + "|get-it.now{}");
  // A tag inside a string ends nothing, and an answer that ends behind the JSON has a whole call.
  Check(qwen, "<tool_call>{\"name\": \"f\", \"arguments\": {\"s\": \"</tool_call>\"}}",
        "|f{\"s\": \"</tool_call>\"}");
  Check(qwen, "<tool_call>{\"arguments\": \"{\\\"n\\\": 1}\", \"name\": \"f\"}</tool_call>",
        "|f{\"n\": 1}");
  for (const std::string body :
       {"{\"name\": \"no\", \"arguments\": {}}", "{\"name\": \"f\", \"arguments\": [1]}",
        "{\"name\": \"f\",}", "{'name': 'f'}", "{\"name\": \"f\"}}", "[]", "f",
        "{\"name\": \"f\", \"arguments\": {\"s\": \"a\nb\"}}",
        "{\"name\": \"f\", \"arguments\": {\"n\": 01}}"}) {
    CheckText(qwen, "x <tool_call>" + body + "</tool_call>\n");
    Check(qwen, "<tool_call>" + body + "<tool_call>{\"name\": \"f\"}</tool_call>",
          "<tool_call>" + body + "|f{}");
  }
  const std::string call = "<tool_call>{\"name\": \"f\"}</tool_call>";
  EXPECT_EQ(ReadParts({CallFormat::kHermes, false, false, false}, {call + call + "x"}), "|f{}");
}

TEST(ToolCall, InsideReasoning) {
  const std::string call =
      "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</tool_call>";
  const Family qwen = {CallFormat::kHermes, true};
  Check(qwen, "<think>\nhm\n</think>\n\n" + call, "(hm)|f{\"n\": 1}");
  Check(qwen, "<think>\nhm\n</think>\n\nok\n" + call, "(hm)ok|f{\"n\": 1}");
  // A thought, because the reasoning is closed behind it.
  Check(qwen, "<think>a " + call + " b</think>said", "(a " + call + " b)said");
  Check(qwen, "<think>a " + call + "</think>" + call, "(a " + call + ")|f{\"n\": 1}");
  // A call, because it is not.
  Check(qwen, "<think>a\n" + call + "\n", "(a)|f{\"n\": 1}");
  Check(qwen, "<think>a " + call + "\n" + call, "(a)|f{\"n\": 1}|f{\"n\": 1}");
  Check(qwen, "<think>a <tool_call>{} b", "(a <tool_call>{} b)");
  // Where a limit cut the answer, nobody knows.
  EXPECT_EQ(ReadParts(qwen, {"<think>a " + call + " b"}, true), "(a " + call + " b)");
  EXPECT_EQ(ReadParts({CallFormat::kHermes, true, true}, {"a " + call}), "(a)|f{\"n\": 1}");
  Check({CallFormat::kGlm, true, true}, "a</think><tool_call>f</tool_call>", "(a)|f{}");
  Check({CallFormat::kMistral, true}, "[THINK]a[/THINK][TOOL_CALLS]f[ARGS]{}", "(a)|f{}");
}

TEST(ToolCall, Qwen3Coder) {
  const Family coder = {CallFormat::kQwen3Coder};
  Check(coder,
        "<tool_call>\n<function=f>\n<parameter=s>\n3\n\n</parameter>\n<parameter=n>\n3\n"
        "</parameter>\n<parameter=b>\nTrue\n</parameter>\n</function>\n</tool_call>",
        "|f{\"s\": \"3\\n\", \"n\": 3, \"b\": true}");
  // No wrapper, no end of a parameter: seen in the wild.
  Check(coder, "a\n<function=f>\n<parameter=n>\nx\n<parameter=s>\ny\n</function>\n</tool_call>",
        "a|f{\"n\": \"x\", \"s\": \"y\"}");
  Check(coder,
        "ok\n<tool_call>\n<function=f>\n<parameter=o>\n{\"a\": [1, {\"b\": \"</x>\"}]}\n"
        "</parameter>\n<parameter=s>\n<b>é\n\"日本\"</b>\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get-it.now>\n</function>\n</tool_call>",
        "ok|f{\"o\": {\"a\": [1, {\"b\": \"</x>\"}]}, \"s\": \"<b>é\\n\\\"日本\\\"</b>\"}"
        "|get-it.now{}");
  Check(coder,
        "<tool_call>\n<function=f>\n<parameter=x>\nNone\n</parameter>\n<parameter=any>\nnull\n"
        "</parameter>\n<parameter=ref>\n1\n</parameter>\n</function>\n</tool_call>",
        "|f{\"x\": null, \"any\": null, \"ref\": \"1\"}");
  CheckText(coder, "<tool_call>\n<function=no>\n</function>\n</tool_call>");
  CheckText(coder, "<tool_call>\n<function=f>\n<parameter=s>\n3\n</parameter>\nx</function>");
  CheckText(coder, "<tool_call>\n<function=f>\n<parameter=s>\n3");
  CheckText(coder, "<function=f>\n<parameter=s>\n3\n</parameter>\n");
}

TEST(ToolCall, Glm) {
  const Family glm = {CallFormat::kGlm};
  Check(glm,
        "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value> 1</arg_value>\n<arg_key>o</arg_key>\n"
        "<arg_value>{\"a\": [{}, \"é\"]}</arg_value>\n</tool_call>\n<tool_call>get-it.now"
        "</tool_call>",
        "|f{\"s\": \" 1\", \"o\": {\"a\": [{}, \"é\"]}}|get-it.now{}");
  Check(glm,
        "so:<tool_call>f<arg_key>s</arg_key><arg_value>日本\n</arg_value><arg_key>l</arg_key>"
        "<arg_value>[1]</arg_value></tool_call>",
        "so:|f{\"s\": \"日本\\n\", \"l\": [1]}");
  CheckText(glm, "<tool_call>no\n</tool_call>");
  CheckText(glm, "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>1");
  CheckText(glm, "<tool_call>f\n<arg_key>s</arg_key>\n</tool_call>");
  CheckText(glm, "<tool_call>{\"name\": \"f\"}</tool_call>");
}

TEST(ToolCall, MiniMax) {
  const Family minimax = {CallFormat::kMiniMax};
  Check(minimax,
        "a\n<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"n\">2</parameter>\n"
        "<parameter name=\"o\">{\"a\": {\"é\": []}}</parameter>\n"
        "</invoke>\n<invoke name=\"get-it.now\">\n</invoke>\n</minimax:tool_call>",
        "a|f{\"n\": 2, \"o\": {\"a\": {\"é\": []}}}|get-it.now{}");
  CheckText(minimax, "<minimax:tool_call>\n<invoke name=\"no\">\n</invoke>\n</minimax:tool_call>");
  CheckText(minimax, "<minimax:tool_call>\n</minimax:tool_call>");
  CheckText(minimax, "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"n\">2");
  // The whole ones count.
  Check(minimax, "<minimax:tool_call><invoke name=\"f\"></invoke><invoke name=\"no\"></invoke>",
        "<invoke name=\"no\"></invoke>|f{}");
}

TEST(ToolCall, Llama3) {
  const Family llama = {CallFormat::kLlama3};
  Check(llama, "{\"name\": \"f\", \"parameters\": " + kNested + "}", "|f" + kNested);
  Check(llama,
        "{\"name\": \"f\", \"parameters\": {\"n\": 1}}; {\"name\": \"get-it.now\", "
        "\"parameters\": {}} x",
        "x|f{\"n\": 1}|get-it.now{}");
  Check(llama, "<|python_tag|>{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}",
        "|f{}");
  Check(llama, "ok<|python_tag|>f.call(s=\"a)\", n=2)", "ok|f{\"s\": \"a)\", \"n\": 2}");
  CheckText(llama, "{\"answer\": 1}");
  CheckText(llama, "{\"name\": \"Rome\", \"parameters\": {\"a\": 1}}");
  CheckText(llama, "{\"name\": \"f\", \"parameters\": {\"a\": 1}");
  CheckText(llama, "So {\"name\": \"f\", \"parameters\": {}}");
  CheckText(llama, "<|python_tag|>print(1)");
  CheckText(llama, "{");
}

TEST(ToolCall, Mistral) {
  const Family mistral = {CallFormat::kMistral};
  Check(mistral,
        "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": " + kNested +
            ", \"id\": \"123456789\"}, {\"name\": \"get-it.now\", \"arguments\": {}}]",
        "|f" + kNested + "|get-it.now{}");
  Check(mistral, "a [TOOL_CALLS]f[CALL_ID]123456789[ARGS]{\"n\": 1}[TOOL_CALLS]get-it.now[ARGS]{}",
        "a|f{\"n\": 1}|get-it.now{}");
  CheckText(mistral, "[TOOL_CALLS][{\"name\": \"no\", \"arguments\": {}}]");
  CheckText(mistral, "[TOOL_CALLS]no[ARGS]{}");
  CheckText(mistral, "[TOOL_CALLS]f[ARGS]{\"n\": 1");
  CheckText(mistral, "[TOOL_CALLS]f[ARGS]1 [TOOL_CALLS]");
}

TEST(ToolCall, Harmony) {
  const Family oss = {CallFormat::kHarmony, true};
  const std::string thought = "<|channel|>analysis<|message|>hm é<|end|>";
  const std::string next = "<|start|>assistant";
  Check(oss, thought + next + "<|channel|>final<|message|>Hi {} there", "(hm é)Hi {} there");
  Check(oss, "<|channel|>final<|message|>Hi<|return|>", "Hi");
  Check(oss,
        thought + next + "<|channel|>commentary to=functions.f <|constrain|>json<|message|>" +
            kNested + "<|call|>",
        "(hm é)|f" + kNested);
  // The recipient may stand in the role's part; the end of the answer ends the message.
  Check(oss, thought + next + " to=functions.f<|channel|>commentary json<|message|>{\"n\":1}",
        "(hm é)|f{\"n\":1}");
  Check(oss, " to=functions.f<|channel|>commentary<|message|>{}", "|f{}");
  // A preamble is said. Calls in the channel of reasoning are calls.
  Check(oss,
        "<|channel|>commentary<|message|>Let me see.<|end|>" + next +
            "<|channel|>analysis to=functions.f<|message|>{}<|call|>" + next +
            "<|channel|>commentary to=functions.get-it.now<|message|>{}<|call|>",
        "Let me see.|f{}|get-it.now{}");
  // Two of a kind are joined by a newline.
  Check(oss, thought + next + thought + next + "<|channel|>final<|message|>x", "(hm é\nhm é)x");
  Check(oss, "plain text", "plain text");
  for (const std::string broken : {"<|channel|>commentary to=functions.no<|message|>{}",
                                   "<|channel|>commentary to=functions.f<|message|>{\"n\": 1",
                                   "<|channel|>commentary to=python<|message|>print(1)"}) {
    Check(oss, broken, broken);
    Check(oss, thought + next + broken + "<|call|>", "(hm é)" + next + broken);
  }
  EXPECT_EQ(ReadParts(oss, {thought + next + "<|chan"}, true), "(hm é)");
  const std::string cut = next + "<|channel|>commentary to=functions.f <|constr";
  EXPECT_EQ(ReadParts(oss, {thought + cut}, true), "(hm é)" + cut);
  // Without a parser of reasoning all is said.
  Check({CallFormat::kHarmony}, thought + next + "<|channel|>final<|message|>x", "hm é\nx");
}

TEST(ToolCall, FramesAreRead) {
  const auto tools = Tools();
  for (const CallFormat format : {CallFormat::kHermes, CallFormat::kQwen3Coder, CallFormat::kLlama3,
                                  CallFormat::kGlm, CallFormat::kMiniMax, CallFormat::kMistral,
                                  CallFormat::kMistralList, CallFormat::kHarmony}) {
    const CallList list = ListOf(format);
    const auto call = [&](const char* name) {
      const CallFrame frame = FrameOf(format, name);
      std::string text = frame.begin;
      if (frame.tags.has_value()) {
        text += fmt::format("{}n{}1{}", frame.tags->open, frame.tags->after_key, frame.tags->close);
      } else {
        text += "{\"n\": 1}";
      }
      return text + frame.end;
    };
    const auto write = [&](const std::string& calls) {
      return std::string(list.begin) + calls + std::string(list.end);
    };
    const Family family = {format};
    EXPECT_EQ(ReadParts(family, {write(call("f"))}), "|f{\"n\": 1}") << NameOf(format);
    EXPECT_EQ(
        ReadParts(family, {write(call("f") + std::string(list.between) + call("get-it.now"))}),
        "|f{\"n\": 1}|get-it.now{\"n\": 1}")
        << NameOf(format);
  }
}

// What ends a value begins with '<' in every format; grammars of values rely on it.
TEST(ToolCall, ValuesEndAtATag) {
  for (const CallFormat format :
       {CallFormat::kQwen3Coder, CallFormat::kGlm, CallFormat::kMiniMax}) {
    const auto tags = FrameOf(format, "f").tags;
    ASSERT_TRUE(tags.has_value());
    for (const std::string_view end : tags->never) EXPECT_TRUE(end.starts_with("<")) << end;
  }
}

TEST(ToolCall, IntegersOfAnySize) {
  const auto read = [](const char* key, const std::string& raw) {
    return Tools()->ToJson("f", key, raw);
  };
  EXPECT_EQ(read("n", "12345678901234567890123"), "12345678901234567890123");
  EXPECT_EQ(read("n", "-3.0"), "-3.0");
  EXPECT_EQ(read("n", "3.5"), "\"3.5\"");
  EXPECT_EQ(read("s", "12345678901234567890123"), "\"12345678901234567890123\"");
}

TEST(ToolCall, IdsAreWhatTemplatesTakeBack) {
  const auto id = [](CallFormat format, const std::string& text) {
    const auto parser = MakeAnswerParser(SyntaxOf({format}));
    ParsedPiece piece;
    parser->Push(text, &piece);
    parser->Finish(false, &piece);
    return piece.tool_calls.at(0).id;
  };
  EXPECT_THAT(id(CallFormat::kHermes, "<tool_call>{\"name\": \"f\"}</tool_call>"),
              testing::MatchesRegex("call_[0-9A-Za-z]+"));
  EXPECT_EQ(id(CallFormat::kMistral, "[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{}"), "abcdef123");
  EXPECT_EQ(id(CallFormat::kMistral, "[TOOL_CALLS]f[CALL_ID]1[ARGS]{}").size(), 9u);
}

TEST(ToolCall, FormatsHaveNames) {
  EXPECT_EQ(FindCallFormat("hermes"), CallFormat::kHermes);
  EXPECT_EQ(FindCallFormat("openai"), CallFormat::kHarmony);
  EXPECT_EQ(NameOf(CallFormat::kHarmony), "harmony");
  EXPECT_FALSE(FindCallFormat("auto").has_value());
  EXPECT_EQ(FindReasoningKind("deepseek_r1"), ReasoningKind::kThink);
  EXPECT_EQ(ReasoningKindNames(), "think, mistral, harmony, none");
}

TEST(ToolCall, ToolsAreChecked) {
  const auto param = [](const Json& tools) {
    const Status status = CheckTools(tools, {.max_tools = 3, .max_bytes = 4096});
    return status.ok() ? "" : status.param();
  };
  const auto tool = [](const Json& function) {
    return Json::array({{{"type", "function"}, {"function", function}}});
  };
  EXPECT_EQ(param(tool({{"name", "f"}, {"parameters", {{"type", "object"}}}})), "");
  EXPECT_EQ(param(tool({{"name", "f"}, {"parameters", nullptr}, {"description", nullptr}})), "");
  EXPECT_EQ(param(Json::object()), "tools");
  EXPECT_EQ(param({1}), "tools[0]");
  EXPECT_EQ(param(Json::array({Json::object()})), "tools[0].function");
  EXPECT_EQ(param(Json::array({{{"type", "mcp"}}})), "tools[0].type");
  EXPECT_EQ(param(tool(Json::object())), "tools[0].function.name");
  for (const Json& name :
       {Json(1), Json(""), Json("a b"), Json("a>"), Json("é"), Json(std::string(257, 'a'))}) {
    EXPECT_EQ(param(tool({{"name", name}})), "tools[0].function.name") << name;
  }
  EXPECT_EQ(param(tool({{"name", "f"}, {"description", 1}})), "tools[0].function.description");
  EXPECT_EQ(param(tool({{"name", "f"}, {"parameters", {1}}})), "tools[0].function.parameters");
  EXPECT_EQ(param(tool({{"name", "f"}, {"parameters", {{"type", "string"}}}})),
            "tools[0].function.parameters.type");
  EXPECT_EQ(param(tool({{"name", "f"}, {"parameters", {{"properties", {1}}}}})),
            "tools[0].function.parameters.properties");
  Json twice = tool({{"name", "f"}});
  twice.push_back(twice[0]);
  EXPECT_EQ(param(twice), "tools[1].function.name");
  EXPECT_EQ(param(Json(4, Json::object())), "tools");
  EXPECT_EQ(param(tool({{"name", "f"}, {"description", std::string(5000, 'x')}})), "tools");
}

}  // namespace
}  // namespace oscar
