#include "openai/request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace oscar::server {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Json = nlohmann::ordered_json;

RequestLimits Limits() {
  RequestLimits limits;
  limits.vocab_size = 100;
  limits.defaults.temperature = 0.7f;
  return limits;
}

Json Chat(const Json& extra = Json::object()) {
  Json body = {{"messages", Json::array({{{"role", "user"}, {"content", "hi"}}})}};
  body.update(extra);
  return body;
}

ApiResult<ChatRequest> ParseChat(const Json& body) {
  return ParseChatRequest(body.dump(), Limits());
}
ApiResult<CompletionRequest> ParseCompletion(const Json& body) {
  return ParseCompletionRequest(body.dump(), Limits());
}

// The bound that the message names is one that is accepted.
TEST(ChatRequest, BoundsAreAccepted) {
  const auto lowest = ParseChat(Chat({{"repetition_penalty", 0.01}}));
  ASSERT_TRUE(lowest.has_value()) << lowest.error().message;
  EXPECT_FLOAT_EQ(lowest->params.sampling.repetition_penalty, 0.01f);
  EXPECT_TRUE(ParseChat(Chat({{"top_k", 1'000'000'000}})).has_value());
  const auto beyond = ParseChat(Chat({{"top_k", 1'000'000'001}}));
  const auto far_beyond = ParseChat(Chat({{"top_k", 3'000'000'000}}));
  ASSERT_FALSE(beyond.has_value() || far_beyond.has_value());
  EXPECT_EQ(beyond.error().message, far_beyond.error().message);
  EXPECT_THAT(beyond.error().message, HasSubstr("1000000000"));
}

TEST(ChatRequest, Defaults) {
  const auto request = ParseChat(Chat());
  ASSERT_TRUE(request.has_value()) << request.error().message;
  EXPECT_FLOAT_EQ(request->params.sampling.temperature, 0.7f);
  EXPECT_FALSE(request->params.max_tokens.has_value());
  EXPECT_FALSE(request->params.stream);
  EXPECT_EQ(request->params.n, 1);
  EXPECT_TRUE(request->add_generation_prompt);
  EXPECT_EQ(request->messages->at(0).at("content"), "hi");
}

TEST(ChatRequest, EveryFieldIsRead) {
  const auto request = ParseChat(Chat({{"model", "m"},
                                       {"max_tokens", 5},
                                       {"max_completion_tokens", 7},
                                       {"temperature", 0},
                                       {"top_p", 0.5},
                                       {"top_k", -1},
                                       {"min_p", 0.1},
                                       {"n", 3},
                                       {"stop", "x"},
                                       {"seed", -5},
                                       {"stream", true},
                                       {"stream_options", {{"include_usage", true}}},
                                       {"logprobs", true},
                                       {"top_logprobs", 20},
                                       {"frequency_penalty", -2},
                                       {"presence_penalty", 2},
                                       {"repetition_penalty", 1.1},
                                       {"logit_bias", {{"99", -100}, {"0", 1.5}}},
                                       {"min_tokens", 2},
                                       {"stop_token_ids", {4, 5}},
                                       {"ignore_eos", true},
                                       {"skip_special_tokens", false},
                                       {"include_stop_str_in_output", true},
                                       {"chat_template_kwargs", {{"enable_thinking", false}}},
                                       {"response_format", {{"type", "text"}}},
                                       {"tools", Json::array({{{"type", "function"}}})},
                                       {"user", "someone"}}));
  ASSERT_TRUE(request.has_value()) << request.error().message;
  const GenerationParams& p = request->params;
  EXPECT_EQ(p.model, "m");
  EXPECT_EQ(p.max_tokens, 7);
  EXPECT_EQ(p.sampling.temperature, 0.0f);
  EXPECT_EQ(p.sampling.top_k, 0);
  EXPECT_EQ(p.n, 3);
  EXPECT_THAT(p.stop, ElementsAre("x"));
  EXPECT_EQ(p.seed, -5);
  EXPECT_TRUE(p.stream && p.include_usage && p.logprobs && p.ignore_eos);
  EXPECT_EQ(p.top_logprobs, 20);
  EXPECT_THAT(p.sampling.logit_bias, ElementsAre(std::pair(99, -100.0f), std::pair(0, 1.5f)));
  EXPECT_THAT(p.stop_token_ids, ElementsAre(4, 5));
  EXPECT_FALSE(p.skip_special_tokens);
  EXPECT_EQ(request->template_kwargs->at("enable_thinking"), false);
  EXPECT_EQ(request->tools->size(), 1u);
}

TEST(ChatRequest, ReadsWhatToDoWithTools) {
  const auto read = [](const Json& choice) {
    return *ParseChat(Chat({{"tool_choice", choice}, {"parallel_tool_calls", false}}));
  };
  EXPECT_EQ(read("auto").tool_choice, ToolChoice::kAuto);
  EXPECT_EQ(read("none").tool_choice, ToolChoice::kNone);
  EXPECT_EQ(read("required").tool_choice, ToolChoice::kRequired);
  const ChatRequest named = read({{"type", "function"}, {"function", {{"name", "f"}}}});
  EXPECT_EQ(named.tool_choice, ToolChoice::kNamed);
  EXPECT_EQ(named.tool_name, "f");
  EXPECT_FALSE(named.parallel_tool_calls);
}

TEST(ChatRequest, NullIsAbsentForEveryField) {
  Json body = Chat();
  for (const char* name : {"model",
                           "max_tokens",
                           "max_completion_tokens",
                           "temperature",
                           "top_p",
                           "n",
                           "stop",
                           "seed",
                           "stream",
                           "stream_options",
                           "logprobs",
                           "top_logprobs",
                           "frequency_penalty",
                           "presence_penalty",
                           "logit_bias",
                           "user",
                           "response_format",
                           "tools",
                           "tool_choice",
                           "parallel_tool_calls",
                           "top_k",
                           "min_p",
                           "repetition_penalty",
                           "ignore_eos",
                           "min_tokens",
                           "stop_token_ids",
                           "include_stop_str_in_output",
                           "skip_special_tokens",
                           "chat_template_kwargs",
                           "add_generation_prompt",
                           "continue_final_message",
                           "return_token_ids",
                           "prompt_logprobs",
                           "truncate_prompt_tokens",
                           "priority",
                           "request_id",
                           "bad_words",
                           "functions",
                           "function_call",
                           "modalities",
                           "audio"}) {
    body[name] = nullptr;
  }
  const auto request = ParseChat(body);
  EXPECT_TRUE(request.has_value()) << request.error().message;
}

struct Bad {
  const char* field;
  Json value;
  const char* code = "invalid_value";
};

TEST(ChatRequest, WrongTypesAndRangesNameTheField) {
  const std::vector<Bad> cases = {
      {"model", 5},
      {"max_tokens", "5"},
      {"max_tokens", 0},
      {"max_tokens", -1},
      {"max_tokens", 1.5},
      {"max_tokens", 1e300},
      {"max_tokens", 18446744073709551615u},
      {"max_completion_tokens", true},
      {"temperature", "hot"},
      {"temperature", -0.1},
      {"temperature", 2.1},
      {"top_p", 0},
      {"top_p", 1.1},
      {"top_k", -2},
      {"min_p", 2},
      {"n", 0},
      {"n", 129},
      {"n", "1"},
      {"stop", 5},
      {"stop", Json::array({1})},
      {"stop", ""},
      {"stop", Json::array({"a", "b", "c", "d", "e"})},
      {"stop", std::string(257, 'x')},
      {"seed", 1.5},
      {"seed", "x"},
      {"stream", 1},
      {"logprobs", 1},
      {"top_logprobs", 21},
      {"top_logprobs", 1},
      {"frequency_penalty", 3},
      {"presence_penalty", -3},
      {"logit_bias", Json::array()},
      {"logit_bias", {{"x", 1}}},
      {"logit_bias", {{"100", 1}}},
      {"logit_bias", {{"-1", 1}}},
      {"logit_bias", {{"1", 101}}},
      {"logit_bias", {{"1", "a"}}},
      {"min_tokens", -1},
      {"stop_token_ids", 1},
      {"stop_token_ids", {-1}},
      {"stop_token_ids", {100}},
      {"stop_token_ids", {"a"}},
      {"ignore_eos", "yes"},
      {"chat_template_kwargs", 1},
      {"chat_template_kwargs", {{"messages", 1}}},
      {"response_format", "text"},
      {"response_format", {{"type", "xml"}}, "unsupported_parameter"},
      {"response_format", {{"type", "json_schema"}}},
      {"response_format", {{"type", "json_schema"}, {"json_schema", {{"schema", {{"not", 1}}}}}}},
      {"tools", 1},
      {"tools", {1}},
      {"tool_choice", "sometimes"},
      {"tool_choice", 5},
      {"tool_choice", {{"type", "function"}}},
      {"tool_choice", {{"type", "function"}, {"function", "f"}}},
      {"tool_choice", {{"type", "function"}, {"function", {{"name", 5}}}}},
      {"tool_choice", {{"type", "mcp"}, {"function", {{"name", "f"}}}}},
      {"parallel_tool_calls", "yes"},
      {"functions", Json::array(), "unsupported_parameter"},
      {"modalities", {"audio"}, "unsupported_parameter"},
      {"bad_words", 5},
      {"bad_words", {5}},
      {"bad_words", {""}},
      {"bad_words", {std::string(257, 'x')}},
      {"bad_words", std::vector<std::string>(257, "x")},
      {"allowed_token_ids", 5},
      {"allowed_token_ids", Json::array()},
      {"allowed_token_ids", {-1}},
      {"allowed_token_ids", {100}},
      {"allowed_token_ids", {1.5}},
      {"allowed_token_ids", {"1"}},
      {"allowed_token_ids", std::vector<int>(101, 1)},
      {"guided_json", {{"not", Json::object()}}},
      {"guided_json", "{"},
      {"guided_regex", 1},
      {"guided_regex", ""},
      {"guided_choice", "yes"},
      {"guided_choice", Json::array()},
      {"grammar", 1},
      {"structured_outputs", 1},
      {"prompt_logprobs", 21, "invalid_value"},
      {"priority", "high"},
      {"priority", 1.5},
      {"priority", int64_t{1} << 40},
      {"best_of", 0},
      {"best_of", 129},
      {"best_of", "2"},
      {"suffix", "x", "unsupported_parameter"},
      {"truncate_prompt_tokens", 0},
      {"stream_options", {{"include_usage", true}}},
  };
  for (const Bad& bad : cases) {
    const auto request = ParseChat(Chat({{bad.field, bad.value}}));
    ASSERT_FALSE(request.has_value()) << bad.field << " " << bad.value;
    EXPECT_EQ(request.error().param, bad.field) << request.error().message;
    EXPECT_EQ(request.error().code, bad.code) << request.error().message;
    EXPECT_EQ(request.error().http_status, 400);
    EXPECT_FALSE(request.error().message.empty());
  }
}

TEST(ChatRequest, MessagesAreChecked) {
  const auto error = [](const Json& messages) {
    const auto request = ParseChat({{"messages", messages}});
    return request.has_value() ? ApiError{} : request.error();
  };
  EXPECT_EQ(error("x").param, "messages");
  EXPECT_EQ(error(Json::array()).param, "messages");
  EXPECT_EQ(error({1}).param, "messages[0]");
  EXPECT_EQ(error({{{"content", "x"}}}).param, "messages[0].role");
  EXPECT_EQ(error({{{"role", "king"}, {"content", "x"}}}).param, "messages[0].role");
  EXPECT_EQ(error({{{"role", "user"}, {"content", 5}}}).param, "messages[0].content");
  EXPECT_EQ(error({{{"role", "user"}}}).param, "messages[0].content");
  const ApiError image =
      error({{{"role", "user"}, {"content", Json::array({{{"type", "image_url"}}})}}});
  EXPECT_EQ(image.code, "unsupported_parameter");
  EXPECT_EQ(image.param, "messages[0].content[0]");
  EXPECT_EQ(ParseChat(Json::object()).error().code, "missing_required_parameter");
  Json many = Json::array();
  for (int i = 0; i < 4097; ++i) many.push_back({{"role", "user"}, {"content", ""}});
  EXPECT_THAT(error(many).message, HasSubstr("4097"));
}

TEST(ChatRequest, MessagesAreNormalised) {
  const auto request = ParseChat(
      {{"messages",
        {{{"role", "developer"}, {"content", "be brief"}},
         {{"role", "user"},
          {"content",
           Json::array({{{"type", "text"}, {"text", "a"}}, {{"type", "text"}, {"text", "b"}}})}},
         {{"role", "assistant"},
          {"content", nullptr},
          {"tool_calls",
           Json::array({{{"function", {{"name", "f"}, {"arguments", "{\"x\": 1}"}}}}})}},
         {{"role", "assistant"}, {"content", nullptr}},
         {{"role", "tool"}, {"content", "4"}, {"tool_call_id", "c"}, {"name", nullptr}}}}});
  ASSERT_TRUE(request.has_value()) << request.error().message;
  const Json& messages = *request->messages;
  EXPECT_EQ(messages[0]["role"], "system");
  EXPECT_EQ(messages[1]["content"].size(), 2);  // the template joins the parts, or reads them
  EXPECT_EQ(messages[2]["content"], "");
  EXPECT_EQ(messages[2]["tool_calls"][0]["function"]["arguments"]["x"], 1);
  EXPECT_EQ(messages[3]["content"], "");
  EXPECT_EQ(messages[4]["tool_call_id"], "c");
  EXPECT_FALSE(messages[4].contains("name"));
}

TEST(ChatRequest, PriorityBadWordsAndAllowedTokens) {
  const auto request = ParseChat(Chat({{"priority", -7},
                                       {"bad_words", {"x", " y"}},
                                       {"allowed_token_ids", {5, 99, 5}},
                                       {"best_of", 3}}));
  ASSERT_TRUE(request.has_value()) << request.error().message;
  EXPECT_EQ(request->params.priority, -7);
  EXPECT_THAT(request->params.bad_words, ElementsAre("x", " y"));
  EXPECT_THAT(request->params.allowed_token_ids, ElementsAre(5, 99, 5));
  EXPECT_EQ(request->params.choices(), 3);
}

TEST(Requests, BodiesThatAreNoJsonObjects) {
  for (const std::string& body :
       {std::string(), std::string("{"), std::string("[]"), std::string("5"),
        std::string("{\"messages\": \"\xff\"}"), std::string("{\"a\": \"\\ud800\"}"),
        std::string(100, '[') + std::string(100, ']'), std::string("nul\0l", 5),
        std::string("{\"tools\": [18446744073709551616]}")}) {
    for (const auto& error :
         {ParseChatRequest(body, Limits()).error(), ParseCompletionRequest(body, Limits()).error(),
          ParseTokenizeRequest(body, Limits()).error(),
          ParseDetokenizeRequest(body, Limits()).error()}) {
      EXPECT_EQ(error.code, "invalid_json") << body;
      EXPECT_EQ(error.http_status, 400);
    }
  }
}

TEST(CompletionRequest, FourShapesOfPrompt) {
  EXPECT_EQ(ParseCompletion({{"prompt", "a"}})->prompts[0].text, "a");
  EXPECT_EQ(ParseCompletion({{"prompt", {"a", "b"}}})->prompts.size(), 2u);
  EXPECT_THAT(ParseCompletion({{"prompt", {1, 2}}})->prompts[0].tokens, ElementsAre(1, 2));
  const auto lists = ParseCompletion({{"prompt", {{1, 2}, {3}}}});
  EXPECT_THAT(lists->prompts[1].tokens, ElementsAre(3));
  for (const Json& bad : {Json(5), Json::array(), Json::array({1, "a"}), Json::array({100}),
                          Json::array({-1}), Json::array({1.5}), Json::array({Json::array({"a"})}),
                          Json::array({nullptr}), Json(std::vector<std::string>(65, "x"))}) {
    const auto request = ParseCompletion({{"prompt", bad}});
    ASSERT_FALSE(request.has_value()) << bad;
    EXPECT_EQ(request.error().param, "prompt") << bad;
  }
  EXPECT_EQ(ParseCompletion(Json::object()).error().code, "missing_required_parameter");
}

TEST(CompletionRequest, LogprobsBestOfAndSuffix) {
  const auto request = ParseCompletion(
      {{"prompt", "a"}, {"logprobs", 0}, {"echo", true}, {"max_tokens", 0}, {"best_of", 1}});
  ASSERT_TRUE(request.has_value()) << request.error().message;
  EXPECT_TRUE(request->params.logprobs && request->echo);
  EXPECT_EQ(request->params.max_tokens, 0);
  EXPECT_FALSE(ParseCompletion({{"prompt", "a"}, {"logprobs", false}})->params.logprobs);
  EXPECT_EQ(ParseCompletion({{"prompt", "a"}, {"logprobs", 21}}).error().param, "logprobs");
  const auto best = ParseCompletion({{"prompt", "a"}, {"best_of", 5}, {"n", 2}});
  EXPECT_EQ(best->params.choices(), 5);
  EXPECT_EQ(ParseCompletion({{"prompt", "a"}, {"n", 2}})->params.choices(), 2);
  EXPECT_EQ(ParseCompletion({{"prompt", "a"}, {"n", 3}, {"best_of", 2}}).error().param, "best_of");
  EXPECT_EQ(ParseCompletion({{"prompt", "a"}, {"best_of", 2}, {"stream", true}}).error().param,
            "best_of");
  EXPECT_TRUE(ParseCompletion({{"prompt", "a"}, {"n", 2}, {"best_of", 2}, {"stream", true}}));
  // Choices of all prompts together are bounded.
  const std::vector<std::string> prompts(8, "a");
  EXPECT_TRUE(ParseCompletion({{"prompt", prompts}, {"n", 64}}).has_value());
  EXPECT_EQ(ParseCompletion({{"prompt", prompts}, {"n", 65}}).error().param, "n");
  EXPECT_EQ(ParseCompletion({{"prompt", prompts}, {"best_of", 65}}).error().param, "best_of");
  EXPECT_EQ(ParseCompletion({{"prompt", "a"}, {"suffix", "b"}}).error().param, "suffix");
}

// Every spelling of a form is one spec, and a request has one.
TEST(Requests, OneFormOfAnswer) {
  using Kind = GrammarSpec::Kind;
  const Json schema = {{"type", "object"}};
  const struct {
    const char* field;
    Json value;
    Kind kind;
    std::string text;
  } cases[] = {
      {"response_format", {{"type", "json_object"}}, Kind::kJsonObject, ""},
      {"response_format",
       {{"type", "json_schema"}, {"json_schema", {{"name", "a"}, {"schema", schema}}}},
       Kind::kJsonSchema,
       schema.dump()},
      {"response_format",
       {{"type", "json_schema"}, {"schema", schema}},
       Kind::kJsonSchema,
       schema.dump()},
      {"guided_json", schema, Kind::kJsonSchema, schema.dump()},
      {"guided_json", schema.dump(), Kind::kJsonSchema, schema.dump()},
      {"json_schema", schema.dump(), Kind::kJsonSchema, schema.dump()},
      {"guided_regex", "a+", Kind::kRegex, "a+"},
      {"regex", "a+", Kind::kRegex, "a+"},
      {"guided_choice", {"a", "b"}, Kind::kChoice, ""},
      {"guided_grammar", "root ::= \"a\"", Kind::kGrammar, "root ::= \"a\""},
      {"grammar", "root ::= \"a\"", Kind::kGrammar, "root ::= \"a\""},
      {"ebnf", "root ::= \"a\"", Kind::kGrammar, "root ::= \"a\""},
      {"structured_outputs", {{"regex", "a"}, {"json", nullptr}}, Kind::kRegex, "a"},
      {"structured_outputs", {{"json_object", true}}, Kind::kJsonObject, ""},
  };
  for (const auto& c : cases) {
    const auto request = ParseChat(Chat({{c.field, c.value}}));
    ASSERT_TRUE(request.has_value()) << c.field << " " << request.error().message;
    ASSERT_TRUE(request->params.constraint.has_value()) << c.field;
    EXPECT_EQ(request->params.constraint->kind, c.kind) << c.field << " " << c.value;
    EXPECT_EQ(request->params.constraint->text, c.text);
    // Beside another one it is refused, whichever comes first.
    for (const char* other : {"response_format", "guided_choice"}) {
      if (std::string(c.field) == other) continue;
      const Json second =
          std::string(other) == "guided_choice" ? Json{"x"} : Json{{"type", "json_object"}};
      const auto both = ParseChat(Chat({{c.field, c.value}, {other, second}}));
      ASSERT_FALSE(both.has_value()) << c.field;
      EXPECT_EQ(both.error().code, "invalid_value");
    }
  }
  for (const auto& [field, value] :
       {std::pair<const char*, Json>{"response_format", {{"type", "text"}}},
        {"grammar", ""},
        {"structured_outputs", Json::object()}}) {
    const auto request = ParseChat(Chat({{field, value}}));
    ASSERT_TRUE(request.has_value()) << request.error().message;
    EXPECT_FALSE(request->params.constraint.has_value());
  }
}

}  // namespace
}  // namespace oscar::server
