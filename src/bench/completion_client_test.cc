// Servers as others write them, and as nobody should.
#include "bench/completion_client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "bench/scripted_server.h"

namespace oscar {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

constexpr char kBody[] = R"({"prompt": [1, 2], "stream": true})";

LoadAnswer Ask(const ScriptedServer::Script& script, milliseconds timeout = milliseconds(5000)) {
  const ScriptedServer server(script);
  return StreamCompletion(server.address(), kBody, timeout);
}
LoadAnswer AskEvents(const std::string& events) {
  return Ask([&](const auto& caller) { caller.SayEvents(events); });
}
std::string Text(const char* text) {
  return std::string(R"(data: {"choices": [{"index": 0, "text": ")") + text +
         R"(", "finish_reason": null}]})" + "\n\n";
}

TEST(CompletionClient, ReadsAddresses) {
  const auto plain = ParseServerAddress("http://localhost:8000");
  ASSERT_TRUE(plain.has_value());
  EXPECT_EQ(plain->host, "localhost");
  EXPECT_EQ(plain->port, 8000);
  EXPECT_EQ(ParseServerAddress("http://[::1]:81/v1")->host, "::1");
  EXPECT_EQ(ParseServerAddress("http://[::1]:81/v1")->port, 81);
  EXPECT_EQ(ParseServerAddress("http://h/")->port, 80);
  for (const char* bad : {"", "h:80", "https://h:80", "http://", "http://:80", "http://h:0",
                          "http://h:70000", "http://h:8x", "http://h/chat"}) {
    EXPECT_FALSE(ParseServerAddress(bad).has_value()) << bad;
  }
}

// vLLM and SGLang: usage in an event without choices, details that are null, a last event that
// carries no token.
TEST(CompletionClient, ReadsUsageOfItsOwnEvent) {
  const LoadAnswer answer = AskEvents(
      Text("a") + Text("") + Text("b") +
      "data: {\"choices\": [{\"text\": \"\", \"finish_reason\": \"length\"}]}\n\n"
      "data: {\"choices\": [], \"usage\": {\"prompt_tokens\": 7, \"completion_tokens\": 5, "
      "\"prompt_tokens_details\": null}}\n\ndata: [DONE]\n\n");
  ASSERT_TRUE(answer.status.ok()) << answer.status.message();
  EXPECT_EQ(answer.prompt_tokens, 7);
  EXPECT_EQ(answer.completion_tokens, 5);
  EXPECT_EQ(answer.cached_tokens, -1);
  EXPECT_EQ(answer.gaps.size(), 2u);
  EXPECT_TRUE(answer.has_usage);
  EXPECT_LE(answer.first_token, answer.last_token);
  EXPECT_LE(answer.last_token, answer.total);
}

// llama.cpp: timings beside the last text, "error:" lines, line ends with a carriage return.
TEST(CompletionClient, ReadsTimings) {
  LoadAnswer answer = AskEvents(
      "data:{\"choices\": [{\"text\": \"a\"}]}\r\n\r\n: ping\r\n\r\n"
      "data: {\"choices\": [{\"text\": \"\", \"finish_reason\": \"length\"}], \"timings\": "
      "{\"prompt_n\": 3, \"cache_n\": 4, \"predicted_n\": 2}}\r\n\r\ndata: [DONE]\r\n\r\n");
  ASSERT_TRUE(answer.status.ok()) << answer.status.message();
  EXPECT_EQ(answer.prompt_tokens, 7);
  EXPECT_EQ(answer.cached_tokens, 4);
  EXPECT_EQ(answer.completion_tokens, 2);
  answer = AskEvents("error: {\"code\": 500, \"message\": \"no slot\"}\n\n");
  EXPECT_THAT(answer.status.message(), HasSubstr("no slot"));
}

TEST(CompletionClient, CountsPiecesWhereNobodyDoes) {
  const LoadAnswer answer = AskEvents(Text("a") + Text("b") + Text("c") + "data: [DONE]\n\n");
  ASSERT_TRUE(answer.status.ok()) << answer.status.message();
  EXPECT_EQ(answer.completion_tokens, 3);
  EXPECT_FALSE(answer.has_usage);
}

TEST(CompletionClient, TimesArePiecesAsTheyCome) {
  const LoadAnswer answer = Ask([](const auto& caller) {
    std::this_thread::sleep_for(milliseconds(60));
    caller.SayEvents(Text("a"));
    std::this_thread::sleep_for(milliseconds(40));
    caller.Say(Text("b") + Text("c"));
    std::this_thread::sleep_for(milliseconds(30));
    caller.Say("data: [DONE]\n\n");
  });
  ASSERT_TRUE(answer.status.ok()) << answer.status.message();
  ASSERT_EQ(answer.gaps.size(), 2u);
  EXPECT_GE(answer.first_token, 0.060);
  EXPECT_GE(answer.gaps[0], 0.020f);  // the first may have been seen late
  EXPECT_LT(answer.gaps[1], answer.gaps[0]);
  EXPECT_NEAR(answer.last_token, answer.first_token + answer.gaps[0] + answer.gaps[1], 1e-4);
  EXPECT_NEAR(answer.per_token(), (answer.last_token - answer.first_token) / 2, 1e-9);
  EXPECT_GE(answer.total, answer.last_token + 0.010);
}

// However the bytes are cut.
TEST(CompletionClient, ReadsEveryFraming) {
  const std::string events = Text("a") + Text("b") + "data: [DONE]\n\n";
  const auto in_chunks = [&](size_t size) {
    std::string out = "HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n";
    for (size_t at = 0; at < events.size(); at += size) {
      const std::string part = events.substr(at, size);
      char line[32];
      std::snprintf(line, sizeof(line), "%zx;name=x\r\n", part.size());
      out += line + part + "\r\n";
    }
    return out + "0\r\n\r\n";
  };
  const std::string with_length =
      "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: " +
      std::to_string(events.size()) + "\r\n\r\n" + events;
  for (const std::string& whole : {in_chunks(1), in_chunks(7), in_chunks(1000), with_length}) {
    for (const size_t step : {size_t{3}, whole.size()}) {
      const LoadAnswer answer = Ask([&](const auto& caller) {
        for (size_t at = 0; at < whole.size(); at += step) caller.Say(whole.substr(at, step));
      });
      EXPECT_TRUE(answer.status.ok()) << answer.status.message();
      EXPECT_EQ(answer.completion_tokens, 2);
    }
  }
}

TEST(CompletionClient, NamesWhatIsWrong) {
  const std::string ok = "HTTP/1.1 200 OK\r\n\r\n";
  const std::pair<std::string, const char*> cases[] = {
      {"", "without an answer"},
      {"SSH-2.0-OpenSSH\r\n\r\n", "not an HTTP response"},
      {"HTTP/1.1 2x0 OK\r\n\r\n", "not an HTTP response"},
      {"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n", "not an HTTP response"},
      {"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\nab", "within its answer"},
      {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "chunks that are none"},
      {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n", "chunks"},
      {"HTTP/1.1 429 Too Many\r\n\r\n{\"error\": {\"message\": \"queue full\"}}",
       "HTTP 429: queue full"},
      {"HTTP/1.1 400 Bad\r\n\r\n{\"object\": \"error\", \"message\": \"no ids\"}",
       "HTTP 400: no ids"},
      {"HTTP/1.1 422 Bad\r\n\r\n{\"detail\": \"body\"}", "HTTP 422: body"},
      {"HTTP/1.1 500 Bad\r\n\r\n\x1b[31mred", "HTTP 500: \\x1b[31mred"},
      {ok, "without [DONE]"},
      {ok + Text("a"), "without [DONE]"},
      {ok + "data: [DONE]\n\n", "without text"},
      {ok + "data: {\n\n", "event"},
      {ok + "data: [1]\n\n", "not an object"},
      {ok + "data: {\"error\": {\"message\": 5}}\n\n", "failed"},
      {ok + Text("a") + "data: {\"error\": \"out of memory\"}\n\n", "out of memory"},
  };
  for (const auto& [reply, expected] : cases) {
    const LoadAnswer answer = Ask([&](const auto& caller) { caller.Say(reply); });
    EXPECT_FALSE(answer.status.ok()) << reply;
    EXPECT_THAT(answer.status.message(), HasSubstr(expected)) << reply;
  }
  ServerAddress nobody;
  nobody.port = 1;
  EXPECT_THAT(StreamCompletion(nobody, "{}").status.message(), HasSubstr("connect"));
  EXPECT_FALSE(HttpGet(nobody, "/metrics").has_value());
  nobody.host = "no such host";
  EXPECT_FALSE(HttpGet(nobody, "/metrics").has_value());
}

// Fields of other types, or beyond any number of tokens, are as if they were not there.
TEST(CompletionClient, FieldsOfOtherTypesAreNotRead) {
  for (const char* usage :
       {R"("usage": 5)", R"("usage": {"completion_tokens": "3", "prompt_tokens": -4})",
        R"("usage": {"completion_tokens": 1e300, "prompt_tokens_details": [1]})",
        R"("usage": {"completion_tokens": 18446744073709551615})",
        R"("timings": {"predicted_n": {}, "prompt_n": 1.5})", R"("choices": [5])"}) {
    const LoadAnswer answer =
        AskEvents(Text("a") + "data: {" + usage + "}\n\n" + "data: [DONE]\n\n");
    EXPECT_TRUE(answer.status.ok()) << usage << answer.status.message();
    EXPECT_FALSE(answer.has_usage) << usage;
    EXPECT_EQ(answer.prompt_tokens, 0) << usage;
  }
}

// A server that keeps talking, or keeps silent, is left when the time is over; heads, lines and
// bodies without end are left before they fill memory.
TEST(CompletionClient, NothingGoesOnForEver) {
  const auto endless = [](const std::string& start, const std::string& more) {
    return [=](const ScriptedServer::Caller& caller) {
      if (!caller.Say(start)) return;
      for (int i = 0; i < 2'000'000 && caller.Say(more); ++i) {
        if (more.size() < 100) std::this_thread::sleep_for(milliseconds(5));
      }
    };
  };
  const auto start = std::chrono::steady_clock::now();
  const auto late = [&](const ScriptedServer::Script& script) {
    const LoadAnswer answer = Ask(script, milliseconds(150));
    EXPECT_EQ(answer.status.code(), StatusCode::kDeadlineExceeded) << answer.status.message();
  };
  late([](const auto& caller) {
    char byte;
    (void)::recv(caller.fd, &byte, 1, 0);  // until the client leaves
  });
  late(endless("HTTP/1.1 200 OK\r\nA: ", "x"));
  late(endless("HTTP/1.1 200 OK\r\n\r\n", ": ping\n\n"));
  late(endless("HTTP/1.1 200 OK\r\n\r\n", Text("a")));
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(4000));
  const std::string much(1 << 16, 'x');
  EXPECT_THAT(Ask(endless("HTTP/1.1 200 OK\r\nA: ", much)).status.message(), HasSubstr("too long"));
  EXPECT_THAT(Ask(endless("HTTP/1.1 200 OK\r\n\r\ndata: ", much)).status.message(),
              HasSubstr("too long"));
  EXPECT_THAT(Ask(endless("HTTP/1.1 500 No\r\n\r\n", much)).status.message(),
              HasSubstr("too long"));
  EXPECT_THAT(
      Ask(endless("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", much)).status.message(),
      HasSubstr("chunks"));
}

TEST(CompletionClient, AsksWhatAServerIs) {
  const ScriptedServer server([](const auto& caller) {
    EXPECT_EQ(caller.line, "GET /v1/models HTTP/1.1");
    EXPECT_THAT(caller.head, HasSubstr("Authorization: Bearer key\r\n"));
    caller.Say(
        "HTTP/1.1 200 OK\r\n\r\n"
        R"({"data": [{"id": "m", "owned_by": "vllm"}, {"id": "other"}]})");
  });
  ServerAddress address = server.address();
  address.api_key = "key";
  const auto info = AskServer(address);
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(info->model, "m");
  EXPECT_EQ(info->owner, "vllm");
  for (const char* reply : {"[]", R"({"data": 5})", R"({"data": [5]})", R"({"data": []})"}) {
    const ScriptedServer odd(
        [&](const auto& caller) { caller.Say(std::string("HTTP/1.1 200 OK\r\n\r\n") + reply); });
    const auto none = AskServer(odd.address());
    ASSERT_TRUE(none.has_value()) << reply;
    EXPECT_EQ(none->model, "") << reply;
  }
}

}  // namespace
}  // namespace oscar
