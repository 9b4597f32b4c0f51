#include "messages/request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace oscar::server {
namespace {

using testing::HasSubstr;
using Json = nlohmann::ordered_json;

RequestLimits Limits() {
  RequestLimits limits;
  limits.vocab_size = 100;
  return limits;
}

Json Body(const Json& extra = Json::object()) {
  Json body = {{"model", "m"},
               {"max_tokens", 10},
               {"messages", Json::array({{{"role", "user"}, {"content", "hi"}}})}};
  body.update(extra);
  return body;
}

Json User(const Json& content) {
  return Body({{"messages", Json::array({{{"role", "user"}, {"content", content}}})}});
}

ApiResult<ChatRequest> Parse(const Json& body) {
  return ParseMessagesRequest(body.dump(), Limits());
}

ApiError ErrorOf(const Json& body) {
  const auto request = Parse(body);
  EXPECT_FALSE(request.has_value()) << body;
  return request.has_value() ? ApiError() : request.error();
}

TEST(MessagesRequest, ATurnOfAnAgent) {
  const auto request = Parse(Json::parse(R"({
    "model": "m", "max_tokens": 100, "stream": true, "temperature": 0.5, "top_k": 5, "top_p": 0.9,
    "system": [{"type": "text", "text": "S1", "cache_control": {"type": "ephemeral"}},
               {"type": "text", "text": "S2"}],
    "metadata": {"user_id": "u"}, "cache_control": {"type": "ephemeral"},
    "context_management": {"edits": []}, "service_tier": "auto",
    "stop_sequences": ["END"],
    "thinking": {"type": "enabled", "budget_tokens": 2048},
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"},
               "cache_control": {"type": "ephemeral"}},
              {"type": "custom", "name": "g", "input_schema": {}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": false},
    "messages": [
      {"role": "user", "content": "q"},
      {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "let me see"},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "id": "t2", "name": "g", "input": {}}]},
      {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "one"}]},
        {"type": "tool_result", "tool_use_id": "t2", "is_error": true},
        {"type": "text", "text": "and?"}]},
      {"role": "user", "content": "go"}]})"));
  ASSERT_TRUE(request.has_value()) << request.error().message;
  EXPECT_EQ(*request->messages, Json::parse(R"([
    {"role":"system","content":[{"type":"text","text":"S1"},{"type":"text","text":"S2"}]},
    {"role":"user","content":"q"},
    {"role":"assistant","content":"let me see","reasoning_content":"hm","tool_calls":[
      {"id":"t1","type":"function","function":{"name":"f","arguments":{"x":1}}},
      {"id":"t2","type":"function","function":{"name":"g","arguments":{}}}]},
    {"role":"tool","tool_call_id":"t1","name":"f","content":"one"},
    {"role":"tool","tool_call_id":"t2","name":"g","content":"error"},
    {"role":"user","content":[{"type":"text","text":"and?"},{"type":"text","text":"go"}]}])"));
  EXPECT_EQ(*request->tools, Json::parse(R"([
    {"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object"}}},
    {"type":"function","function":{"name":"g","parameters":{}}}])"));
  EXPECT_EQ(*request->template_kwargs, Json::parse(R"({"enable_thinking":true})"));
  const GenerationParams& params = request->params;
  EXPECT_EQ(params.stop, std::vector<std::string>{"END"});
  EXPECT_EQ(params.max_tokens, 100);
  EXPECT_EQ(params.sampling.top_k, 5);
  EXPECT_TRUE(params.stream && params.may_cut_max_tokens);
  EXPECT_TRUE(request->add_generation_prompt);
}

TEST(MessagesRequest, AnAnswerThatTheClientBeganIsContinued) {
  Json body = Body();
  body["messages"].push_back({{"role", "assistant"}, {"content", "The answer is"}});
  const auto request = Parse(body);
  ASSERT_TRUE(request.has_value()) << request.error().message;
  EXPECT_TRUE(request->continue_final_message && !request->add_generation_prompt);
}

TEST(MessagesRequest, ThinkingIsTheTemplatesToSwitch) {
  EXPECT_EQ(Parse(Body())->template_kwargs, nullptr);
  EXPECT_EQ(*Parse(Body({{"thinking", {{"type", "disabled"}}}}))->template_kwargs,
            Json::parse(R"({"enable_thinking":false})"));
  EXPECT_EQ(Parse(Body({{"thinking", {{"type", "adaptive"}}}}))->template_kwargs, nullptr);
  EXPECT_EQ(*Parse(Body({{"thinking", {{"type", "disabled"}}},
                         {"chat_template_kwargs", {{"enable_thinking", true}}},
                         {"output_config", {{"effort", "low"}}}}))
                 ->template_kwargs,
            Json::parse(R"({"enable_thinking":true,"reasoning_effort":"low"})"));
}

TEST(MessagesRequest, CountingNeedsNoMaxTokens) {
  Json body = Body();
  body.erase("max_tokens");
  EXPECT_TRUE(ParseCountTokensRequest(body.dump(), Limits()).has_value());
  EXPECT_EQ(ErrorOf(body).param, "max_tokens");
}

TEST(MessagesRequest, ErrorsNameTheFieldsOfThisApi) {
  const Json call = {
      {"role", "assistant"},
      {"content", {{{"type", "tool_use"}, {"id", "t"}, {"name", "f"}, {"input", 1}}}}};
  const struct {
    Json body;
    const char* param;
  } cases[] = {
      {Body({{"max_tokens", 0}}), "max_tokens"},
      {Body({{"messages", 1}}), "messages"},
      {Body({{"messages", Json::array()}}), "messages"},
      {Body({{"messages", {1}}}), "messages[0]"},
      {Body({{"messages", {Json::object()}}}), "messages[0].role"},
      {Body({{"messages", {{{"role", "tool"}, {"content", "x"}}}}}), "messages[0].role"},
      {Body({{"messages", {{{"role", "user"}}}}}), "messages[0].content"},
      {Body({{"messages", {call}}}), "messages[0].content[0].input"},
      {User(1), "messages[0].content"},
      {User({1}), "messages[0].content[0]"},
      {User(Json::array({Json::object()})), "messages[0].content[0].type"},
      {User({{{"type", "image"}, {"source", Json::object()}}}), "messages[0].content[0].type"},
      {User({{{"type", "document"}}}), "messages[0].content[0].type"},
      {User({{{"type", "text"}}}), "messages[0].content[0].text"},
      {User({{{"type", "tool_result"}}}), "messages[0].content[0].tool_use_id"},
      {User({{{"type", "tool_result"}, {"tool_use_id", "t"}}}),
       "messages[0].content[0].tool_use_id"},
      {Body({{"system", 1}}), "system"},
      {Body({{"system", {{{"type", "image"}}}}}), "system[0].type"},
      {Body({{"stop_sequences", "x"}}), "stop_sequences"},
      {Body({{"stop_sequences", {""}}}), "stop_sequences"},
      {Body({{"tools", 1}}), "tools"},
      {Body({{"tools", {{{"name", "f"}}}}}), "tools[0].input_schema"},
      {Body({{"tools", {{{"input_schema", Json::object()}}}}}), "tools[0].name"},
      {Body({{"tools", {{{"type", "web_search_20250305"}, {"name", "web_search"}}}}}),
       "tools[0].type"},
      {Body({{"tools", {{{"type", "bash_20250124"}, {"name", "bash"}}}}}), "tools[0].type"},
      {Body({{"tool_choice", "auto"}}), "tool_choice"},
      {Body({{"tool_choice", {{"type", "maybe"}}}}), "tool_choice"},
      {Body({{"tool_choice", {{"type", "auto"}, {"disable_parallel_tool_use", 1}}}}),
       "tool_choice.disable_parallel_tool_use"},
      {Body({{"thinking", {{"type", "deep"}}}}), "thinking"},
      {Body({{"thinking", {{"type", "enabled"}, {"budget_tokens", 0}}}}), "thinking.budget_tokens"},
      {Body({{"output_config", {{"format", {{"type", "xml"}}}}}}), "output_config.format"},
      {Body({{"output_config", {{"effort", 1}}}}), "output_config.effort"},
      {Body({{"container", "c"}}), "container"},
      {Body({{"thread", {{"type", "create"}}}}), "thread"},
      {Body({{"mcp_servers", {1}}}), "mcp_servers"},
      {Body({{"speed", "fast"}}), "speed"},
      {Body({{"temperature", 9}}), "temperature"},
  };
  for (const auto& one : cases) {
    const ApiError error = ErrorOf(one.body);
    EXPECT_EQ(error.param, one.param) << one.body << " " << error.message;
    EXPECT_EQ(error.http_status, 400);
  }
  EXPECT_EQ(ErrorOf(Body({{"thread", {{"type", "create"}}}})).code, "thread_unsupported_request");
  EXPECT_THAT(ErrorOf(Body({{"tools", {{{"type", "web_search_20250305"}}}}})).message,
              HasSubstr("web_search_20250305"));
}

}  // namespace
}  // namespace oscar::server
