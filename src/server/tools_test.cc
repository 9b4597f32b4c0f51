// Tools through the API: what requests may say of them, and how calls come back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "server/server_fixture.h"

namespace oscar::server {
namespace {

using testing::HasSubstr;

constexpr const char* kPath = "/v1/chat/completions";
constexpr const char* kCall =
    "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"city\": \"Zürich\", \"n\": [1, {}]}}\n"
    "</tool_call>";
constexpr const char* kArguments = "{\"city\": \"Zürich\", \"n\": [1, {}]}";

// A model that is taught Hermes' format.
const Dialogue& Caller() {
  static const Dialogue dialogue = [] {
    TokenizerConfig config;
    config.chat_templates = {
        {"default",
         "{#- <tool_call> <think> </think> #}"
         "{% if tools %}{{ tools | tojson }}{% endif %}"
         "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
         "{{ message.content }}{% for call in message.tool_calls %}"
         "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
         "{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"}};
    auto created = ChatTemplate::Create(config);
    EXPECT_TRUE(created.has_value());
    return Dialogue(std::move(*Tokenizer::Load(OSCAR_DEMO_MODEL)), std::move(*created), "", {},
                    {*DemoTokenizer().FindToken("<|im_end|>")});
  }();
  return dialogue;
}

struct ToolServer : TestServer {
  explicit ToolServer(FakeEngine::Author author)
      : TestServer(std::move(author), {}, {}, /*ready=*/false) {
    dialogue = &Caller();
    SetReady();
  }
};

Json Tools() {
  return Json::parse(R"([{"type": "function", "function": {"name": "f", "description": "d",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "g"}}])");
}
Json Ask(const Json& extra = Json::object()) {
  Json body = TestServer::Chat({{"tools", Tools()}});
  body.update(extra);
  return body;
}

// The events of a stream, without [DONE].
std::vector<Json> Events(const std::string& body) {
  std::vector<Json> events;
  for (size_t at = 0; at < body.size();) {
    const size_t end = body.find("\n\n", at);
    const std::string frame = body.substr(at, end - at);
    at = end + 2;
    if (frame.starts_with("data: {")) events.push_back(Json::parse(frame.substr(6)));
  }
  return events;
}

// What a client joins of a stream, as OpenAI's own does: per choice, lists by "index".
Json Join(const std::vector<Json>& events, size_t index) {
  Json message = {{"content", ""}, {"reasoning", ""}, {"tool_calls", Json::array()}};
  for (const Json& event : events) {
    for (const Json& choice : event["choices"]) {
      if (choice["index"] != index) continue;
      const Json& delta = choice["delta"];
      if (!choice["finish_reason"].is_null()) message["finish_reason"] = choice["finish_reason"];
      message["content"] = message["content"].get<std::string>() + delta.value("content", "");
      message["reasoning"] =
          message["reasoning"].get<std::string>() + delta.value("reasoning_content", "");
      if (!delta.contains("tool_calls")) continue;
      EXPECT_EQ(delta["tool_calls"].size(), 1u);
      const Json& part = delta["tool_calls"][0];
      const auto at = part["index"].get<size_t>();
      if (at == message["tool_calls"].size()) {
        // The first part: all but the arguments.
        EXPECT_EQ(part.size(), 4u) << part;
        EXPECT_EQ(part["type"], "function");
        EXPECT_EQ(part["function"]["arguments"], "");
        Json call = part;
        call.erase("index");
        message["tool_calls"].push_back(call);
        continue;
      }
      EXPECT_EQ(part.size(), 2u) << part;
      Json& arguments = message["tool_calls"].at(at)["function"]["arguments"];
      arguments = arguments.get<std::string>() + part["function"]["arguments"].get<std::string>();
    }
  }
  return message;
}

TEST(Tools, CallsComeBackWhole) {
  ToolServer server(Says(kCall));
  const RawReply reply = server.Post(kPath, Ask());
  ASSERT_EQ(reply.status, 200) << reply.body;
  const Json json = reply.json();
  const Json& choice = json["choices"][0];
  EXPECT_EQ(choice["finish_reason"], "tool_calls");
  EXPECT_TRUE(choice["message"]["content"].is_null());
  const Json& call = choice["message"]["tool_calls"][0];
  EXPECT_EQ(call["type"], "function");
  EXPECT_THAT(call["id"].get<std::string>(), HasSubstr("call_"));
  EXPECT_EQ(call["function"]["name"], "f");
  EXPECT_EQ(call["function"]["arguments"], kArguments);
  EXPECT_EQ(json["usage"]["completion_tokens"], Ids(kCall).size() + 1);  // and the stop token
  // The template has seen them.
  const auto prompt = server.engine.requests()[0].prompt;
  EXPECT_THAT(DemoTokenizer().Decode(prompt, false), HasSubstr("\"name\": \"f\""));
}

TEST(Tools, StreamedIsWhole) {
  const std::string text = std::string("<think>\nhm\n</think>\n\nLook:\n") + kCall +
                           "\n<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";
  ToolServer server(Says(text));
  const Json body = Ask({{"n", 2}, {"logprobs", true}, {"top_logprobs", 1}});
  const Json whole = server.Post(kPath, body).json();
  Json streamed = body;
  streamed["stream"] = true;
  const auto events = Events(server.Post(kPath, streamed).body);
  std::set<std::string> ids;
  for (size_t i = 0; i < 2; ++i) {
    const Json& choice = whole["choices"][i];
    const Json& message = choice["message"];
    EXPECT_EQ(message["content"], "Look:");
    EXPECT_EQ(message["reasoning_content"], "hm");
    ASSERT_EQ(message["tool_calls"].size(), 2u);
    EXPECT_EQ(choice["logprobs"]["content"].size(), Ids(text).size());
    const Json joined = Join(events, i);
    EXPECT_EQ(joined["content"], "Look:");
    EXPECT_EQ(joined["reasoning"], "hm");
    EXPECT_EQ(joined["finish_reason"], "tool_calls");
    ASSERT_EQ(joined["tool_calls"].size(), 2u);
    for (size_t k = 0; k < 2; ++k) {
      EXPECT_EQ(joined["tool_calls"][k]["function"], message["tool_calls"][k]["function"]);
      EXPECT_TRUE(ids.insert(joined["tool_calls"][k]["id"]).second);
    }
    size_t logprobs = 0;
    for (const Json& event : events) {
      for (const Json& c : event["choices"]) {
        if (c["index"] == i && c["logprobs"].is_object())
          logprobs += c["logprobs"]["content"].size();
      }
    }
    EXPECT_EQ(logprobs, Ids(text).size());
  }
}

TEST(Tools, BrokenCallsAreText) {
  for (const std::string text :
       {"<tool_call>\n{\"name\": \"h\", \"arguments\": {}}\n</tool_call>",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {]}\n</tool_call>", "a <tool_call>"}) {
    ToolServer server(Says(text));
    const Json choice = server.Post(kPath, Ask()).json()["choices"][0];
    EXPECT_EQ(choice["message"]["content"], text);
    EXPECT_FALSE(choice["message"].contains("tool_calls"));
    EXPECT_EQ(choice["finish_reason"], "stop");
    const Json joined = Join(Events(server.Post(kPath, Ask({{"stream", true}})).body), 0);
    EXPECT_EQ(joined["content"], text);
    EXPECT_EQ(joined["finish_reason"], "stop");
  }
  // Cut by the limit.
  ToolServer server(Says(kCall));
  const Json choice = server.Post(kPath, Ask({{"max_tokens", 5}})).json()["choices"][0];
  EXPECT_EQ(choice["finish_reason"], "length");
  EXPECT_THAT(choice["message"]["content"].get<std::string>(), HasSubstr("<tool"));
}

TEST(Tools, NoneAndNotParallel) {
  ToolServer server(Says(std::string(kCall) + "\n" + kCall));
  Json choice = server.Post(kPath, Ask({{"tool_choice", "none"}})).json()["choices"][0];
  EXPECT_EQ(choice["message"]["content"], std::string(kCall) + "\n" + kCall);
  EXPECT_EQ(choice["finish_reason"], "stop");
  EXPECT_EQ(DemoTokenizer().Decode(server.engine.requests()[0].prompt, false).find("\"f\""),
            std::string::npos);
  choice = server.Post(kPath, Ask({{"parallel_tool_calls", false}})).json()["choices"][0];
  EXPECT_EQ(choice["message"]["tool_calls"].size(), 1u);
  EXPECT_EQ(choice["finish_reason"], "tool_calls");
  EXPECT_EQ(server.engine.cancelled(), 1);
  EXPECT_EQ(server.Post(kPath, Ask()).json()["choices"][0]["message"]["tool_calls"].size(), 2u);
}

TEST(Tools, StopStringsEndAnAnswerInsideACall) {
  ToolServer server(Says(kCall));
  const Json choice = server.Post(kPath, Ask({{"stop", "arguments"}})).json()["choices"][0];
  EXPECT_EQ(choice["message"]["content"], "<tool_call>\n{\"name\": \"f\", \"");
  EXPECT_EQ(choice["finish_reason"], "stop");
  EXPECT_EQ(choice["stop_reason"], "arguments");
}

TEST(Tools, ErrorsNameTheField) {
  ToolServer server(Says("x"));
  const auto param = [&](const Json& extra) {
    const RawReply reply = server.Post(kPath, Ask(extra));
    EXPECT_EQ(reply.status, 400) << reply.body;
    return reply.json()["error"]["param"].get<std::string>();
  };
  EXPECT_EQ(param({{"tools", {Json::object()}}}), "tools[0].function");
  EXPECT_EQ(param({{"tools", {{{"type", "web_search"}}}}}), "tools[0].type");
  Json bad = Tools();
  bad[1]["function"]["name"] = "a b";
  EXPECT_EQ(param({{"tools", bad}}), "tools[1].function.name");
  bad[1]["function"]["name"] = "f";
  EXPECT_EQ(param({{"tools", bad}}), "tools[1].function.name");
  EXPECT_EQ(param({{"tools", bad}, {"tool_choice", "none"}}), "tools[1].function.name");
  const auto named = [](const char* name) -> Json {
    return {{"type", "function"}, {"function", {{"name", name}}}};
  };
  EXPECT_EQ(param({{"tool_choice", named("h")}}), "tool_choice");
  EXPECT_EQ(param({{"tool_choice", "required"}, {"tools", nullptr}}), "tool_choice");
}

TEST(Tools, HistoryIsRendered) {
  ToolServer server(Says("x"));
  const Json messages = Json::parse(R"([{"role": "user", "content": "?"},
    {"role": "assistant", "content": null, "tool_calls": [{"id": "call_1", "type": "function",
     "function": {"name": "f", "arguments": "{\"city\": \"Zürich\"}"}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "20"}])");
  const RawReply reply = server.Post("/apply-template", {{"messages", messages}});
  EXPECT_THAT(reply.json()["prompt"].get<std::string>(),
              HasSubstr("<|im_start|>assistant\nf{\"city\": \"Zürich\"}<|im_end|>\n"
                        "<|im_start|>tool\n20<|im_end|>"));
}

TEST(Tools, TheChoiceOfParsersIsShown) {
  ToolServer server(Says("x"));
  const Json props = server.Call("GET", "/props").json();
  EXPECT_EQ(props["tool_parser"], "hermes");
  EXPECT_EQ(props["reasoning_parser"], "think");
}

}  // namespace
}  // namespace oscar::server
