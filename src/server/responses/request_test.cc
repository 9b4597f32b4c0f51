#include "responses/request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

namespace oscar::server {
namespace {

using testing::HasSubstr;
using Json = nlohmann::ordered_json;

const std::string kHex(32, 'a');
const std::string kId = "resp_" + kHex;

RequestLimits TestLimits() {
  RequestLimits limits;
  limits.vocab_size = 100;
  limits.defaults.temperature = 0.7f;
  return limits;
}

struct Parser {
  std::map<std::string, std::shared_ptr<const StoredResponse>, std::less<>> stored;
  RequestLimits limits = TestLimits();

  ApiResult<ResponsesRequest> operator()(const Json& body) const {
    return ParseResponsesRequest(body.dump(), limits, kId, [&](std::string_view id) {
      const auto at = stored.find(id);
      return at == stored.end() ? nullptr : at->second;
    });
  }
  Json Messages(const Json& body) const {
    const auto request = (*this)(body);
    return request.has_value() ? *request->chat.messages : Json(request.error().message);
  }
  ApiError Error(const Json& body) const {
    const auto request = (*this)(body);
    EXPECT_FALSE(request.has_value()) << body;
    return request.has_value() ? ApiError() : request.error();
  }
  void Store(const std::string& id, const Json& input, const Json& output,
             const std::string& previous = "") {
    auto response = std::make_shared<StoredResponse>();
    response->id = id;
    response->input = input.dump();
    response->body = output.dump();
    response->output_size = response->body.size();
    response->items = input.size() + output.size();
    if (!previous.empty()) response->previous = stored.at(previous);
    stored[id] = std::move(response);
  }
};

Json Item(const char* type, Json fields) {
  Json item = {{"type", type}};
  item.update(fields);
  return item;
}

TEST(ResponsesRequest, TextBecomesAUserMessage) {
  const auto request = Parser()({{"input", "hi"}, {"instructions", "be brief"}, {"model", "m"}});
  ASSERT_TRUE(request.has_value()) << request.error().message;
  EXPECT_EQ(
      *request->chat.messages,
      Json::parse(R"([{"role":"system","content":"be brief"},{"role":"user","content":"hi"}])"));
  EXPECT_EQ(request->chat.params.model, "m");
  EXPECT_TRUE(request->store);
  EXPECT_TRUE(request->chat.params.may_cut_max_tokens);
  const Json items = Json::parse(request->input);
  EXPECT_EQ(items, Json::parse(R"([{"role":"user","content":[{"type":"input_text","text":"hi"}],
      "type":"message","status":"completed","id":"msg_)" +
                               kHex + R"(_i0"}])"));
  const Json echo = Json::parse("{" + request->echo + "}");
  EXPECT_EQ(echo["instructions"], "be brief");
  EXPECT_EQ(echo["temperature"], 0.7);
  EXPECT_EQ(echo["tool_choice"], "auto");
  EXPECT_EQ(echo["tools"], Json::array());
  EXPECT_EQ(echo["metadata"], Json::object());
  EXPECT_EQ(echo["text"], Json::parse(R"({"format":{"type":"text"}})"));
  EXPECT_TRUE(echo["previous_response_id"].is_null());
}

// The turns of an agent: what the assistant thinks, says and calls is one message.
TEST(ResponsesRequest, ItemsBecomeMessages) {
  const Json messages = Parser().Messages(
      {{"instructions", "I"},
       {"input",
        {{{"role", "developer"}, {"content", "D"}},
         {{"role", "user"},
          {"content",
           {{{"type", "input_text"}, {"text", "a"}}, {{"type", "input_text"}, {"text", "b"}}}}},
         Item("reasoning", {{"id", "rs_1"},
                            {"summary", Json::array()},
                            {"encrypted_content", nullptr},
                            {"content", {{{"type", "reasoning_text"}, {"text", "hm"}}}}}),
         Item("message", {{"role", "assistant"},
                          {"content", {{{"type", "output_text"}, {"text", "let me see"}}}}}),
         Item("function_call", {{"call_id", "c1"}, {"name", "f"}, {"arguments", "{\"x\": 1}"}}),
         Item("function_call", {{"call_id", "c2"}, {"name", "g"}, {"arguments", "{}"}}),
         Item("function_call_output", {{"call_id", "c1"}, {"output", "one"}}),
         Item("function_call_output",
              {{"call_id", "c2"}, {"output", {{{"type", "input_text"}, {"text", "two"}}}}}),
         {{"role", "user"}, {"content", "thanks"}}}}});
  EXPECT_EQ(messages, Json::parse(R"([
    {"role":"system","content":[{"type":"text","text":"I"},{"type":"text","text":"D"}]},
    {"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
    {"role":"assistant","content":"let me see","reasoning_content":"hm","tool_calls":[
      {"id":"c1","type":"function","function":{"name":"f","arguments":{"x":1}}},
      {"id":"c2","type":"function","function":{"name":"g","arguments":{}}}]},
    {"role":"tool","tool_call_id":"c1","name":"f","content":"one"},
    {"role":"tool","tool_call_id":"c2","name":"g","content":"two"},
    {"role":"user","content":"thanks"}])"));
}

TEST(ResponsesRequest, ContinuesWhatIsStored) {
  Parser parse;
  parse.Store("resp_1", Json::parse(R"([
      {"type":"message","role":"user","content":[{"type":"input_text","text":"q"}]}])"),
              Json::parse(R"([
      {"type":"function_call","id":"fc_1_0","call_id":"c","name":"f","arguments":"{}"}])"));
  parse.Store("resp_2",
              Json::parse(R"([{"type":"function_call_output","call_id":"c","output":"r"}])"),
              Json::parse(R"([{"type":"message","role":"assistant",
                               "content":[{"type":"output_text","text":"done"}]}])"),
              "resp_1");
  const Json body = {
      {"input", "more"}, {"previous_response_id", "resp_2"}, {"instructions", "new"}};
  const Json messages = parse.Messages(body);
  ASSERT_EQ(messages.size(), 6u) << messages;
  EXPECT_EQ(messages[0]["content"], "new");
  EXPECT_EQ(messages[1]["content"], "q");
  EXPECT_EQ(messages[2]["tool_calls"][0]["id"], "c");
  EXPECT_EQ(messages[3]["content"], "r");
  EXPECT_EQ(messages[4]["content"], "done");
  EXPECT_EQ(messages[5]["content"], "more");
  EXPECT_EQ(parse(body)->previous->id, "resp_2");

  const ApiError unknown = parse.Error({{"input", "x"}, {"previous_response_id", "resp_3"}});
  EXPECT_EQ(unknown.http_status, 404);
  EXPECT_EQ(unknown.param, "previous_response_id");

  // What a conversation may hold is bounded, however it was put together.
  parse.limits.max_messages = 3;
  EXPECT_EQ(parse.Error(body).param, "previous_response_id");
  parse.limits.max_messages = 4096;
  parse.limits.max_conversation_bytes = 200;
  EXPECT_EQ(parse.Error(body).param, "previous_response_id");
  parse.limits.max_conversation_bytes = 1 << 20;
  parse.limits.max_json_values = 120;
  EXPECT_EQ(parse.Error(body).param, "previous_response_id");
}

TEST(ResponsesRequest, ReferencesNameStoredItems) {
  Parser parse;
  const std::string id = "resp_" + std::string(32, 'b');
  const std::string item_id = "msg_" + std::string(32, 'b') + "_0";
  const auto message = [](const std::string& name, const char* role, const char* text) {
    return Json::array({Item(
        "message",
        {{"id", name}, {"role", role}, {"content", {{{"type", "input_text"}, {"text", text}}}}})});
  };
  parse.Store(id, message("msg_" + std::string(32, 'b') + "_i0", "user", "q"),
              message(item_id, "assistant", "a"));
  const auto refer = [](const std::string& to) {
    return Json{{"input",
                 {{{"type", "item_reference"}, {"id", to}}, {{"role", "user"}, {"content", "x"}}}}};
  };
  EXPECT_EQ(parse.Messages(refer(item_id))[0]["content"], "a");
  EXPECT_EQ(parse.Messages(refer("msg_" + std::string(32, 'b') + "_i0"))[0]["content"], "q");
  for (const std::string& wrong :
       {std::string("msg_x_0"), std::string("msg"), std::string("_"), std::string("msg_"),
        "msg_" + std::string(32, 'b') + "_1", "msg_" + std::string(32, 'b') + "_",
        "fc_" + std::string(32, 'b') + "_0",
        "msg_" + std::string(32, 'b') + "_99999999999999999999"}) {
    EXPECT_EQ(parse.Error(refer(wrong)).http_status, 404) << wrong;
  }
  // Many references to one large item must not become many large items.
  parse.limits.max_conversation_bytes = 1000;
  Json many = Json::array();
  for (int i = 0; i < 100; ++i) many.push_back({{"type", "item_reference"}, {"id", item_id}});
  EXPECT_EQ(parse.Error({{"input", many}}).http_status, 404);
}

TEST(ResponsesRequest, ToolsBecomeFunctions) {
  const Json tools = {{{"type", "web_search"}},
                      {{"type", "function"},
                       {"name", "f"},
                       {"description", "d"},
                       {"parameters", {{"type", "object"}}},
                       {"strict", false}},
                      {{"type", "function"}, {"name", "g"}, {"parameters", nullptr}}};
  const auto request = Parser()({{"input", "x"}, {"tools", tools}});
  ASSERT_TRUE(request.has_value()) << request.error().message;
  EXPECT_EQ(*request->chat.tools, Json::parse(R"([
    {"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object"},
                                   "strict":false}},
    {"type":"function","function":{"name":"g"}}])"));
  // The response shows which tools the model was told of.
  EXPECT_EQ(Json::parse("{" + request->echo + "}")["tools"].size(), 2u);
  const Json allowed = {{"type", "allowed_tools"},
                        {"mode", "auto"},
                        {"tools", {{{"type", "function"}, {"name", "g"}}}}};
  const auto some = Parser()({{"input", "x"}, {"tools", tools}, {"tool_choice", allowed}});
  ASSERT_TRUE(some.has_value()) << some.error().message;
  EXPECT_EQ(some->chat.tools->size(), 1u);
  EXPECT_EQ(some->chat.tools->at(0)["function"]["name"], "g");
  // Every way to say no, or to say nothing.
  EXPECT_TRUE(Parser()({{"input", "x"}, {"tools", nullptr}, {"tool_choice", "none"}}).has_value());
  for (const char* type : {"file_search", "code_interpreter", "mcp", "computer_use_preview",
                           "image_generation", "local_shell", "custom", "namespace", "new"}) {
    const ApiError error =
        Parser().Error({{"input", "x"}, {"tools", {{{"type", type}, {"name", "n"}}}}});
    EXPECT_EQ(error.code, "unsupported_parameter");
    EXPECT_EQ(error.param, "tools[0].type");
    EXPECT_THAT(error.message, HasSubstr(type));
  }
  for (const Json& wrong :
       {Json(1), Json{1}, Json{nullptr}, Json{{{"type", 1}}}, Json{{{"name", "f"}}},
        Json{{{"type", "function"}}}, Json{{{"type", "function"}, {"name", ""}}},
        Json{{{"type", "function"}, {"name", 1}}}}) {
    EXPECT_EQ(Parser().Error({{"input", "x"}, {"tools", wrong}}).http_status, 400);
  }
  for (const Json& wrong :
       {Json(1), Json("sometimes"), Json{{"type", "file_search"}}, Json{{"type", "function"}},
        Json{{"type", "allowed_tools"}}, Json{{"type", "allowed_tools"}, {"mode", "auto"}},
        Json{{"type", "allowed_tools"},
             {"mode", "auto"},
             {"tools", {{{"type", "function"}, {"name", "h"}}}}}}) {
    EXPECT_EQ(
        Parser().Error({{"input", "x"}, {"tools", tools}, {"tool_choice", wrong}}).http_status, 400)
        << wrong;
  }
}

TEST(ResponsesRequest, FieldsThatAreUsed) {
  const auto request =
      Parser()({{"input", "x"},
                {"max_output_tokens", 7},
                {"temperature", 0.25},
                {"top_p", 0.5},
                {"stream", true},
                {"stream_options", {{"include_obfuscation", false}}},
                {"store", false},
                {"metadata", {{"a", "b"}}},
                {"reasoning", {{"effort", "none"}, {"summary", "auto"}}},
                {"include", {"message.output_text.logprobs"}},
                {"top_logprobs", 2},
                {"truncation", "disabled"},
                {"user", "u"},
                {"prompt_cache_key", "k"},
                {"background", false},
                {"text", {{"format", {{"type", "text"}}}, {"verbosity", "medium"}}},
                {"seed", 5},
                {"cache_salt", "s"}});
  ASSERT_TRUE(request.has_value()) << request.error().message;
  const GenerationParams& params = request->chat.params;
  EXPECT_EQ(params.max_tokens, 7);
  EXPECT_FLOAT_EQ(params.sampling.temperature, 0.25f);
  EXPECT_FLOAT_EQ(params.sampling.top_p, 0.5f);
  EXPECT_TRUE(params.stream && params.logprobs && !request->store);
  EXPECT_EQ(params.top_logprobs, 2);
  EXPECT_EQ(params.seed, 5);
  EXPECT_EQ(params.cache_salt, "s");
  EXPECT_EQ(*request->chat.template_kwargs,
            Json::parse(R"({"enable_thinking":false,"reasoning_effort":"none"})"));
  const Json echo = Json::parse("{" + request->echo + "}");
  EXPECT_EQ(echo["metadata"], Json::parse(R"({"a":"b"})"));
  EXPECT_EQ(echo["max_output_tokens"], 7);
  EXPECT_EQ(echo["store"], false);
}

TEST(ResponsesRequest, TurnsAreLeftOutWhole) {
  const auto request =
      Parser()(Json::parse(R"({"instructions": "i", "truncation": "auto", "input": [
    {"role": "user", "content": "a"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "r"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "x"},
    {"role": "user", "content": "d"}]})"));
  ASSERT_TRUE(request.has_value()) << request.error().message;
  EXPECT_TRUE(request->truncate);
  EXPECT_EQ(CountTurns(request->chat), 3u);
  EXPECT_EQ(*WithoutTurns(request->chat, 0).messages, *request->chat.messages);
  const Json shorter = *WithoutTurns(request->chat, 1).messages;
  ASSERT_EQ(shorter.size(), 4u);
  EXPECT_EQ(shorter[0]["role"], "system");
  EXPECT_EQ(shorter[1]["content"], "b");
  EXPECT_EQ(WithoutTurns(request->chat, 2).messages->size(), 2u);
}

TEST(ResponsesRequest, ErrorsNameTheFieldsOfThisApi) {
  const struct {
    Json body;
    const char* param;
  } cases[] = {
      {Json::object(), "input"},
      {{{"input", 1}}, "input"},
      {{{"input", Json::array()}}, "input"},
      {{{"input", {1}}}, "input[0]"},
      {{{"input", {Json::object()}}}, "input[0].role"},
      {{{"input", {{{"role", "tool"}, {"content", "x"}}}}}, "input[0].role"},
      {{{"input", {{{"role", "user"}}}}}, "input[0].content"},
      {{{"input", {{{"role", "user"}, {"content", 1}}}}}, "input[0].content"},
      {{{"input", {{{"role", "user"}, {"content", {{{"type", "input_image"}}}}}}}},
       "input[0].content[0].type"},
      {{{"input", {{{"role", "user"}, {"content", {{{"type", "input_text"}}}}}}}},
       "input[0].content[0].text"},
      {{{"input", {Item("web_search_call", {{"id", "x"}})}}}, "input[0].type"},
      {{{"input", {Item("function_call", {{"call_id", "c"}, {"name", "f"}})}}},
       "input[0].arguments"},
      {{{"input", {Item("function_call_output", {{"call_id", "c"}, {"output", "r"}})}}},
       "input[0].call_id"},
      {{{"input", {Item("reasoning", {{"content", 1}})}}}, "input[0].content"},
      {{{"input", "x"}, {"instructions", 1}}, "instructions"},
      {{{"input", "x"}, {"previous_response_id", 1}}, "previous_response_id"},
      {{{"input", "x"}, {"max_output_tokens", 0}}, "max_output_tokens"},
      {{{"input", "x"}, {"temperature", 3}}, "temperature"},
      {{{"input", "x"}, {"text", {{"format", {{"type", "grammar"}}}}}}, "text.format"},
      {{{"input", "x"}, {"text", {{"verbosity", "high"}}}}, "text.verbosity"},
      {{{"input", "x"}, {"text", 1}}, "text"},
      {{{"input", "x"}, {"reasoning", {{"effort", 1}}}}, "reasoning.effort"},
      {{{"input", "x"}, {"reasoning", 1}}, "reasoning"},
      {{{"input", "x"}, {"metadata", {{"a", 1}}}}, "metadata"},
      {{{"input", "x"}, {"metadata", 1}}, "metadata"},
      {{{"input", "x"}, {"truncation", "some"}}, "truncation"},
      {{{"input", "x"}, {"background", true}}, "background"},
      {{{"input", "x"}, {"conversation", "c"}}, "conversation"},
      {{{"input", "x"}, {"prompt", {{"id", "p"}}}}, "prompt"},
      {{{"input", "x"}, {"include", 1}}, "include"},
      {{{"input", "x"}, {"store", 1}}, "store"},
  };
  for (const auto& one : cases) {
    const ApiError error = Parser().Error(one.body);
    EXPECT_EQ(error.param, one.param) << one.body << " " << error.message;
    EXPECT_EQ(error.http_status, 400) << one.body;
    EXPECT_EQ(error.message.find("max_completion_tokens"), std::string::npos) << error.message;
  }
  EXPECT_THAT(Parser().Error({{"input", "x"}, {"max_output_tokens", 0}}).message,
              HasSubstr("'max_output_tokens'"));
}

}  // namespace
}  // namespace oscar::server
