#include "server/api_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <thread>

#include "server/server_fixture.h"

namespace oscar::server {
namespace {

using testing::HasSubstr;

// JSON of every data frame; checks the framing on the way.
std::vector<Json> Events(const std::string& body) {
  std::vector<Json> events;
  size_t at = 0;
  bool done = false;
  while (at < body.size()) {
    const size_t end = body.find("\n\n", at);
    EXPECT_NE(end, std::string::npos) << "unfinished frame";
    if (end == std::string::npos) break;
    const std::string frame = body.substr(at, end - at);
    at = end + 2;
    if (frame == ": ping") continue;
    EXPECT_FALSE(done) << "a frame after [DONE]";
    EXPECT_TRUE(frame.starts_with("data: ")) << frame;
    EXPECT_EQ(frame.find('\n'), std::string::npos);
    if (frame == "data: [DONE]") {
      done = true;
      continue;
    }
    events.push_back(Json::parse(frame.substr(6)));
  }
  EXPECT_TRUE(done) << "no [DONE]";
  return events;
}

void ExpectError(const RawReply& reply, int status, const char* type, const char* code) {
  EXPECT_EQ(reply.status, status) << reply.head << reply.body;
  const Json json = reply.json();
  ASSERT_TRUE(json.is_object() && json.contains("error")) << reply.body;
  const Json& error = json["error"];
  EXPECT_EQ(error.size(), 4u);
  EXPECT_TRUE(error["message"].is_string() && !error["message"].get<std::string>().empty());
  EXPECT_EQ(error["type"], type) << reply.body;
  EXPECT_EQ(error["code"], code) << reply.body;
  EXPECT_TRUE(error.contains("param"));
  EXPECT_EQ(reply.Header("Content-Type"), "application/json");
}

TEST(ApiServer, ChatAnswersWhole) {
  TestServer server(Says("Hello world"));
  const RawReply reply =
      server.Post("/v1/chat/completions", TestServer::Chat({{"model", "alias"}}));
  ASSERT_EQ(reply.status, 200) << reply.body;
  const Json json = reply.json();
  EXPECT_TRUE(json["id"].get<std::string>().starts_with("chatcmpl-"));
  EXPECT_EQ(json["object"], "chat.completion");
  EXPECT_EQ(json["model"], "alias");
  const Json& choice = json["choices"][0];
  EXPECT_EQ(choice["message"]["role"], "assistant");
  EXPECT_EQ(choice["message"]["content"], "Hello world");
  EXPECT_EQ(choice["finish_reason"], "stop");
  EXPECT_TRUE(choice["stop_reason"].is_null());
  EXPECT_TRUE(choice["logprobs"].is_null());
  const auto request = server.engine.requests().at(0);
  EXPECT_EQ(json["usage"]["prompt_tokens"], request.prompt.size());
  EXPECT_EQ(json["usage"]["completion_tokens"], Ids("Hello world").size() + 1);
  EXPECT_EQ(json["usage"]["prompt_tokens_details"]["cached_tokens"], 3);
  EXPECT_FALSE(reply.Header("X-Request-Id").empty());
}

TEST(ApiServer, RulesAndPrioritiesReachTheEngine) {
  TestServer server(Says("ok"));
  const Json fields = {{"priority", -4}, {"bad_words", {"Hello"}}, {"allowed_token_ids", {7, 9}}};
  ASSERT_EQ(server.Post("/v1/chat/completions", TestServer::Chat(fields)).status, 200);
  ASSERT_EQ(server.Post("/v1/chat/completions", TestServer::Chat({{"n", 1}})).status, 200);
  const auto requests = server.engine.requests();
  EXPECT_EQ(requests[0].priority, -4);
  ASSERT_NE(requests[0].rules, nullptr);
  EXPECT_EQ(requests[0].rules->allowed, std::vector<int32_t>({7, 9}));
  // As it is, and after a space.
  ASSERT_EQ(requests[0].rules->bad_words.size(), 2u);
  EXPECT_EQ(requests[0].rules->bad_words[0], Ids("Hello"));
  EXPECT_EQ(requests[0].rules->bad_words[1], Ids(" Hello"));
  EXPECT_EQ(requests[1].priority, 0);
  EXPECT_EQ(requests[1].rules, nullptr);
  ApiOptions api;
  api.ignore_priority = true;
  TestServer by_arrival(Says("ok"), api);
  by_arrival.Post("/v1/chat/completions", TestServer::Chat(fields));
  EXPECT_EQ(by_arrival.engine.requests().at(0).priority, 0);
}

TEST(ApiServer, BestOfIsGeneratedAndNotAllTold) {
  TestServer server(Says("ok"));
  const RawReply reply =
      server.Post("/v1/chat/completions", TestServer::Chat({{"n", 2}, {"best_of", 5}}));
  ASSERT_EQ(reply.status, 200) << reply.body;
  EXPECT_EQ(reply.json()["choices"].size(), 2u);
  const auto requests = server.engine.requests();
  ASSERT_EQ(requests.size(), 5u);
  for (const EngineRequest& request : requests) EXPECT_TRUE(request.want_logprobs);
  server.Post("/v1/chat/completions", TestServer::Chat({{"n", 2}}));
  EXPECT_FALSE(server.engine.requests().back().want_logprobs);
}

TEST(ApiServer, UserTextIsNeverASpecialToken) {
  TestServer server(Says("ok"));
  server.Post("/v1/chat/completions",
              {{"messages", Json::array({{{"role", "user"}, {"content", "<|im_end|>"}}})}});
  const auto prompt = server.engine.requests().at(0).prompt;
  const int32_t end = *DemoTokenizer().FindToken("<|im_end|>");
  EXPECT_EQ(std::count(prompt.begin(), prompt.end(), end), 1);
  EXPECT_EQ(DemoTokenizer().Decode(prompt, false),
            "<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n");
}

TEST(ApiServer, StreamFramingAndOrder) {
  TestServer server(Says("Hello big world"));
  const RawReply reply = server.Post(
      "/v1/chat/completions",
      TestServer::Chat({{"stream", true}, {"stream_options", {{"include_usage", true}}}}));
  ASSERT_EQ(reply.status, 200) << reply.body;
  EXPECT_EQ(reply.Header("Content-Type"), "text/event-stream; charset=utf-8");
  EXPECT_EQ(reply.Header("Cache-Control"), "no-cache");
  EXPECT_EQ(reply.Header("X-Accel-Buffering"), "no");
  const auto events = Events(reply.body);
  ASSERT_GE(events.size(), 4u);
  EXPECT_EQ(events[0]["choices"][0]["delta"], Json({{"role", "assistant"}, {"content", ""}}));
  std::string text;
  for (size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(events[i]["object"], "chat.completion.chunk");
    for (const char* key : {"id", "created", "model"}) EXPECT_EQ(events[i][key], events[0][key]);
    ASSERT_TRUE(events[i].contains("usage"));
    EXPECT_EQ(events[i]["usage"].is_null(), i + 1 < events.size());
    if (i > 0 && i + 2 < events.size()) {
      const std::string piece = events[i]["choices"][0]["delta"]["content"];
      EXPECT_FALSE(piece.empty());
      EXPECT_TRUE(events[i]["choices"][0]["finish_reason"].is_null());
      text += piece;
    }
  }
  EXPECT_EQ(text, "Hello big world");
  const Json& last = events[events.size() - 2]["choices"][0];
  EXPECT_EQ(last["delta"], Json::object());
  EXPECT_EQ(last["finish_reason"], "stop");
  EXPECT_EQ(events.back()["choices"], Json::array());
  EXPECT_EQ(events.back()["usage"]["completion_tokens"], Ids("Hello big world").size() + 1);
}

TEST(ApiServer, StreamWithoutUsageHasNoUsageKey) {
  TestServer server(Says("Hello"));
  for (const Json& event :
       Events(server.Post("/v1/chat/completions", TestServer::Chat({{"stream", true}})).body)) {
    EXPECT_FALSE(event.contains("usage"));
  }
}

TEST(ApiServer, ReasoningIsKeptApart) {
  TestServer server(Says("<think>\nhm, well\n</think>\n\nthe answer"));
  const Json json = server.Post("/v1/chat/completions", TestServer::Chat()).json();
  EXPECT_EQ(json["choices"][0]["message"]["content"], "the answer");
  EXPECT_EQ(json["choices"][0]["message"]["reasoning_content"], "hm, well");
  EXPECT_GT(json["usage"]["completion_tokens_details"]["reasoning_tokens"], 0);
  std::string reasoning, content;
  for (const Json& event :
       Events(server.Post("/v1/chat/completions", TestServer::Chat({{"stream", true}})).body)) {
    const Json& delta = event["choices"][0]["delta"];
    reasoning += delta.value("reasoning_content", "");
    content += delta.value("content", "");
  }
  EXPECT_EQ(reasoning, "hm, well");
  EXPECT_EQ(content, "the answer");
}

TEST(ApiServer, ManyChoicesHaveSeedsOfTheirOwn) {
  TestServer server(Says("Hello"));
  const Json body = TestServer::Chat({{"n", 3}, {"seed", 7}});
  const Json json = server.Post("/v1/chat/completions", body).json();
  ASSERT_EQ(json["choices"].size(), 3u);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(json["choices"][static_cast<size_t>(i)]["index"], i);
  server.Post("/v1/chat/completions", body);
  const auto requests = server.engine.requests();
  EXPECT_EQ(requests[0].sampling.seed, 7u);
  EXPECT_NE(requests[1].sampling.seed, requests[2].sampling.seed);
  for (size_t i = 0; i < 3; ++i)
    EXPECT_EQ(requests[i].sampling.seed, requests[i + 3].sampling.seed);
  // A prompt counts once.
  EXPECT_EQ(json["usage"]["prompt_tokens"], requests[0].prompt.size());
}

TEST(ApiServer, StopStringEndsTheRequestInTheEngine) {
  TestServer server([](const EngineRequest&) {
    FakeEngine::Script script;
    script.tokens = Ids("one two three ");
    script.endless = true;
    return script;
  });
  const Json json =
      server.Post("/v1/completions", {{"prompt", "x"}, {"max_tokens", 500}, {"stop", "three"}})
          .json();
  EXPECT_EQ(json["choices"][0]["text"], "one two ");
  EXPECT_EQ(json["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(json["choices"][0]["stop_reason"], "three");
  EXPECT_EQ(server.engine.running(), 0);
}

TEST(ApiServer, CompletionPromptsEchoAndLogprobs) {
  TestServer server(Says("world"));
  const Json json = server
                        .Post("/v1/completions", {{"prompt", {"Hello", "Bye"}},
                                                  {"n", 2},
                                                  {"echo", true},
                                                  {"logprobs", 2},
                                                  {"max_tokens", 1}})
                        .json();
  ASSERT_EQ(json["choices"].size(), 4u) << json;
  EXPECT_TRUE(json["id"].get<std::string>().starts_with("cmpl-"));
  EXPECT_EQ(json["object"], "text_completion");
  const Json& third = json["choices"][2];
  EXPECT_TRUE(third["text"].get<std::string>().starts_with("Bye"));
  const Json& logprobs = third["logprobs"];
  EXPECT_TRUE(logprobs["token_logprobs"][0].is_null());
  EXPECT_DOUBLE_EQ(logprobs["token_logprobs"][1].get<double>(), -0.5);
  EXPECT_TRUE(logprobs["top_logprobs"][0].is_null());
  EXPECT_EQ(logprobs["top_logprobs"].back().size(), 2u);
  EXPECT_EQ(logprobs["tokens"].size(), logprobs["text_offset"].size());
  EXPECT_EQ(logprobs["text_offset"][0], 0);
  EXPECT_EQ(logprobs["tokens"].size(), Ids("Bye").size() + 1);

  // However few are asked for, the token that was sampled is among them.
  const Json none =
      server.Post("/v1/completions", {{"prompt", "Hello"}, {"logprobs", 0}, {"max_tokens", 1}})
          .json()["choices"][0]["logprobs"];
  EXPECT_EQ(none["top_logprobs"][0],
            (Json{{none["tokens"][0].get<std::string>(), none["token_logprobs"][0]}}));
}

TEST(ApiServer, ZeroTokensScoreThePrompt) {
  TestServer server(Says("unseen"));
  const Json json =
      server
          .Post("/v1/completions",
                {{"prompt", "Hello there"}, {"echo", true}, {"logprobs", 0}, {"max_tokens", 0}})
          .json();
  EXPECT_EQ(json["choices"][0]["text"], "Hello there") << json;
  EXPECT_EQ(json["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(json["usage"]["completion_tokens"], 0);
  EXPECT_EQ(json["choices"][0]["logprobs"]["tokens"].size(), Ids("Hello there").size());
  EXPECT_TRUE(server.engine.requests().at(0).want_prompt_logprobs);
}

TEST(ApiServer, ChatLogprobsShape) {
  TestServer server(Says("é"));
  const Json json =
      server
          .Post("/v1/chat/completions", TestServer::Chat({{"logprobs", true}, {"top_logprobs", 2}}))
          .json();
  std::string bytes;
  for (const Json& entry : json["choices"][0]["logprobs"]["content"]) {
    EXPECT_TRUE(entry["token"].is_string());
    EXPECT_EQ(entry["top_logprobs"].size(), 2u);
    EXPECT_TRUE(entry["top_logprobs"][0]["bytes"].is_array());
    for (const Json& byte : entry["bytes"]) bytes += static_cast<char>(byte.get<int>());
  }
  EXPECT_EQ(bytes, "é");
}

TEST(ApiServer, ContextOverflowTellsAllNumbers) {
  TestServer server(Says("x"));
  const RawReply reply =
      server.Post("/v1/completions", {{"prompt", {1, 2, 3}}, {"max_tokens", 1022}});
  ExpectError(reply, 400, "invalid_request_error", "context_length_exceeded");
  for (const char* number : {"3", "1022", "1024"}) EXPECT_THAT(reply.body, HasSubstr(number));
  EXPECT_EQ(server.Post("/v1/completions", {{"prompt", {1, 2, 3}}, {"max_tokens", 1021}}).status,
            200);
}

// One choice may always be told of in full: 1024 tokens with 20 others each.
TEST(ApiServer, AnswersAreBounded) {
  TestServer server(Says("x"), {}, {}, /*ready=*/false);
  server.limits.max_answer_logprobs = 1;
  server.SetReady();
  const auto chat = [&](Json extra) {
    extra.update({{"logprobs", true}, {"top_logprobs", 20}});
    return server.Post("/v1/chat/completions", TestServer::Chat(extra));
  };
  const RawReply reply = chat({{"n", 8}});
  ExpectError(reply, 400, "invalid_request_error", "answer_too_large");
  for (const char* part : {"8 choices", "21504", "max_tokens", "stream"}) {
    EXPECT_THAT(reply.body, HasSubstr(part));
  }
  EXPECT_EQ(server.engine.requests().size(), 0u);
  EXPECT_EQ(chat(Json::object()).status, 200);
  EXPECT_EQ(chat({{"n", 8}, {"max_tokens", 100}}).status, 200);
  EXPECT_EQ(chat({{"n", 8}, {"stream", true}}).status, 200);
  EXPECT_EQ(server.Post("/v1/chat/completions", TestServer::Chat({{"n", 8}})).status, 200);

  const std::vector<int32_t> prompt(1000, 5);
  const auto complete = [&](size_t prompts, const Json& extra) {
    Json body = {{"prompt", std::vector(prompts, prompt)}, {"max_tokens", 1}};
    body.update(extra);
    return server.Post("/v1/completions", body);
  };
  EXPECT_EQ(complete(3, Json::object()).status, 200);
  EXPECT_EQ(complete(3, {{"logprobs", 20}}).status, 200);
  EXPECT_EQ(complete(1, {{"logprobs", 20}, {"echo", true}}).status, 200);
  EXPECT_EQ(complete(2, {{"return_token_ids", true}}).status, 200);
  // What is told of prompts comes at once, streamed or not.
  for (const Json& extra :
       {Json{{"logprobs", 20}, {"echo", true}},
        Json{{"logprobs", 20}, {"echo", true}, {"stream", true}}, Json{{"prompt_logprobs", 20}},
        Json{{"n", 8}, {"return_token_ids", true}}}) {
    ExpectError(complete(3, extra), 400, "invalid_request_error", "answer_too_large");
  }
}

// As in a build without xgrammar: the error names the field and the option.
TEST(ApiServer, WithoutACompilerFormsAreRefused) {
  TestServer server(Says("x"));
  for (const Json& form : {Json{{"response_format", {{"type", "json_object"}}}},
                           Json{{"guided_choice", {"a"}}}, Json{{"grammar", "root ::= \"a\""}}}) {
    const RawReply reply = server.Post("/v1/chat/completions", TestServer::Chat(form));
    ExpectError(reply, 400, "invalid_request_error", "unsupported_parameter");
    EXPECT_EQ(reply.json()["error"]["param"], form.begin().key());
    EXPECT_NE(reply.body.find("OSCAR_XGRAMMAR"), std::string::npos);
  }
  EXPECT_EQ(
      server
          .Post("/v1/chat/completions", TestServer::Chat({{"response_format", {{"type", "text"}}}}))
          .status,
      200);
}

TEST(ApiServer, ErrorTable) {
  ApiOptions api;
  TestServer server(Says("x"), std::move(api));
  ExpectError(server.Call("POST", "/v1/chat/completions", "{"), 400, "invalid_request_error",
              "invalid_json");
  ExpectError(server.Post("/v1/chat/completions", {{"n", 1}}), 400, "invalid_request_error",
              "missing_required_parameter");
  ExpectError(server.Post("/v1/chat/completions", TestServer::Chat({{"model", "gpt"}})), 404,
              "not_found_error", "model_not_found");
  ExpectError(server.Call("GET", "/v1/embeddings"), 404, "not_found_error", "not_found");
  ExpectError(server.Call("GET", "/v1/models/none"), 404, "not_found_error", "model_not_found");
  const RawReply method = server.Call("GET", "/v1/chat/completions");
  ExpectError(method, 405, "invalid_request_error", "method_not_allowed");
  EXPECT_EQ(method.Header("Allow"), "POST, OPTIONS");
  ExpectError(server.Call("DELETE", "/health"), 405, "invalid_request_error", "method_not_allowed");
  {
    RawClient client(server.http->port());
    client.Send(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n"
        "Content-Length: 2\r\n\r\n{}");
    ExpectError(client.ReadReply(), 415, "invalid_request_error", "unsupported_media_type");
  }
  ExpectError(server.Post("/v1/chat/completions",
                          {{"messages", {{{"role", "user"}, {"content", "refuse me"}}}}}),
              400, "invalid_request_error", "invalid_value");
  server.engine.Refuse(ResourceExhausted("the queue is full"));
  const RawReply full = server.Post("/v1/chat/completions", TestServer::Chat());
  ExpectError(full, 429, "rate_limit_error", "queue_full");
  EXPECT_FALSE(full.Header("Retry-After").empty());
  server.engine.Refuse(Internal("secret detail"));
  const RawReply internal = server.Post("/v1/chat/completions", TestServer::Chat());
  ExpectError(internal, 500, "server_error", "internal_error");
  EXPECT_EQ(internal.body.find("secret"), std::string::npos);
  server.engine.SetHealth(Unavailable("the device has failed"));
  ExpectError(server.Call("GET", "/health"), 503, "unavailable_error", "device_failed");
}

TEST(ApiServer, EngineFailureBeforeAndAfterTheFirstByte) {
  int64_t fail_after = 0;
  TestServer server([&](const EngineRequest&) {
    FakeEngine::Script script;
    script.tokens = Ids("a b c d e f");
    script.fail_after = fail_after;
    script.failure = Internal("it broke");
    return script;
  });
  ExpectError(server.Post("/v1/chat/completions", TestServer::Chat()), 500, "server_error",
              "internal_error");
  fail_after = 2;
  const RawReply reply = server.Post("/v1/chat/completions", TestServer::Chat({{"stream", true}}));
  EXPECT_EQ(reply.status, 200);
  const auto events = Events(reply.body);
  EXPECT_EQ(events.back()["error"]["code"], "internal_error");
  EXPECT_EQ(server.engine.running(), 0);
}

TEST(ApiServer, RequestTimeout) {
  ApiOptions api;
  api.request_timeout = std::chrono::milliseconds(300);
  TestServer server(Says("a b c d e f g h i j k l m n o p q r s t", 50), std::move(api));
  ExpectError(server.Post("/v1/chat/completions", TestServer::Chat()), 408, "timeout_error",
              "request_timeout");
  const auto events =
      Events(server.Post("/v1/chat/completions", TestServer::Chat({{"stream", true}})).body);
  EXPECT_EQ(events.back()["error"]["code"], "request_timeout");
  EXPECT_EQ(server.engine.running(), 0);
}

TEST(ApiServer, PingsWhileThePromptIsComputed) {
  ApiOptions api;
  api.ping_interval = std::chrono::milliseconds(100);
  TestServer server(
      [](const EngineRequest&) {
        FakeEngine::Script script;
        script.tokens = Ids("late");
        script.start_delay = std::chrono::milliseconds(900);
        return script;
      },
      std::move(api));
  const RawReply reply = server.Post("/v1/chat/completions", TestServer::Chat({{"stream", true}}));
  EXPECT_THAT(reply.body, HasSubstr(": ping\n\n"));
  EXPECT_EQ(Events(reply.body).back()["choices"][0]["finish_reason"], "stop");
}

bool Eventually(const std::function<bool()>& condition, int timeout_ms = 3000) {
  for (int waited = 0; waited < timeout_ms; waited += 5) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return condition();
}

TEST(ApiServer, DisconnectCancelsEveryChoice) {
  for (const bool stream : {true, false}) {
    TestServer server([](const EngineRequest&) {
      FakeEngine::Script script;
      script.tokens = Ids("again and again ");
      script.endless = true;
      script.token_delay = std::chrono::milliseconds(20);
      return script;
    });
    RawClient client(server.http->port());
    client.Send(TestServer::Head("POST", "/v1/chat/completions",
                                 TestServer::Chat({{"stream", stream}, {"n", 3}}).dump()));
    ASSERT_TRUE(Eventually([&] { return server.engine.running() == 3; }));
    if (stream) {
      ASSERT_TRUE(client.ReadUntil("again"));
    }
    const auto left = std::chrono::steady_clock::now();
    client.Close();
    ASSERT_TRUE(Eventually([&] { return server.engine.running() == 0; }));
    EXPECT_LT(std::chrono::steady_clock::now() - left, std::chrono::milliseconds(1000));
    EXPECT_EQ(server.engine.cancelled(), 3);
    EXPECT_TRUE(Eventually([&] {
      return server.Call("GET", "/metrics").body.find("oscar_cancelled_total 1\n") !=
             std::string::npos;
    }));
  }
}

// Trying again would exceed the same budget: the client's error, and no Retry-After.
TEST(ApiServer, TemplateBudgetsAreTheClientsError) {
  TestServer server(Says("x"));
  const Json messages = Json::array({{{"role", "user"}, {"content", "exhaust me"}}});
  const RawReply reply = server.Post("/v1/chat/completions", {{"messages", messages}});
  ExpectError(reply, 400, "invalid_request_error", "template_budget_exceeded");
  EXPECT_EQ(reply.Header("Retry-After"), "");
  EXPECT_EQ(reply.json()["error"]["param"], "messages");
}

// Two keys whose log ids are the same share nothing.
TEST(ApiServer, IsolationUsesTheWholeHashOfTheKey) {
  ApiOptions api;
  api.isolate_keys = true;
  std::map<std::string, std::string> by_id;
  std::string first, second;
  for (int i = 0; second.empty(); ++i) {
    const std::string key = "key" + std::to_string(i);
    KeyRing ring;
    ASSERT_TRUE(ring.Add(key).ok());
    HttpRequest request;
    request.headers.emplace_back("X-Api-Key", key);
    const auto [at, is_new] = by_id.emplace(ring.Check(request)->id, key);
    if (is_new) continue;
    first = at->second;
    second = key;
  }
  ASSERT_TRUE(api.keys.Add(first).ok() && api.keys.Add(second).ok());
  TestServer server(Says("x"), std::move(api));
  for (const std::string& key : {first, second}) {
    const std::string header = "X-Api-Key: " + key + "\r\nX-Request-Id: of-" + key + "\r\n";
    ASSERT_EQ(server.Call("POST", "/v1/chat/completions", TestServer::Chat().dump(), header).status,
              200);
  }
  const auto requests = server.engine.requests();
  ASSERT_EQ(requests.size(), 2u);
  EXPECT_NE(requests[0].cache_salt, requests[1].cache_salt);
  EXPECT_GE(requests[0].cache_salt.size(), 64u);
  // The monitor shows a key its own sequences alone.
  for (const std::string& key : {first, second}) {
    const Json cache =
        server.Call("GET", "/v1/oscar/cache", "", "X-Api-Key: " + key + "\r\n").json();
    ASSERT_EQ(cache["sequences"].size(), 1u);
    EXPECT_EQ(cache["sequences"][0]["id"], "of-" + key);
  }
}

TEST(ApiServer, AuthMatrix) {
  ApiOptions api;
  ASSERT_TRUE(api.keys.Add("sesame").ok());
  TestServer server(Says("x"), std::move(api));
  const std::string good = "Authorization: Bearer sesame\r\n", bad = "Authorization: Bearer x\r\n";
  for (const char* path : {"/v1/models", "/metrics", "/props", "/version", "/v1/oscar/cache",
                           "/no/such/path", "/tokenize"}) {
    const RawReply refused = server.Call("GET", path, "", bad);
    ExpectError(refused, 401, "authentication_error", "invalid_api_key");
    EXPECT_EQ(refused.Header("WWW-Authenticate"), "Bearer");
    EXPECT_EQ(server.Call("GET", path).status, 401) << path;
    EXPECT_NE(server.Call("GET", path, "", good).status, 401) << path;
  }
  EXPECT_EQ(server.Call("POST", "/v1/chat/completions", TestServer::Chat().dump(), bad).status,
            401);
  EXPECT_EQ(
      server
          .Call("POST", "/v1/chat/completions", TestServer::Chat().dump(), "X-Api-Key: sesame\r\n")
          .status,
      200);
  for (const char* path : {"/health", "/v1/health", "/ping", "/"}) {
    EXPECT_EQ(server.Call("GET", path).status, 200) << path;
  }
  EXPECT_EQ(server.Call("OPTIONS", "/v1/chat/completions").status, 204);
}

TEST(ApiServer, CorsIsOptIn) {
  const std::string origin = "Origin: http://a.example\r\n";
  TestServer closed(Says("x"));
  EXPECT_EQ(closed.Call("GET", "/health", "", origin).Header("Access-Control-Allow-Origin"), "");
  ApiOptions api;
  api.cors_origins = {"http://a.example"};
  TestServer open(Says("x"), std::move(api));
  EXPECT_EQ(open.Call("GET", "/health", "", origin).Header("Access-Control-Allow-Origin"),
            "http://a.example");
  EXPECT_EQ(open.Call("GET", "/health", "", "Origin: http://b.example\r\n")
                .Header("Access-Control-Allow-Origin"),
            "");
  const RawReply preflight = open.Call("OPTIONS", "/v1/chat/completions", "", origin);
  EXPECT_THAT(preflight.Header("Access-Control-Allow-Headers"), HasSubstr("Authorization"));
  // The official clients send headers of their own, and more of them with each version.
  const RawReply sdk =
      open.Call("OPTIONS", "/v1/chat/completions", "",
                origin + "Access-Control-Request-Headers: authorization,x-stainless-lang\r\n");
  EXPECT_EQ(sdk.Header("Access-Control-Allow-Headers"), "authorization,x-stainless-lang");
}

TEST(ApiServer, LoadingReadyDraining) {
  TestServer server(Says("slow words come out one by one", 30), {}, {}, /*ready=*/false);
  ExpectError(server.Call("GET", "/health"), 503, "unavailable_error", "loading");
  ExpectError(server.Post("/v1/chat/completions", TestServer::Chat()), 503, "unavailable_error",
              "loading");
  EXPECT_EQ(server.Call("GET", "/v1/models").status, 503);
  EXPECT_EQ(server.Call("GET", "/metrics").status, 200);
  server.SetReady();
  EXPECT_EQ(server.Call("GET", "/health").json()["status"], "ok");

  RawClient client(server.http->port());
  client.Send(TestServer::Head("POST", "/v1/chat/completions",
                               TestServer::Chat({{"stream", true}}).dump()));
  ASSERT_TRUE(client.ReadUntil("slow"));
  server.handler->BeginDrain();
  ExpectError(server.Call("GET", "/health"), 503, "unavailable_error", "draining");
  ExpectError(server.Post("/v1/chat/completions", TestServer::Chat()), 503, "unavailable_error",
              "draining");
  EXPECT_TRUE(client.ReadUntil("[DONE]"));  // what runs may finish
  EXPECT_EQ(client.buffer().find("error"), std::string::npos);
  EXPECT_TRUE(Eventually([&] { return server.handler->active_requests() == 0; }));
}

TEST(ApiServer, AbortEndsStreamsWithAnError) {
  TestServer server([](const EngineRequest&) {
    FakeEngine::Script script;
    script.tokens = Ids("and so on ");
    script.endless = true;
    script.token_delay = std::chrono::milliseconds(20);
    return script;
  });
  RawClient client(server.http->port());
  client.Send(TestServer::Head("POST", "/v1/chat/completions",
                               TestServer::Chat({{"stream", true}}).dump()));
  ASSERT_TRUE(client.ReadUntil("so"));
  server.handler->Abort();
  EXPECT_TRUE(client.ReadUntil("[DONE]"));
  EXPECT_THAT(client.buffer(), HasSubstr("\"draining\""));
}

TEST(ApiServer, SmallEndpoints) {
  TestServer server(Says("x"));
  const Json models = server.Call("GET", "/v1/models").json();
  EXPECT_EQ(models["object"], "list");
  EXPECT_EQ(models["data"][0]["id"], "demo");
  EXPECT_EQ(models["data"][0]["max_model_len"], 1024);
  EXPECT_EQ(server.Call("GET", "/models/alias").json()["id"], "alias");
  const Json tokens = server.Post("/tokenize", {{"prompt", "Hello world"}}).json();
  EXPECT_EQ(tokens["tokens"].get<std::vector<int32_t>>(), Ids("Hello world"));
  EXPECT_EQ(tokens["count"], Ids("Hello world").size());
  EXPECT_EQ(server.Post("/detokenize", {{"tokens", Ids("Hello world")}}).json()["prompt"],
            "Hello world");
  ExpectError(server.Post("/detokenize", {{"tokens", {DemoTokenizer().vocab_size()}}}), 400,
              "invalid_request_error", "invalid_value");
  EXPECT_EQ(server.Post("/apply-template", TestServer::Chat()).json()["prompt"],
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
  const Json props = server.Call("GET", "/props").json();
  EXPECT_EQ(props["limits"]["n"], 128);
  EXPECT_EQ(props["limits"]["answer_logprobs"], 1 << 22);
  EXPECT_EQ(props["cache"]["method"], "oscar+");
  EXPECT_EQ(server.Post("/v1/chat/completions", TestServer::Chat()).status, 200);
  const Json cache = server.Call("GET", "/v1/oscar/cache").json();
  EXPECT_EQ(cache["sequences"][0]["pages"], "Sqr");
  EXPECT_EQ(cache["budget_bytes"], 1000);
  const RawReply page = server.Call("GET", "/");
  EXPECT_THAT(page.Header("Content-Type"), HasSubstr("text/html"));
  EXPECT_THAT(page.body, HasSubstr("</html>"));
  EXPECT_EQ(server.Call("HEAD", "/health").status, 200);
}

TEST(ApiServer, ClientRequestIdIsKept) {
  TestServer server(Says("x"));
  const RawReply reply = server.Call("POST", "/v1/chat/completions", TestServer::Chat().dump(),
                                     "X-Request-Id: abc-123\r\n");
  EXPECT_EQ(reply.Header("X-Request-Id"), "abc-123");
  EXPECT_EQ(reply.json()["id"], "chatcmpl-abc-123");
}

TEST(ApiServer, ManyStreamsAtOnce) {
  TestServer server(Says("one two three four five", 2));
  std::vector<std::jthread> threads;
  std::atomic<int> good{0};
  for (int i = 0; i < 100; ++i) {
    threads.emplace_back([&] {
      const RawReply reply =
          server.Post("/v1/chat/completions", TestServer::Chat({{"stream", true}}));
      std::string text;
      for (const Json& event : Events(reply.body)) {
        text += event["choices"][0]["delta"].value("content", "");
      }
      good += text == "one two three four five";
    });
  }
  threads.clear();
  EXPECT_EQ(good, 100);
  EXPECT_EQ(server.engine.running(), 0);
  // The last byte leaves before its request is counted as over.
  EXPECT_TRUE(Eventually([&] { return server.handler->active_requests() == 0; }));
}

// The engine's word wakes the connection: nothing on the way polls. The fake engine rings within a
// millisecond of a token; a quarter of the answers may meet a busy machine three times over.
TEST(ApiServer, TheFirstByteFollowsItsTokenAtOnce) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kDelay = std::chrono::milliseconds(20);
  std::atomic<Clock::time_point> due{Clock::time_point{}};
  TestServer server([&](const EngineRequest&) {
    FakeEngine::Script script;
    script.tokens = Ids("one");
    script.start_delay = kDelay;
    due = Clock::now() + kDelay;
    return script;
  });
  std::vector<double> late;
  for (int i = 0; i < 24; ++i) {
    RawClient client(server.http->port());
    const std::string body = TestServer::Chat({{"stream", true}}).dump();
    client.Send("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: " +
                std::to_string(body.size()) + "\r\n\r\n" + body);
    ASSERT_TRUE(client.ReadUntil("one"));
    late.push_back(std::chrono::duration<double, std::milli>(Clock::now() - due.load()).count());
  }
  std::ranges::sort(late);
  RecordProperty("median_ms", std::to_string(late[late.size() / 2]));
  EXPECT_LT(late[late.size() / 4], 2.0) << "median " << late[late.size() / 2];
  EXPECT_GT(late.front(), 0.0);
}

}  // namespace
}  // namespace oscar::server
