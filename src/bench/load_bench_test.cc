#include "bench/load_bench.h"

#include <gtest/gtest.h>

#include "server/server_fixture.h"

namespace oscar {
namespace {

using server::FakeEngine;
using server::Ids;
using server::Says;
using server::TestServer;

TEST(LoadBench, ReadsAddresses) {
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

TEST(LoadBench, ReadsMetrics) {
  const auto samples =
      ParseMetrics("# HELP a b\n# TYPE a gauge\na 1.5\nb{x=\"y z\"} 2\nc NaN?\n\nd 3");
  EXPECT_EQ(samples.at("a"), 1.5);
  EXPECT_EQ(samples.at("b{x=\"y z\"}"), 2.0);
  EXPECT_EQ(samples.at("d"), 3.0);
  EXPECT_EQ(samples.count("c"), 0u);
}

TEST(LoadBench, CountsWhatClientsSee) {
  TestServer server(Says("one two three four five six seven", /*token_delay_ms=*/2));
  ServerAddress address;
  address.port = server.http->port();
  LoadOptions options;
  options.clients = 4;
  options.requests = 10;
  options.prompt_tokens = 20;
  options.shared_tokens = 30;
  options.max_tokens = 9;
  options.vocab_size = 4096;
  int answers = 0;
  std::mutex mutex;
  const auto report = RunLoad(address, options, [&] {
    const std::lock_guard lock(mutex);
    ++answers;
  });
  ASSERT_TRUE(report.has_value()) << report.error().ToString();
  EXPECT_EQ(answers, 10);
  EXPECT_EQ(report->answered, 10) << report->first_error;
  EXPECT_EQ(report->failed, 0);
  // The end token is ignored, so that each answer has as many as were asked for.
  EXPECT_NEAR(report->output_tokens_per_second * report->seconds, 10.0 * 9.0, 1e-6);
  EXPECT_NEAR(report->input_tokens_per_second * report->seconds, 10.0 * 50.0, 1e-6);
  EXPECT_NEAR(report->cached_share, 3.0 / 50.0, 1e-9);  // the fake engine always finds three
  EXPECT_GT(report->first_token_p50, 0.0);
  EXPECT_GE(report->first_token_p95, report->first_token_p50);
  EXPECT_GT(report->per_token_p50, 0.001);
  EXPECT_EQ(report->kv_budget_bytes, 1000.0);
  // Eleven: the shared prefix was sent once before. Prompts share it and nothing else.
  const auto requests = server.engine.requests();
  ASSERT_EQ(requests.size(), 11u);
  for (size_t i = 1; i < requests.size(); ++i) {
    ASSERT_EQ(requests[i].prompt.size(), 50u);
    EXPECT_TRUE(std::equal(requests[i].prompt.begin(), requests[i].prompt.begin() + 30,
                           requests[0].prompt.begin()));
    EXPECT_NE(requests[i].prompt, requests[i == 1 ? 2 : 1].prompt);
  }
}

TEST(LoadBench, TellsFailuresApart) {
  ServerAddress nobody;
  nobody.port = 1;
  EXPECT_FALSE(StreamCompletion(nobody, "{}").status.ok());
  EXPECT_FALSE(HttpGet(nobody, "/metrics").has_value());

  TestServer server([](const EngineRequest&) {
    FakeEngine::Script script;
    script.tokens = Ids("a b c");
    script.fail_after = 1;
    script.failure = Internal("a fault");
    return script;
  });
  ServerAddress address;
  address.port = server.http->port();
  const LoadAnswer refused = StreamCompletion(address, R"({"prompt": 5, "stream": true})");
  EXPECT_NE(refused.status.message().find("HTTP 400"), std::string::npos)
      << refused.status.message();
  const LoadAnswer broken = StreamCompletion(address, R"({"prompt": "x", "stream": true})");
  EXPECT_FALSE(broken.status.ok());
  LoadOptions options;
  options.requests = 2;
  const auto report = RunLoad(address, options);
  ASSERT_TRUE(report.has_value());
  EXPECT_EQ(report->failed, 2);
  EXPECT_FALSE(report->first_error.empty());
  EXPECT_FALSE(HttpGet(address, "/nothing").has_value());
}

}  // namespace
}  // namespace oscar
