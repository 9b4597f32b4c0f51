// Hostile and merely odd traffic: every answer is the standard error object, nothing is held for
// long, nobody else is kept waiting.
#include "http/http_server.h"

#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "server/server_fixture.h"

namespace oscar::server {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

HttpOptions Quick() {
  HttpOptions options;
  options.header_timeout = milliseconds(400);
  options.body_timeout = milliseconds(400);
  options.keep_alive_timeout = milliseconds(400);
  options.max_body_bytes = 1 << 20;
  options.max_header_bytes = 8 << 10;
  return options;
}

RawReply Send(TestServer& server, const std::string& bytes) {
  RawClient client(server.http->port());
  client.Send(bytes);
  RawReply reply = client.ReadReply();
  EXPECT_TRUE(client.WaitClosed()) << "still open after: " << reply.head;
  return reply;
}

void ExpectErrorObject(const RawReply& reply, int status) {
  EXPECT_EQ(reply.status, status) << reply.head << reply.body;
  EXPECT_TRUE(reply.json().is_object() && reply.json()["error"]["message"].is_string())
      << reply.head << reply.body;
}

TEST(HttpServer, PortInUseIsAClearError) {
  TestServer server(Says("x"));
  HttpOptions options;
  options.port = server.http->port();
  const auto second = HttpServer::Bind(options);
  ASSERT_FALSE(second.has_value());
  EXPECT_THAT(second.error().message(), HasSubstr("in use"));
  options.host = "no such host";
  EXPECT_FALSE(HttpServer::Bind(options).has_value());
}

TEST(HttpServer, KeepAliveServesManyRequests) {
  TestServer server(Says("hello"));
  RawClient client(server.http->port());
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(client.Send(TestServer::Head("GET", "/health", "")));
    EXPECT_EQ(client.ReadReply().status, 200);
    ASSERT_TRUE(
        client.Send(TestServer::Head("POST", "/v1/chat/completions", TestServer::Chat().dump())));
    EXPECT_EQ(client.ReadReply().status, 200);
    ASSERT_TRUE(client.Send(TestServer::Head("POST", "/v1/chat/completions",
                                             TestServer::Chat({{"stream", true}}).dump())));
    EXPECT_THAT(client.ReadReply().body, HasSubstr("[DONE]"));
  }
}

TEST(HttpServer, PipelinedRequestsAreAnsweredInOrder) {
  TestServer server(Says("hello"));
  RawClient client(server.http->port());
  client.Send(TestServer::Head("GET", "/health", "") + TestServer::Head("GET", "/nope", "") +
              TestServer::Head("GET", "/health", ""));
  EXPECT_EQ(client.ReadReply().status, 200);
  EXPECT_EQ(client.ReadReply().status, 404);
  EXPECT_EQ(client.ReadReply().status, 200);
}

TEST(HttpServer, OversizedBodies) {
  TestServer server(Says("x"), {}, Quick());
  const std::string head =
      "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
      "Content-Type: application/json\r\n";
  // Claimed and sent: the client reads the answer although it is still sending.
  {
    RawClient client(server.http->port());
    const std::string body((1 << 20) + 1, 'x');
    client.Send(head + "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body);
    ExpectErrorObject(client.ReadReply(), 413);
  }
  // Claimed only: nobody waits for a terabyte.
  const auto begin = std::chrono::steady_clock::now();
  RawClient client(server.http->port());
  client.Send(head + "Content-Length: 1000000000000\r\n\r\n");
  ExpectErrorObject(client.ReadReply(), 413);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(1000));
  // Chunks without end.
  RawClient chunks(server.http->port());
  chunks.Send(head + "Transfer-Encoding: chunked\r\n\r\n");
  const std::string chunk = "10000\r\n" + std::string(0x10000, 'y') + "\r\n";
  for (int i = 0; i < 40 && chunks.Send(chunk); ++i) {
  }
  ExpectErrorObject(chunks.ReadReply(), 413);
}

TEST(HttpServer, ChunkedBodiesWork) {
  TestServer server(Says("hello"));
  RawClient client(server.http->port());
  const std::string body = TestServer::Chat().dump();
  client.Send(
      "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
      "Content-Type: application/json\r\n\r\n");
  for (const char c : body) client.Send("1\r\n" + std::string(1, c) + "\r\n");
  client.Send("0\r\n\r\n");
  EXPECT_EQ(client.ReadReply().status, 200);
}

TEST(HttpServer, SlowAndHalfOpenClientsAreLetGo) {
  TestServer server(Says("x"), {}, Quick());
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < 50; ++i) clients.push_back(std::make_unique<RawClient>(server.http->port()));
  for (size_t i = 0; i < clients.size(); ++i) {
    if (i % 3 == 0) clients[i]->Send("GET /hea");  // an unfinished head
    if (i % 3 == 1) {                              // an unfinished body
      clients[i]->Send("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{");
    }
  }
  // Others are served at once meanwhile.
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(server.Call("GET", "/health").status, 200);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(1000));
  ExpectErrorObject(clients[1]->ReadReply(), 408);
  for (auto& client : clients) EXPECT_TRUE(client->WaitClosed());
  for (int i = 0; i < 500 && server.http->num_connections() > 0; ++i) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_EQ(server.http->num_connections(), 0);
}

TEST(HttpServer, ATricklingHeadDoesNotResetItsDeadline) {
  TestServer server(Says("x"), {}, Quick());
  RawClient client(server.http->port());
  const auto begin = std::chrono::steady_clock::now();
  client.Send("GET /health HTTP/1.1\r\n");
  while (std::chrono::steady_clock::now() - begin < milliseconds(5000) && client.Send("a: b\r\n")) {
    if (client.ReadUntil("\r\n\r\n", 50)) break;
  }
  ExpectErrorObject(client.ReadReply(), 408);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(2000));
}

TEST(HttpServer, StoppingCutsOffClientsThatDoNotEnd) {
  TestServer server(Says("x"));
  RawClient head(server.http->port()), body(server.http->port());
  head.Send("GET /hea");
  body.Send("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{\"pro");
  while (server.http->num_connections() < 2) std::this_thread::sleep_for(milliseconds(1));
  std::this_thread::sleep_for(milliseconds(50));
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_FALSE(server.http->Stop(milliseconds(100)));
  EXPECT_TRUE(server.http->Stop(milliseconds(4000)));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(4));
  EXPECT_TRUE(head.WaitClosed());
  EXPECT_TRUE(body.WaitClosed());
}

TEST(HttpServer, MalformedRequests) {
  TestServer server(Says("x"), {}, Quick());
  ExpectErrorObject(Send(server, "garbage\r\n\r\n"), 400);
  ExpectErrorObject(Send(server, "GET\r\n\r\n"), 400);
  ExpectErrorObject(Send(server, "BREW /pot HTTP/1.1\r\n\r\n"), 400);
  ExpectErrorObject(Send(server, std::string(200, '\0') + "\r\n\r\n"), 400);
  ExpectErrorObject(Send(server, "GET /" + std::string(100'000, 'a') + " HTTP/1.1\r\n\r\n"), 431);
  ExpectErrorObject(
      Send(server, "GET /health HTTP/1.1\r\nx: " + std::string(100'000, 'a') + "\r\n\r\n"), 431);
  std::string many = "GET /health HTTP/1.1\r\n";
  for (int i = 0; i < 500; ++i) many += "a" + std::to_string(i) + ": b\r\n";
  ExpectErrorObject(Send(server, many + "\r\n"), 431);
  const std::string post = "POST /v1/completions HTTP/1.1\r\nHost: x\r\n";
  ExpectErrorObject(Send(server, post + "\r\n"), 411);
  ExpectErrorObject(Send(server, post + "Content-Length: -1\r\n\r\n"), 400);
  ExpectErrorObject(Send(server, post + "Content-Length: 0x10\r\n\r\n"), 400);
  ExpectErrorObject(Send(server, post + "Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"), 400);
  ExpectErrorObject(
      Send(server, post + "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}"), 400);
  ExpectErrorObject(Send(server, post + "Transfer-Encoding: gzip\r\n\r\n"), 400);
  ExpectErrorObject(Send(server, post + "Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}"),
                    415);
  EXPECT_EQ(server.Call("GET", "/health").status, 200);
}

// The body of a refused request must not be read as the next request.
TEST(HttpServer, RefusedBodiesAreNotRequests) {
  TestServer server(Says("x"), {}, Quick());
  const std::string smuggled = "GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n";
  for (const std::string& head :
       {std::string("POST /nope HTTP/1.1\r\n"), std::string("GET /health HTTP/1.1\r\n")}) {
    RawClient client(server.http->port());
    client.Send(
        fmt::format("{}Host: x\r\nContent-Length: {}\r\n\r\n{}", head, smuggled.size(), smuggled));
    client.ReadReply();
    EXPECT_TRUE(client.WaitClosed());
    EXPECT_EQ(client.buffer().find("HTTP/1.1"), std::string::npos);
  }
}

TEST(HttpServer, CompressionAndRangesAreLeftAlone) {
  TestServer server(Says("hello hello hello hello"));
  const RawReply reply =
      server.Call("POST", "/v1/chat/completions", TestServer::Chat({{"stream", true}}).dump(),
                  "Accept-Encoding: gzip, br\r\nRange: bytes=0-1\r\n");
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(reply.Header("Content-Encoding"), "");
  EXPECT_THAT(reply.body, HasSubstr("[DONE]"));
  EXPECT_EQ(server.Call("GET", "/health", "", "Range: bytes=0-1\r\n").body, "{\"status\":\"ok\"}");
}

TEST(HttpServer, Http10StreamsUntilTheConnectionCloses) {
  TestServer server(Says("hello"));
  RawClient client(server.http->port());
  const std::string body = TestServer::Chat({{"stream", true}}).dump();
  client.Send("POST /v1/chat/completions HTTP/1.0\r\nContent-Length: " +
              std::to_string(body.size()) + "\r\n\r\n" + body);
  EXPECT_TRUE(client.WaitClosed());
  EXPECT_THAT(client.buffer(), HasSubstr("data: [DONE]\n\n"));
  EXPECT_THAT(client.buffer(), testing::Not(HasSubstr("chunked")));
}

TEST(HttpServer, TooManyConnectionsAreToldSo) {
  HttpOptions options = Quick();
  options.max_connections = 4;
  TestServer server(Says("x"), {}, options);
  std::vector<std::unique_ptr<RawClient>> idle;
  for (int i = 0; i < 4; ++i) idle.push_back(std::make_unique<RawClient>(server.http->port()));
  while (server.http->num_connections() < 4) std::this_thread::sleep_for(milliseconds(5));
  RawClient fifth(server.http->port());
  ExpectErrorObject(fifth.ReadReply(), 503);
  for (auto& client : idle) EXPECT_TRUE(client->WaitClosed());  // idle ones make room
  EXPECT_EQ(server.Call("GET", "/health").status, 200);
}

// A client that stops reading is let go once the socket's buffers are full, and its request ends.
TEST(HttpServer, AClientThatDoesNotReadIsCancelled) {
  HttpOptions options = Quick();
  options.write_timeout = milliseconds(300);
  TestServer server(
      [](const EngineRequest&) {
        FakeEngine::Script script;
        script.tokens = Ids("words without end ");
        script.endless = true;
        return script;
      },
      {}, options);
  RawClient client(server.http->port(), /*receive_buffer=*/4096);
  client.Send(TestServer::Head("POST", "/v1/chat/completions",
                               TestServer::Chat({{"stream", true},
                                                 {"ignore_eos", true},
                                                 {"n", 8},
                                                 {"logprobs", true},
                                                 {"top_logprobs", 20}})
                                   .dump()));
  for (int i = 0; i < 12000 && server.engine.requests().empty(); ++i) {
    std::this_thread::sleep_for(milliseconds(5));
  }
  for (int i = 0; i < 12000 && server.engine.running() > 0; ++i) {
    std::this_thread::sleep_for(milliseconds(5));
  }
  EXPECT_EQ(server.engine.running(), 0);
  EXPECT_GT(server.engine.cancelled(), 0);
}

}  // namespace
}  // namespace oscar::server
