// /v1/responses and /v1/messages through the whole server, on a fake engine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>
#include <vector>

#include "base/file.h"
#include "server/server_fixture.h"

namespace oscar::server {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

struct Frame {
  std::string event;
  Json data;
};

// Frames of a stream whose events are named, as both APIs send them.
std::vector<Frame> Frames(const std::string& body) {
  std::vector<Frame> frames;
  for (size_t at = 0; at < body.size();) {
    const size_t end = body.find("\n\n", at);
    EXPECT_NE(end, std::string::npos) << body.substr(at);
    if (end == std::string::npos) break;
    const std::string text = body.substr(at, end - at);
    at = end + 2;
    if (text.starts_with(":")) continue;
    const size_t line = text.find("\ndata: ");
    EXPECT_TRUE(text.starts_with("event: ") && line != std::string::npos) << text;
    frames.push_back({text.substr(7, line - 7), Json::parse(text.substr(line + 7))});
    EXPECT_EQ(frames.back().data["type"], frames.back().event);
  }
  return frames;
}

std::vector<std::string> Names(const std::vector<Frame>& frames) {
  std::vector<std::string> names;
  for (const Frame& frame : frames) {
    if (names.empty() || names.back() != frame.event) names.push_back(frame.event);
  }
  return names;
}

Json Message(const Json& extra = Json::object()) {
  Json body = {{"model", "demo"},
               {"max_tokens", 100},
               {"messages", Json::array({{{"role", "user"}, {"content", "hi"}}})}};
  body.update(extra);
  return body;
}

// What the engine was asked to read last.
std::string LastPrompt(const TestServer& server) {
  return DemoTokenizer().Decode(server.engine.requests().back().prompt, /*skip_special=*/false);
}

// Qwen3's own template, so that calls are read as Qwen3 writes them.
const Dialogue& Qwen3() {
  static const Dialogue dialogue = [] {
    TokenizerConfig config;
    config.chat_templates = {
        {"default", *ReadFile(OSCAR_TEST_DATA "/text/templates/Qwen-Qwen3-0.6B.jinja", 1 << 20)}};
    auto created = ChatTemplate::Create(config);
    EXPECT_TRUE(created.has_value());
    return Dialogue(std::move(*Tokenizer::Load(OSCAR_DEMO_MODEL)), std::move(*created), "", {},
                    {*DemoTokenizer().FindToken("<|im_end|>")});
  }();
  return dialogue;
}

struct ToolServer : TestServer {
  explicit ToolServer(const std::string& text) : TestServer(Says(text), {}, {}, /*ready=*/false) {
    dialogue = &Qwen3();
    SetReady();
  }
};

constexpr const char* kTwoCalls =
    "<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": "
    "\"\u00e4\\n\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": "
    "{}}\n</tool_call>";

TEST(Responses, FunctionCalls) {
  ToolServer server(kTwoCalls);
  const Json tools = Json::parse(R"([
    {"type": "function", "name": "f", "parameters": {"type": "object"}},
    {"type": "function", "name": "g", "parameters": {"type": "object"}}])");
  Json body = {{"input", "hi"}, {"tools", tools}};
  const Json whole = server.Post("/v1/responses", body).json();
  EXPECT_THAT(LastPrompt(server), HasSubstr("<tools>"));
  ASSERT_EQ(whole["output"].size(), 4u) << whole;
  EXPECT_EQ(whole["status"], "completed");
  EXPECT_EQ(whole["output"][0]["type"], "reasoning");
  EXPECT_EQ(whole["output"][1]["content"][0]["text"], "I look.");
  const Json& call = whole["output"][2];
  EXPECT_EQ(call["type"], "function_call");
  EXPECT_EQ(call["name"], "f");
  EXPECT_EQ(call["status"], "completed");
  EXPECT_EQ(Json::parse(call["arguments"].get<std::string>()), (Json{{"x", "\u00e4\n"}}));
  EXPECT_EQ(whole["output"][3]["arguments"], "{}");
  EXPECT_NE(call["call_id"], whole["output"][3]["call_id"]);

  body["stream"] = true;
  const auto frames = Frames(server.Post("/v1/responses", body).body);
  std::map<int, std::string> arguments;
  for (const Frame& frame : frames) {
    const Json& data = frame.data;
    if (frame.event == "response.function_call_arguments.delta") {
      arguments[data["output_index"].get<int>()] += data["delta"].get<std::string>();
    } else if (frame.event == "response.function_call_arguments.done") {
      EXPECT_EQ(arguments[data["output_index"].get<int>()], data["arguments"]);
    } else if (frame.event == "response.output_item.added" &&
               data["item"]["type"] == "function_call") {
      EXPECT_EQ(data["item"]["arguments"], "");
      EXPECT_FALSE(data["item"]["call_id"].get<std::string>().empty());
    }
  }
  EXPECT_EQ(arguments[2], call["arguments"]);
  EXPECT_EQ(frames.back().data["response"]["output"][2]["arguments"], call["arguments"]);

  // The results, to the stored conversation.
  const Json results = {
      {{"type", "function_call_output"}, {"call_id", call["call_id"]}, {"output", "R1"}},
      {{"type", "function_call_output"},
       {"call_id", whole["output"][3]["call_id"]},
       {"output", "R2"}}};
  const RawReply next =
      server.Post("/v1/responses",
                  {{"input", results}, {"previous_response_id", whole["id"]}, {"tools", tools}});
  ASSERT_EQ(next.status, 200) << next.body;
  for (const char* text : {"\"name\": \"g\"", "R1", "R2", "<tool_response>"}) {
    EXPECT_THAT(LastPrompt(server), HasSubstr(text));
  }
}

TEST(Messages, ToolUse) {
  ToolServer server(kTwoCalls);
  const Json tools = Json::parse(R"([{"name": "f", "input_schema": {"type": "object"}},
                                     {"name": "g", "input_schema": {"type": "object"}}])");
  const Json whole = server.Post("/v1/messages", Message({{"tools", tools}})).json();
  ASSERT_EQ(whole["content"].size(), 4u) << whole;
  EXPECT_EQ(whole["stop_reason"], "tool_use");
  EXPECT_EQ(whole["content"][2]["type"], "tool_use");
  EXPECT_EQ(whole["content"][2]["input"], (Json{{"x", "\u00e4\n"}}));
  EXPECT_EQ(whole["content"][3]["input"], Json::object());
  const auto frames =
      Frames(server.Post("/v1/messages", Message({{"tools", tools}, {"stream", true}})).body);
  std::map<int, std::string> inputs;
  for (const Frame& frame : frames) {
    if (frame.event == "content_block_start" && frame.data["content_block"]["type"] == "tool_use") {
      EXPECT_EQ(frame.data["content_block"]["input"], Json::object());
    }
    if (frame.event != "content_block_delta") continue;
    if (frame.data["delta"]["type"] != "input_json_delta") continue;
    inputs[frame.data["index"].get<int>()] +=
        frame.data["delta"]["partial_json"].get<std::string>();
  }
  EXPECT_EQ(Json::parse(inputs[2]), whole["content"][2]["input"]);
  EXPECT_EQ(frames[frames.size() - 2].data["delta"]["stop_reason"], "tool_use");
  // One call at a time.
  const Json one =
      server
          .Post("/v1/messages",
                Message({{"tools", tools},
                         {"tool_choice", {{"type", "auto"}, {"disable_parallel_tool_use", true}}}}))
          .json();
  ASSERT_EQ(one["content"].size(), 3u) << one;
  EXPECT_EQ(one["stop_reason"], "tool_use");
  // Without tools, or with none to be used, what looks like a call is text.
  for (const Json& extra :
       {Json::object(), Json{{"tools", tools}, {"tool_choice", {{"type", "none"}}}}}) {
    const Json text = server.Post("/v1/messages", Message(extra)).json();
    EXPECT_EQ(text["stop_reason"], "end_turn");
    EXPECT_THAT(text["content"].back()["text"].get<std::string>(), HasSubstr("tool_call"));
  }
}

TEST(Responses, WholeAnswer) {
  TestServer server(Says("hello there"));
  const RawReply reply = server.Post(
      "/v1/responses", {{"input", "hi"}, {"instructions", "be brief"}, {"max_output_tokens", 50}});
  ASSERT_EQ(reply.status, 200) << reply.body;
  const Json response = reply.json();
  EXPECT_EQ(response["object"], "response");
  EXPECT_EQ(response["status"], "completed");
  EXPECT_EQ(response["model"], "demo");
  EXPECT_EQ(response["error"], nullptr);
  EXPECT_EQ(response["incomplete_details"], nullptr);
  ASSERT_EQ(response["output"].size(), 1u);
  const Json& item = response["output"][0];
  EXPECT_EQ(item["type"], "message");
  EXPECT_EQ(item["role"], "assistant");
  EXPECT_EQ(item["status"], "completed");
  EXPECT_EQ(item["content"],
            Json::parse(R"([{"type":"output_text","text":"hello there","annotations":[]}])"));
  EXPECT_EQ(response["usage"]["input_tokens_details"]["cached_tokens"], 3);
  EXPECT_EQ(response["usage"]["total_tokens"], response["usage"]["input_tokens"].get<int>() +
                                                   response["usage"]["output_tokens"].get<int>());
  EXPECT_EQ(response["max_output_tokens"], 50);
  EXPECT_EQ(LastPrompt(server),
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
            "<|im_start|>assistant\n");
}

TEST(Responses, StreamEqualsWhole) {
  TestServer server(Says("<think>\nhm\n</think>\n\nhello there"));
  const Json whole = server.Post("/v1/responses", {{"input", "hi"}}).json();
  const RawReply reply = server.Post("/v1/responses", {{"input", "hi"}, {"stream", true}});
  ASSERT_EQ(reply.status, 200);
  EXPECT_EQ(reply.Header("Content-Type"), "text/event-stream; charset=utf-8");
  const std::vector<Frame> frames = Frames(reply.body);
  EXPECT_THAT(Names(frames),
              ElementsAre("response.created", "response.in_progress", "response.output_item.added",
                          "response.content_part.added", "response.reasoning_text.delta",
                          "response.reasoning_text.done", "response.content_part.done",
                          "response.output_item.done", "response.output_item.added",
                          "response.content_part.added", "response.output_text.delta",
                          "response.output_text.done", "response.content_part.done",
                          "response.output_item.done", "response.completed"));
  std::map<int, std::string> texts;
  for (size_t i = 0; i < frames.size(); ++i) {
    const Json& data = frames[i].data;
    EXPECT_EQ(data["sequence_number"], i);
    if (frames[i].event.ends_with("_text.delta")) {
      texts[data["output_index"].get<int>()] += data["delta"].get<std::string>();
    }
  }
  const Json response = frames.back().data["response"];
  EXPECT_EQ(texts[0], "hm");
  EXPECT_EQ(texts[1], "hello there");
  ASSERT_EQ(response["output"].size(), 2u);
  EXPECT_EQ(response["output"][0]["type"], "reasoning");
  EXPECT_EQ(response["output"][0]["content"][0]["text"], "hm");
  EXPECT_GT(response["usage"]["output_tokens_details"]["reasoning_tokens"], 0);
  // Ids and times differ; everything else is the same.
  const auto strip = [](Json json) {
    for (const char* key : {"id", "created_at", "completed_at"}) json.erase(key);
    for (Json& item : json["output"]) item.erase("id");
    return json;
  };
  EXPECT_EQ(strip(response), strip(whole));
  EXPECT_EQ(frames[0].data["response"]["status"], "in_progress");
  EXPECT_EQ(frames[0].data["response"]["output"], Json::array());
  EXPECT_EQ(frames[2].data["item"]["id"], response["output"][0]["id"]);
}

TEST(Responses, CutAnswersAreIncomplete) {
  TestServer server(Says("one two three four five"));
  const Json body = {{"input", "hi"}, {"max_output_tokens", 2}};
  const Json whole = server.Post("/v1/responses", body).json();
  EXPECT_EQ(whole["status"], "incomplete");
  EXPECT_EQ(whole["incomplete_details"]["reason"], "max_output_tokens");
  EXPECT_EQ(whole["output"][0]["status"], "incomplete");
  Json stream = body;
  stream["stream"] = true;
  const auto frames = Frames(server.Post("/v1/responses", stream).body);
  EXPECT_EQ(frames.back().event, "response.incomplete");
  // A bound beyond the context is no error: what fits is there.
  EXPECT_EQ(server.Post("/v1/responses", {{"input", "hi"}, {"max_output_tokens", 100000}}).status,
            200);
  EXPECT_EQ(server.engine.requests().back().max_tokens,
            1024 - static_cast<int64_t>(server.engine.requests().back().prompt.size()));
}

TEST(Responses, TruncationLeavesOutTheOldestTurns) {
  TestServer server(Says("ok"));
  Json input = Json::array();
  for (int i = 0; i < 30; ++i) {
    std::string text = "turn" + std::to_string(i);
    for (int k = 0; k < 60; ++k) text += " word";
    input.push_back({{"role", "user"}, {"content", text}});
    input.push_back({{"role", "assistant"}, {"content", "fine"}});
  }
  input.push_back({{"role", "user"}, {"content", "the end"}});
  Json body = {{"input", input}, {"instructions", "stay"}, {"max_output_tokens", 100}};
  EXPECT_EQ(server.Post("/v1/responses", body).status, 400);
  body["truncation"] = "auto";
  const RawReply reply = server.Post("/v1/responses", body);
  ASSERT_EQ(reply.status, 200) << reply.body;
  EXPECT_EQ(reply.json()["truncation"], "auto");
  const std::string prompt = LastPrompt(server);
  EXPECT_TRUE(prompt.starts_with("<|im_start|>system\nstay<|im_end|>\n<|im_start|>user\nturn"));
  EXPECT_THAT(prompt, HasSubstr("turn29"));
  EXPECT_THAT(prompt, HasSubstr("the end"));
  EXPECT_EQ(prompt.find("turn0 "), std::string::npos);
  // As much as fits: one turn more would not.
  const size_t tokens = server.engine.requests().back().prompt.size();
  EXPECT_LE(tokens, 924u);
  EXPECT_GT(tokens, 924u - 120u);
  // A last turn that is too long alone is refused.
  std::string long_text;
  for (int i = 0; i < 2000; ++i) long_text += "word ";
  EXPECT_EQ(server.Post("/v1/responses", {{"input", long_text}, {"truncation", "auto"}}).status,
            400);
}

TEST(Responses, FailuresInTheMiddle) {
  TestServer server([](const EngineRequest&) {
    FakeEngine::Script script;
    script.tokens = Ids("some words");
    script.fail_after = 1;
    script.failure = Internal("a secret detail");
    return script;
  });
  const auto frames =
      Frames(server.Post("/v1/responses", {{"input", "hi"}, {"stream", true}}).body);
  const Frame& last = frames.back();
  EXPECT_EQ(last.event, "response.failed");
  EXPECT_EQ(last.data["response"]["status"], "failed");
  EXPECT_EQ(last.data["response"]["error"]["code"], "server_error");
  const std::string id = last.data["response"]["id"];
  EXPECT_EQ(server.Call("GET", "/v1/responses/" + id).status, 404);
  EXPECT_EQ(server.Post("/v1/responses", {{"input", "hi"}}).status, 500);

  const auto message = Frames(server.Post("/v1/messages", Message({{"stream", true}})).body);
  EXPECT_EQ(message.back().event, "error");
  EXPECT_EQ(message.back().data["error"]["type"], "api_error");
  EXPECT_EQ(message.back().data["error"]["message"].get<std::string>().find("secret"),
            std::string::npos);
}

TEST(Responses, ConversationsAreContinued) {
  TestServer server(Says("<think>\nhm\n</think>\n\nyes"));
  const Json first = server.Post("/v1/responses", {{"input", "one"}}).json();
  const std::string id = first["id"];
  const Json second =
      server.Post("/v1/responses", {{"input", "two"}, {"previous_response_id", id}}).json();
  EXPECT_EQ(second["previous_response_id"], id);
  EXPECT_EQ(LastPrompt(server),
            "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
            "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n");
  // Two may continue the same response.
  server.Post("/v1/responses", {{"input", "other"}, {"previous_response_id", id}});
  EXPECT_THAT(LastPrompt(server), HasSubstr("one"));
  EXPECT_EQ(LastPrompt(server).find("two"), std::string::npos);
  // By a stream, too, and from a stream.
  const auto frames = Frames(
      server
          .Post("/v1/responses",
                {{"input", "three"}, {"previous_response_id", second["id"]}, {"stream", true}})
          .body);
  const std::string third = frames.back().data["response"]["id"];
  server.Post("/v1/responses", {{"input", "four"}, {"previous_response_id", third}});
  for (const char* text : {"one", "two", "three", "four"}) {
    EXPECT_THAT(LastPrompt(server), HasSubstr(text));
  }
  const RawReply unknown =
      server.Post("/v1/responses", {{"input", "x"}, {"previous_response_id", "resp_0"}});
  EXPECT_EQ(unknown.status, 404);
  EXPECT_EQ(unknown.json()["error"]["code"], "previous_response_not_found");
  EXPECT_EQ(unknown.json()["error"]["param"], "previous_response_id");
}

TEST(Responses, AreStoredAndRemoved) {
  TestServer server(Says("yes"));
  const RawReply made = server.Post(
      "/v1/responses", {{"input", Json::array({{{"role", "user"}, {"content", "a"}},
                                               {{"role", "assistant"}, {"content", "b"}},
                                               {{"role", "user"}, {"content", "c"}}})},
                        {"metadata", {{"k", "v"}}}});
  const std::string id = made.json()["id"];
  const std::string path = "/v1/responses/" + id;
  EXPECT_EQ(server.Call("GET", path).body, made.body);
  EXPECT_EQ(server.Call("GET", path).json()["metadata"]["k"], "v");
  const auto texts = [](const Json& page) {
    std::vector<std::string> out;
    for (const Json& item : page["data"]) out.push_back(item["content"][0]["text"]);
    return out;
  };
  const Json page = server.Call("GET", path + "/input_items").json();
  EXPECT_THAT(texts(page), ElementsAre("c", "b", "a"));
  EXPECT_EQ(page["has_more"], false);
  EXPECT_EQ(page["first_id"], page["data"][0]["id"]);
  const Json two = server.Call("GET", path + "/input_items?order=asc&limit=2").json();
  EXPECT_THAT(texts(two), ElementsAre("a", "b"));
  EXPECT_EQ(two["has_more"], true);
  const Json rest =
      server
          .Call("GET",
                path + "/input_items?order=asc&limit=2&after=" + two["last_id"].get<std::string>())
          .json();
  EXPECT_THAT(texts(rest), ElementsAre("c"));
  for (const char* query : {"limit=0", "limit=101", "limit=x", "order=up", "after=nobody"}) {
    EXPECT_EQ(server.Call("GET", path + "/input_items?" + query).status, 400) << query;
  }
  EXPECT_EQ(server.Call("GET", path + "?stream=true").status, 400);
  const Json gone = server.Call("DELETE", path).json();
  EXPECT_EQ(gone, Json::parse(R"({"id":")" + id + R"(","object":"response","deleted":true})"));
  EXPECT_EQ(server.Call("DELETE", path).status, 404);
  EXPECT_EQ(server.Call("GET", path).status, 404);
  EXPECT_EQ(server.Call("GET", path + "/input_items").status, 404);
  EXPECT_EQ(server.Call("POST", path).status, 405);
  EXPECT_EQ(server.Call("POST", path).Header("Allow"), "GET, DELETE, OPTIONS");
  // What is not to be stored is not.
  const Json kept = server.Post("/v1/responses", {{"input", "x"}, {"store", false}}).json();
  EXPECT_EQ(server.Call("GET", "/v1/responses/" + kept["id"].get<std::string>()).status, 404);
}

TEST(Responses, KeysAndBudgets) {
  ApiOptions options;
  ASSERT_TRUE(options.keys.Add("alice").ok());
  ASSERT_TRUE(options.keys.Add("bob").ok());
  options.response_store_count = 2;
  TestServer server(Says("yes"), std::move(options));
  const auto post = [&](const char* key, const Json& body) {
    return server.Call("POST", "/v1/responses", body.dump(),
                       std::string("Authorization: Bearer ") + key + "\r\n");
  };
  const std::string id = post("alice", {{"input", "secret"}}).json()["id"];
  EXPECT_EQ(post("bob", {{"input", "x"}, {"previous_response_id", id}}).status, 404);
  EXPECT_EQ(server.Call("GET", "/v1/responses/" + id, "", "X-Api-Key: bob\r\n").status, 404);
  EXPECT_EQ(server.Call("GET", "/v1/responses/" + id, "", "X-Api-Key: alice\r\n").status, 200);
  EXPECT_EQ(server.Call("GET", "/v1/responses/" + id).status, 401);
  for (int i = 0; i < 2; ++i) post("bob", {{"input", "x"}});
  EXPECT_EQ(server.Call("GET", "/v1/responses/" + id, "", "X-Api-Key: alice\r\n").status, 404);
  const std::string metrics = server.Call("GET", "/metrics", "", "X-Api-Key: alice\r\n").body;
  EXPECT_THAT(metrics, HasSubstr("oscar_responses_stored 2"));
  EXPECT_THAT(metrics, HasSubstr("endpoint=\"responses\",finish_reason=\"stop\""));
}

// Many, most of which continue others: all that are in the store can be continued, and it keeps to
// its budget.
TEST(Responses, TheStoreKeepsToItsBudget) {
  constexpr int kBudget = 50'000, kRequests = 80;
  ApiOptions options;
  options.response_store_bytes = kBudget;
  TestServer server(Says("y"), std::move(options));
  std::string first, id;
  for (int i = 0; i < kRequests; ++i) {
    Json body = {{"input", "n"}, {"max_output_tokens", 2}};
    if (i % 10 != 0) body["previous_response_id"] = id;
    const RawReply reply = server.Post("/v1/responses", body);
    ASSERT_EQ(reply.status, 200) << i << reply.body;
    id = reply.json()["id"];
    if (i == 0) first = id;
  }
  EXPECT_EQ(server.Call("GET", "/props").json()["limits"]["response_store_bytes"], kBudget);
  std::map<std::string, double> metrics;
  std::istringstream lines(server.Call("GET", "/metrics").body);
  for (std::string line; std::getline(lines, line);) {
    const size_t space = line.rfind(' ');
    if (!line.starts_with("#") && space != std::string::npos) {
      metrics[line.substr(0, space)] = std::stod(line.substr(space + 1));
    }
  }
  EXPECT_LE(metrics["oscar_response_store_bytes"], kBudget);
  EXPECT_GT(metrics["oscar_responses_evicted_total"], 0);
  EXPECT_EQ(metrics["oscar_responses_stored"] + metrics["oscar_responses_evicted_total"],
            kRequests);
  EXPECT_EQ(server.Call("GET", "/v1/responses/" + id).status, 200);
  EXPECT_EQ(server.Call("GET", "/v1/responses/" + first).status, 404);
}

TEST(Responses, CountsTokens) {
  TestServer server(Says("x"));
  const Json counted =
      server.Post("/v1/responses/input_tokens", {{"input", "hi"}, {"instructions", "i"}}).json();
  EXPECT_EQ(counted["object"], "response.input_tokens");
  const Json made = server.Post("/v1/responses", {{"input", "hi"}, {"instructions", "i"}}).json();
  EXPECT_EQ(counted["input_tokens"], made["usage"]["input_tokens"]);
}

TEST(Messages, WholeAnswer) {
  TestServer server(Says("<think>\nhm\n</think>\n\nhello there"));
  const RawReply reply = server.Call("POST", "/v1/messages?beta=true", Message().dump(),
                                     "Anthropic-Version: 2023-06-01\r\n");
  ASSERT_EQ(reply.status, 200) << reply.body;
  const Json message = reply.json();
  EXPECT_EQ(message["type"], "message");
  EXPECT_EQ(message["role"], "assistant");
  EXPECT_EQ(message["model"], "demo");
  EXPECT_EQ(message["stop_reason"], "end_turn");
  EXPECT_EQ(message["stop_sequence"], nullptr);
  EXPECT_EQ(message["content"], Json::parse(R"([{"type":"thinking","thinking":"hm","signature":""},
                                                {"type":"text","text":"hello there"}])"));
  EXPECT_EQ(message["usage"]["cache_read_input_tokens"], 3);
  EXPECT_EQ(message["usage"]["input_tokens"].get<size_t>() + 3,
            server.engine.requests().back().prompt.size());
  EXPECT_EQ(reply.Header("Request-Id"), reply.Header("X-Request-Id"));
}

TEST(Messages, StreamEqualsWhole) {
  TestServer server(Says("<think>\nhm\n</think>\n\nhello there"));
  const Json whole = server.Post("/v1/messages", Message()).json();
  const auto frames = Frames(server.Post("/v1/messages", Message({{"stream", true}})).body);
  EXPECT_THAT(Names(frames),
              ElementsAre("message_start", "ping", "content_block_start", "content_block_delta",
                          "content_block_stop", "content_block_start", "content_block_delta",
                          "content_block_stop", "message_delta", "message_stop"));
  Json content = Json::array();
  for (const Frame& frame : frames) {
    const Json& data = frame.data;
    if (frame.event == "content_block_start") {
      EXPECT_EQ(data["index"], content.size());
      content.push_back(data["content_block"]);
    } else if (frame.event == "content_block_delta") {
      EXPECT_EQ(data["index"], content.size() - 1);
      for (const char* key : {"text", "thinking", "signature"}) {
        if (!data["delta"].contains(key)) continue;
        content.back()[key].get_ref<std::string&>() += data["delta"][key].get<std::string>();
      }
    }
  }
  EXPECT_EQ(content, whole["content"]);
  const Json& delta = frames[frames.size() - 2].data;
  EXPECT_EQ(delta["delta"]["stop_reason"], "end_turn");
  EXPECT_EQ(delta["usage"], whole["usage"]);
  EXPECT_EQ(frames[0].data["message"]["content"], Json::array());
  EXPECT_EQ(frames[0].data["message"]["usage"]["cache_read_input_tokens"], 3);
}

TEST(Messages, StopReasons) {
  TestServer server(Says("one two three four"));
  const Json cut = server.Post("/v1/messages", Message({{"max_tokens", 1}})).json();
  EXPECT_EQ(cut["stop_reason"], "max_tokens");
  const Json stop =
      server.Post("/v1/messages", Message({{"stop_sequences", {"three", "zzz"}}})).json();
  EXPECT_EQ(stop["stop_reason"], "stop_sequence");
  EXPECT_EQ(stop["stop_sequence"], "three");
  EXPECT_EQ(stop["content"][0]["text"], "one two ");
  TestServer endless([](const EngineRequest&) {
    FakeEngine::Script script;
    script.tokens = Ids("a b");
    script.endless = true;
    return script;
  });
  const Json full = endless.Post("/v1/messages", Message({{"max_tokens", 32000}})).json();
  EXPECT_EQ(full["stop_reason"], "model_context_window_exceeded");
  std::string prompt;
  for (int i = 0; i < 2000; ++i) prompt += "word ";
  const RawReply refused = endless.Post(
      "/v1/messages", Message({{"messages", {{{"role", "user"}, {"content", prompt}}}}}));
  EXPECT_EQ(refused.status, 400);
  EXPECT_THAT(refused.json()["error"]["message"].get<std::string>(),
              HasSubstr("prompt is too long: "));
}

TEST(Messages, AnAnswerThatTheClientBegan) {
  TestServer server(Says(" four"));
  Json body = Message();
  body["messages"].push_back({{"role", "assistant"}, {"content", "Two and two are"}});
  EXPECT_EQ(server.Post("/v1/messages", body).json()["content"][0]["text"], " four");
  EXPECT_TRUE(LastPrompt(server).ends_with("Two and two are"));
}

TEST(Messages, CountsTokens) {
  TestServer server(Says("x"));
  Json body = Message({{"system", "s"}});
  const Json made = server.Post("/v1/messages", body).json();
  body.erase("max_tokens");
  const Json counted = server.Post("/v1/messages/count_tokens", body).json();
  EXPECT_EQ(counted, (Json{{"input_tokens", made["usage"]["input_tokens"].get<int>() + 3}}));
}

TEST(Messages, ModelsInTheirShape) {
  TestServer server(Says("x"));
  const std::string version = "anthropic-version: 2023-06-01\r\n";
  const Json list = server.Call("GET", "/v1/models", "", version).json();
  ASSERT_EQ(list["data"].size(), 2u);
  EXPECT_EQ(list["data"][0]["type"], "model");
  EXPECT_EQ(list["data"][0]["id"], "demo");
  EXPECT_EQ(list["data"][0]["created_at"], "1970-01-01T00:00:00Z");
  EXPECT_EQ(list["last_id"], "alias");
  EXPECT_EQ(server.Call("GET", "/v1/models/alias", "", version).json(), list["data"][1]);
  EXPECT_EQ(server.Call("GET", "/v1/models").json()["object"], "list");
}

// Whoever refuses a request, clients of this API get its errors.
TEST(Messages, ErrorsOfEveryLayer) {
  ApiOptions options;
  ASSERT_TRUE(options.keys.Add("key").ok());
  HttpOptions http;
  http.max_body_bytes = 10'000;
  TestServer server(Says("x"), std::move(options), http);
  const auto error = [](const RawReply& reply, int status, const char* type) {
    EXPECT_EQ(reply.status, status) << reply.body;
    const Json body = reply.json();
    EXPECT_EQ(body["type"], "error") << reply.body;
    EXPECT_EQ(body["error"]["type"], type);
    EXPECT_FALSE(body["error"]["message"].get<std::string>().empty());
    EXPECT_EQ(body["request_id"], reply.Header("X-Request-Id"));
    EXPECT_EQ(reply.Header("Content-Length"), std::to_string(reply.body.size()));
  };
  const std::string key = "x-api-key: key\r\nanthropic-version: 2023-06-01\r\n";
  error(server.Call("POST", "/v1/messages", Message().dump()), 401, "authentication_error");
  error(server.Call("POST", "/v1/messages", "{", key), 400, "invalid_request_error");
  error(server.Call("POST", "/v1/messages", Message({{"model", "claude"}}).dump(), key), 404,
        "not_found_error");
  const RawReply thread =
      server.Call("POST", "/v1/messages", Message({{"thread", {{"type", "create"}}}}).dump(), key);
  error(thread, 400, "invalid_request_error");
  EXPECT_EQ(thread.json()["error"]["details"]["error_code"], "thread_unsupported_request");
  error(server.Call("GET", "/v1/messages", "", key), 405, "invalid_request_error");
  error(server.Call("POST", "/v1/messages/batches", "{}", key), 404, "not_found_error");
  error(server.Call("POST", "/v1/messages", std::string(20'000, ' '), key), 413,
        "request_too_large");
  error(server.Call("GET", "/v1/models/none", "", key), 404, "not_found_error");
  server.engine.Refuse({StatusCode::kResourceExhausted, "the queue is full"});
  error(server.Call("POST", "/v1/messages", Message().dump(), key), 429, "rate_limit_error");
  server.handler->BeginDrain();
  error(server.Call("POST", "/v1/messages", Message().dump(), key), 503, "overloaded_error");
  // Others get theirs.
  const Json other = server.Call("GET", "/v1/models/none", "", "x-api-key: key\r\n").json();
  EXPECT_FALSE(other.contains("type"));
  EXPECT_EQ(other["error"]["code"], "model_not_found");
}

}  // namespace
}  // namespace oscar::server
