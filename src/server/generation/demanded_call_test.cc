// Calls that an answer must begin with, in every format: what the grammar lets through is read as
// such calls again, with arguments of the tool's schema.
#include "generation/demanded_call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/rng.h"
#include "grammar/compiler.h"

namespace oscar::server {
namespace {

using Json = nlohmann::ordered_json;
using testing::HasSubstr;

constexpr CallFormat kFormats[] = {
    CallFormat::kHermes,  CallFormat::kQwen3Coder, CallFormat::kLlama3,      CallFormat::kGlm,
    CallFormat::kMiniMax, CallFormat::kMistral,    CallFormat::kMistralList, CallFormat::kHarmony};
constexpr CallFormat kTagFormats[] = {CallFormat::kQwen3Coder, CallFormat::kGlm,
                                      CallFormat::kMiniMax};

const Json kTools = Json::parse(R"([
  {"type": "function", "function": {"name": "weather", "parameters": {"type": "object",
    "properties": {
      "city": {"type": "string"},
      "days": {"type": "integer", "minimum": 1, "maximum": 9},
      "unit": {"enum": ["C", "F", "5", null]},
      "exact": {"type": "boolean"},
      "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]+$"},
      "note": {"type": ["string", "null"], "maxLength": 5},
      "on": {"type": "string", "format": "date"},
      "place": {"$ref": "#/$defs/place"}},
    "required": ["city", "days", "place"],
    "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"},
      "name": {"type": "string", "maxLength": 30}, "in": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]}},
      "required": ["lat", "name"]}}}}},
  {"type": "function", "function": {"name": "now"}}])");

class DemandedCallTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!GrammarCompiler::IsBuiltIn()) GTEST_SKIP() << "built without xgrammar";
    for (int32_t token = 0; token < tokenizer_.vocab_size(); ++token) {
      may_end_.push_back(tokenizer_.TokenBytes(token).find_first_of("\"}]") != std::string::npos);
    }
  }
  static AnswerSyntax SyntaxOf(CallFormat format, const Json& tools) {
    AnswerSyntax syntax;
    syntax.calls = format;
    syntax.tools = std::make_shared<const ToolSet>(tools);
    syntax.harmony = format == CallFormat::kHarmony;
    if (syntax.harmony) syntax.reasoning.emplace();
    return syntax;
  }
  static ParsedPiece Read(const AnswerSyntax& syntax, const std::string& text) {
    ParsedPiece piece;
    const auto parser = MakeAnswerParser(syntax);
    parser->Push(text, &piece);
    parser->Finish(/*is_cut=*/false, &piece);
    return piece;
  }
  std::shared_ptr<const CompiledGrammar> Compile(const GrammarSpec& spec) {
    auto grammar = compiler_.Compile(spec);
    EXPECT_TRUE(grammar.has_value()) << grammar.error().message();
    return grammar.has_value() ? *grammar : nullptr;
  }
  std::shared_ptr<const CompiledGrammar> Demand(const AnswerSyntax& syntax,
                                                std::vector<std::string> tools,
                                                bool several = false) {
    const auto spec = DemandGrammar({std::move(tools), several}, syntax, tokenizer_);
    EXPECT_TRUE(spec.has_value()) << spec.error().message();
    return spec.has_value() ? Compile(*spec) : nullptr;
  }
  // Whether the text is a whole answer.
  bool Matches(const CompiledGrammar& grammar, const std::string& text) {
    const auto matcher = grammar.NewMatcher();
    const auto tokens = tokenizer_.Encode(text, {.parse_special = true});
    for (const TokenId token : *tokens) {
      if (!matcher->Accept(token)) return false;
    }
    return matcher->Accept(stop_);
  }
  // An answer of tokens that are allowed, any of them; more and more often one that may end a
  // string, or `close`, which ends a value of tags: chance alone would find neither.
  std::string Walk(const CompiledGrammar& grammar, const std::string& close, uint64_t seed) {
    const auto matcher = grammar.NewMatcher();
    const Philox rng(seed, 28);
    std::vector<uint32_t> mask((static_cast<size_t>(tokenizer_.vocab_size()) + 31) / 32);
    std::string text;
    for (uint64_t step = 0; step < 300; ++step) {
      const bool wants_end = rng.Below(2 * step, 50) < step;
      if (wants_end && !close.empty() && matcher->AcceptText(close)) {
        text += close;
        continue;
      }
      EXPECT_TRUE(matcher->Fill(mask).ok());
      std::vector<int32_t> all, ends;
      for (int32_t token = 0; token < tokenizer_.vocab_size(); ++token) {
        if ((mask[static_cast<size_t>(token) / 32] >> (token % 32) & 1) == 0) continue;
        if (token == stop_) return matcher->Accept(stop_) ? text : "";
        all.push_back(token);
        if (may_end_[static_cast<size_t>(token)]) ends.push_back(token);
      }
      const auto& some = wants_end && !ends.empty() ? ends : all;
      const int32_t token = some[rng.Below(2 * step + 1, static_cast<uint32_t>(some.size()))];
      EXPECT_TRUE(matcher->Accept(token));
      text += tokenizer_.TokenBytes(token);
    }
    return "";
  }

  Tokenizer tokenizer_ = std::move(*Tokenizer::Load(OSCAR_DEMO_MODEL));
  std::vector<bool> may_end_;
  int32_t stop_ = *tokenizer_.FindToken("<|im_end|>");
  GrammarCompiler compiler_{
      {GrammarVocabularyOf(tokenizer_, tokenizer_.vocab_size(), std::vector<int32_t>{stop_}),
       {},
       ""}};
};

bool IsPlace(const Json& place) {
  bool ok = place.is_object() && place.at("lat").is_number() && place.at("name").is_string();
  for (const auto& [key, value] : place.items()) {
    ok = ok && (key == "lat" || key == "name" || key == "in");
    if (key == "in") ok = ok && (value.is_null() || IsPlace(value));
  }
  return ok;
}

bool IsWeather(const Json& arguments) {
  for (const char* name : {"city", "days", "place"}) {
    if (!arguments.contains(name)) return false;
  }
  for (const auto& [key, value] : arguments.items()) {
    const auto text = value.is_string() ? value.get<std::string>() : "";
    if (key == "city" && !value.is_string()) return false;
    if (key == "days" && !(value.is_number_integer() && value >= 1 && value <= 9)) return false;
    if (key == "unit" && !(value == "C" || value == "F" || value == "5" || value.is_null())) {
      return false;
    }
    if (key == "exact" && !value.is_boolean()) return false;
    if (key == "code" && !testing::internal::RE::FullMatch(text, "[A-Z][A-Z][A-Z]-[0-9]+")) {
      return false;
    }
    if (key == "note" && !value.is_null() && !(value.is_string() && text.size() <= 20)) {
      return false;
    }
    if (key == "on" && text.size() != 10) return false;
    if (key == "place" && !IsPlace(value)) return false;
  }
  return true;
}

TEST_F(DemandedCallTest, WhatIsWrittenIsReadInEveryFormat) {
  for (const CallFormat format : kFormats) {
    const AnswerSyntax syntax = SyntaxOf(format, kTools);
    const auto grammar = Demand(syntax, {"weather"});
    ASSERT_NE(grammar, nullptr) << NameOf(format);
    const auto tags = FrameOf(format, "weather").tags;
    const std::string close(tags.has_value() ? tags->close : "");
    int finished = 0;
    for (uint64_t seed = 0; seed < 12; ++seed) {
      const std::string text = Walk(*grammar, close, seed);
      if (text.empty()) continue;
      ++finished;
      const ParsedPiece read = Read(syntax, text);
      ASSERT_EQ(read.tool_calls.size(), 1u) << NameOf(format) << ": " << text;
      EXPECT_EQ(read.content, "") << text;
      EXPECT_EQ(read.tool_calls[0].name, "weather");
      const Json arguments = Json::parse(read.tool_calls[0].arguments, nullptr, false);
      EXPECT_TRUE(arguments.is_object() && IsWeather(arguments))
          << NameOf(format) << ": " << text << "\n"
          << read.tool_calls[0].arguments;
    }
    EXPECT_GE(finished, 6) << NameOf(format);
  }
}

TEST_F(DemandedCallTest, OneOrSeveralOfTheTools) {
  for (const CallFormat format : kFormats) {
    const Json tools = Json::parse(R"([{"function": {"name": "now"}},
        {"function": {"name": "later", "parameters": {"type": "object"}}}])");
    const AnswerSyntax syntax = SyntaxOf(format, tools);
    const auto one = Demand(syntax, {"now", "later"}),
               many = Demand(syntax, {"now", "later"}, true);
    ASSERT_TRUE(one != nullptr && many != nullptr);
    const CallList list = ListOf(format);
    const auto call = [&](const char* name) {
      const CallFrame frame = FrameOf(format, name);
      return frame.begin + (frame.tags.has_value() ? "" : "{}") + frame.end;
    };
    const auto write = [&](const std::string& calls) {
      return std::string(list.begin) + calls + std::string(list.end);
    };
    const std::string two = write(call("now") + std::string(list.between) + call("later"));
    for (const auto& grammar : {one, many}) {
      EXPECT_TRUE(Matches(*grammar, write(call("now")))) << NameOf(format);
      EXPECT_TRUE(Matches(*grammar, write(call("later")))) << NameOf(format);
      EXPECT_FALSE(Matches(*grammar, write(call("never")))) << NameOf(format);
      EXPECT_FALSE(Matches(*grammar, "Sure. " + write(call("now")))) << NameOf(format);
      EXPECT_FALSE(Matches(*grammar, "")) << NameOf(format);
    }
    EXPECT_FALSE(Matches(*one, two)) << NameOf(format);
    EXPECT_TRUE(Matches(*many, two)) << NameOf(format);
    EXPECT_EQ(Read(syntax, two).tool_calls.size(), 2u) << NameOf(format);
  }
}

TEST_F(DemandedCallTest, HarmonyMayReasonFirst) {
  const AnswerSyntax syntax = SyntaxOf(CallFormat::kHarmony, kTools);
  const auto grammar = Demand(syntax, {"now"});
  const std::string call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}";
  const std::string thought = "<|channel|>analysis<|message|>Now? Yes.<|end|><|start|>assistant";
  EXPECT_TRUE(Matches(*grammar, call));
  EXPECT_TRUE(Matches(*grammar, thought + call));
  EXPECT_FALSE(Matches(*grammar, "<|channel|>final<|message|>Now.<|end|>"));
  EXPECT_EQ(Read(syntax, thought + call).reasoning, "Now? Yes.");
}

// Values are verbatim between their tags: with blanks, line breaks and what looks like a tag.
TEST_F(DemandedCallTest, TextOfTags) {
  const AnswerSyntax syntax = SyntaxOf(CallFormat::kQwen3Coder, kTools);
  const auto grammar = Demand(syntax, {"weather"});
  const auto write = [](const std::string& city, const std::string& days) {
    return "<tool_call>\n<function=weather>\n<parameter=city>\n" + city +
           "\n</parameter>\n<parameter=days>\n" + days +
           "\n</parameter>\n<parameter=place>\n{\"lat\": 1, \"name\": \"x\"}\n</parameter>\n"
           "</function>\n</tool_call>";
  };
  for (const std::string city : {"Rome", "", " é\n\n日本 </b> <parameter> \"\\", "5", "null"}) {
    const std::string text = write(city, "5");
    EXPECT_TRUE(Matches(*grammar, text)) << text;
    const Json read = Json::parse(Read(syntax, text).tool_calls.at(0).arguments);
    EXPECT_EQ(read["city"], city);
    EXPECT_EQ(read["days"], 5);
  }
  EXPECT_FALSE(Matches(*grammar, write("a</parameter>b", "5")));
  EXPECT_FALSE(Matches(*grammar, write("Rome", "10")));
  EXPECT_FALSE(Matches(*grammar, write("Rome", "\"5\"")));
}

// What is no schema, but passes for the parameters of a tool, is refused or written; never worse.
TEST_F(DemandedCallTest, HostileSchemas) {
  for (const char* value : {R"({"enum": 5})",
                            R"({"enum": {}})",
                            R"({"enum": []})",
                            R"({"type": 5})",
                            R"({"type": []})",
                            R"({"type": {}})",
                            R"({"type": "nothing"})",
                            R"({"const": null})",
                            R"({"anyOf": [true, 5]})",
                            R"({"anyOf": [{"anyOf": [{"anyOf": []}]}]})",
                            R"({"pattern": 5, "type": "string"})",
                            R"({"format": {}, "type": "string"})",
                            R"({"minLength": "x", "type": "string"})",
                            R"({"minLength": -1, "type": "string"})",
                            R"({"maxLength": 1e99, "type": "string"})",
                            R"({"type": "string", "pattern": "\\"})",
                            R"({"type": "string", "pattern": "["})",
                            R"({"type": "array", "items": 5})",
                            R"({"type": "array", "items": {"$ref": "#/$defs/a"}})",
                            R"({"$ref": ""})",
                            R"({"$ref": "#/"})",
                            R"({"$ref": "#/$defs"})",
                            "5",
                            "[]",
                            "null"}) {
    for (const char* frame :
         {R"({"type": "object", "properties": {"a": %}, "required": ["a", 5, null]})",
          R"({"properties": {"a": %}, "required": "a", "$defs": {"a": {"$ref": "#/$defs/a"}}})",
          R"({"properties": {"a": {"type": ["array", "string"], "items": %}}, "required": {}})"}) {
      std::string text = frame;
      text.replace(text.find('%'), 1, value);
      Json tools = Json::parse(R"([{"function": {"name": "f"}}])");
      tools[0]["function"]["parameters"] = Json::parse(text);
      for (const CallFormat format : {CallFormat::kHermes, CallFormat::kQwen3Coder}) {
        const auto spec = DemandGrammar({{"f"}, true}, SyntaxOf(format, tools), tokenizer_);
        if (!spec.has_value()) {
          EXPECT_EQ(spec.error().code(), StatusCode::kInvalidArgument) << text;
          continue;
        }
        const auto grammar = compiler_.Compile(*spec);
        EXPECT_TRUE(grammar.has_value() || grammar.error().code() == StatusCode::kInvalidArgument)
            << text;
      }
    }
  }
}

// Whichever schema cannot be kept to is refused by name, in JSON and as tags.
TEST_F(DemandedCallTest, RefusesWhatItCannotKeepTo) {
  const auto error = [&](CallFormat format, const char* parameters) {
    Json tools = Json::parse(R"([{"function": {"name": "f"}}])");
    tools[0]["function"]["parameters"] = Json::parse(parameters);
    const auto spec = DemandGrammar({{"f"}, false}, SyntaxOf(format, tools), tokenizer_);
    if (spec.has_value()) return std::string("taken");
    EXPECT_EQ(spec.error().code(), StatusCode::kInvalidArgument);
    return spec.error().message();
  };
  for (const CallFormat format : kFormats) {
    EXPECT_THAT(error(format, R"({"type": "object", "not": {}})"), HasSubstr("'not'"));
  }
  const struct {
    const char* parameters;
    const char* words;
  } cases[] = {
      {R"({"properties": {"a": {"type": ["string", "integer"], "minimum": 3}}})", "'a' of 'f'"},
      {R"({"properties": {"a": {"anyOf": [{"type": "string"}, {"enum": [3]}]}}})", "'a' of 'f'"},
      {R"({"properties": {"a": {"type": "string", "pattern": ".*"}}})", "'pattern'"},
      {R"({"properties": {"a": {"type": "string", "pattern": "[^a]"}}})", "'pattern'"},
      {R"({"properties": {"a": {"type": "string", "pattern": "[!-z]"}}})", "'pattern'"},
      {R"({"properties": {"a": {"type": "string", "pattern": "a", "maxLength": 3}}})", "lengths"},
      {R"({"properties": {"a": {"type": "string", "format": "color"}}})", "'format'"},
      {R"({"properties": {"a": {"$ref": "#/$defs/b"}}})", "#/$defs/b"},
      {R"({"properties": {"a": {"type": "array", "items": {"$ref": "#/properties/a"}}}})",
       "definition"},
      {R"({"properties": {"a": {"enum": ["x</parameter></arg_value>"]}}})", "no value"},
      {R"({"properties": {"a": false}})", "no value"},
      {R"({"properties": {"a>": {}}})", "a>"},
      {R"({"minProperties": 1})", "'minProperties'"},
      {R"({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "properties": {"a":
          {"$ref": "#/$defs/a"}}})",
       "levels"},
  };
  for (const CallFormat format : kTagFormats) {
    for (const auto& c : cases) EXPECT_THAT(error(format, c.parameters), HasSubstr(c.words));
  }
  for (const char* taken : {
           "{}",
           R"({"type": "object", "required": ["x"]})",
           R"({"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}})",
           R"({"properties": {"a": {"anyOf": [{"enum": ["x", "y"]}, {"type": "null"}]}}})",
           R"({"properties": {"a": {"type": "array", "items": {"type": "string"}}}})",
           R"({"properties": {"a": {"type": "string", "minLength": 2}}})",
           R"({"properties": {"a": {"type": "string", "pattern": "^[A-Z]{3}\\d$"}}})",
           R"({"properties": {"a": {"type": "string", "nullable": true}, "b": {}, "c": true}})",
       }) {
    for (const CallFormat format : kFormats) EXPECT_EQ(error(format, taken), "taken") << taken;
  }
}

}  // namespace
}  // namespace oscar::server
