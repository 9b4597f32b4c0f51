#include "bench/load_bench.h"

#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "bench/scripted_server.h"
#include "server/server_fixture.h"

namespace oscar {
namespace {

using server::FakeEngine;
using server::Ids;
using server::Says;
using server::TestServer;

TEST(LoadBench, ReadsMetrics) {
  const auto samples =
      ParseMetrics("# HELP a b\n# TYPE a gauge\na 1.5\nb{x=\"y z\"} 2\nc NaN?\n\nd 3");
  EXPECT_EQ(samples.at("a"), 1.5);
  EXPECT_EQ(samples.at("b{x=\"y z\"}"), 2.0);
  EXPECT_EQ(samples.at("d"), 3.0);
  EXPECT_EQ(samples.count("c"), 0u);
}

TEST(LoadBench, PercentilesAreThoseOfTheSortedValues) {
  std::vector<double> values;
  for (int i = 100; i >= 0; --i) values.push_back(i * i);
  const Percentiles p = PercentilesOf(values);
  EXPECT_EQ(p.count, 101);
  EXPECT_DOUBLE_EQ(p.mean, 3350.0);
  EXPECT_DOUBLE_EQ(p.p50, 2500.0);
  EXPECT_DOUBLE_EQ(p.p90, 8100.0);
  EXPECT_DOUBLE_EQ(p.p95, 9025.0);
  EXPECT_DOUBLE_EQ(p.p99, 9801.0);
  EXPECT_DOUBLE_EQ(p.max, 10000.0);
  EXPECT_DOUBLE_EQ(PercentilesOf({1.0, 2.0}).p50, 1.5);
  EXPECT_EQ(PercentilesOf({}).count, 0);
}

TEST(LoadBench, CountsWhatClientsSee) {
  TestServer server(Says("one two three four five six seven", /*token_delay_ms=*/2));
  ServerAddress address;
  address.port = server.http->port();
  LoadOptions options;
  options.clients = 4;
  options.requests = 10;
  options.workload.prompt_tokens = 20;
  options.workload.shared_tokens = 30;
  options.workload.max_tokens = 9;
  options.workload.vocab_size = 4096;
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
  EXPECT_NEAR(report->requests_per_second * report->seconds, 10.0, 1e-6);
  EXPECT_NEAR(report->cached_share, 3.0 / 50.0, 1e-9);  // the fake engine always finds three
  EXPECT_EQ(report->short_answers, 0);
  EXPECT_EQ(report->uncounted, 0);
  EXPECT_EQ(report->first_token.count, 10);
  EXPECT_GT(report->first_token.p50, 0.0);
  EXPECT_GE(report->first_token.p99, report->first_token.p50);
  EXPECT_GT(report->per_token.p50, 0.001);
  EXPECT_GE(report->between_tokens.count, 10 * 6);  // a token may have no text of its own
  EXPECT_GE(report->latency.p50, report->first_token.p50 + 8 * 0.001);
  EXPECT_EQ(report->first_token_curve.size(), 101u);
  EXPECT_EQ(report->good_share, 1.0);  // no targets
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

// A scripted answer of `pieces` tokens, `pause` between them.
void Answer(const ScriptedServer::Caller& caller, int pieces, std::chrono::milliseconds pause) {
  if (!caller.SayEvents("")) return;
  for (int i = 0; i < pieces; ++i) {
    std::this_thread::sleep_for(pause);
    if (!caller.Say("data: {\"choices\": [{\"text\": \"x\"}]}\n\n")) return;
  }
  caller.Say("data: {\"choices\": [], \"usage\": {\"prompt_tokens\": 8, \"completion_tokens\": " +
             std::to_string(pieces) + "}}\n\ndata: [DONE]\n\n");
}

bool IsCompletion(const ScriptedServer::Caller& caller) {
  if (caller.line.starts_with("POST /v1/completions ")) return true;
  caller.Say("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n");
  return false;
}

// Half of the answers are slow to begin, some are slow throughout, one is dropped.
TEST(LoadBench, GoodAnswersKeepToBothTargets) {
  std::atomic<int> number{0};
  const ScriptedServer server([&](const auto& caller) {
    if (!IsCompletion(caller)) return;
    switch (number++ % 4) {
      case 0:
        return Answer(caller, 4, std::chrono::milliseconds(1));
      case 1: {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        return Answer(caller, 4, std::chrono::milliseconds(1));
      }
      case 2:
        return Answer(caller, 4, std::chrono::milliseconds(120));
      default:
        caller.SayEvents("data: {\"choices\": [{\"text\": \"x\"}]}\n\n");
    }
  });
  LoadOptions options;
  options.requests = 8;
  options.workload.max_tokens = 5;
  options.target_first_token = 0.2;
  options.target_per_token = 0.06;
  const auto report = RunLoad(server.address(), options);
  ASSERT_TRUE(report.has_value());
  EXPECT_EQ(report->answered, 6);
  EXPECT_EQ(report->failed, 2);
  EXPECT_NE(report->first_error.find("without [DONE]"), std::string::npos) << report->first_error;
  EXPECT_EQ(report->short_answers, 6);  // four of five tokens: ignore_eos was not known
  EXPECT_DOUBLE_EQ(report->good_share, 0.25);
  EXPECT_NEAR(report->good_per_second * report->seconds, 2.0, 1e-9);
  EXPECT_EQ(report->most_running, -1.0);  // no metrics
}

// With a rate, requests come whether or not others are answered.
TEST(LoadBench, ArrivalsDoNotWaitForAnswers) {
  std::atomic<int> open{0}, most{0};
  const ScriptedServer server([&](const auto& caller) {
    if (!IsCompletion(caller)) return;
    const int now = ++open;
    int seen = most.load();
    while (now > seen && !most.compare_exchange_weak(seen, now)) {
    }
    Answer(caller, 2, std::chrono::milliseconds(250));
    --open;
  });
  LoadOptions options;
  options.requests = 12;
  options.rate = INFINITY;
  const auto all_at_once = RunLoad(server.address(), options);
  ASSERT_TRUE(all_at_once.has_value());
  EXPECT_EQ(all_at_once->answered, 12) << all_at_once->first_error;
  EXPECT_EQ(most, 12);
  EXPECT_LT(all_at_once->seconds, 12 * 0.5);
  options.rate = 20.0;
  const double last = Arrivals(20.0, 12, options.workload.seed).back();
  const auto spread = RunLoad(server.address(), options);
  ASSERT_TRUE(spread.has_value());
  EXPECT_GE(spread->seconds, last + 0.5);
  EXPECT_EQ(server.bodies().size(), 24u);
}

// Requests arrive from the conversation's first token to its last, and no longer.
TEST(LoadBench, ALongConversationBesideArrivals) {
  std::atomic<bool> has_begun{false}, has_ended{false};
  std::atomic<int> outside{0};
  const ScriptedServer server([&](const auto& caller) {
    if (!IsCompletion(caller)) return;
    if (caller.body.find("\"max_tokens\":40") != std::string::npos) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      has_begun = true;
      Answer(caller, 40, std::chrono::milliseconds(10));
      has_ended = true;
      return;
    }
    outside += has_begun ? 0 : 1;
    Answer(caller, 2, std::chrono::milliseconds(1));
  });
  LoadOptions options;
  options.requests = 100'000;  // never that many
  options.clients = 2;
  options.workload.prompt_tokens = 8;
  options.beside_prompt_tokens = 700;
  options.beside_max_tokens = 40;
  const auto report = RunLoad(server.address(), options);
  ASSERT_TRUE(report.has_value()) << report.error().ToString();
  ASSERT_TRUE(report->beside.has_value());
  EXPECT_EQ(report->beside->completion_tokens, 40);
  EXPECT_EQ(report->beside->between_tokens.count, 39);
  EXPECT_GE(report->beside->between_tokens.p50, 0.008);
  EXPECT_GE(report->beside->first_token, 0.2);
  EXPECT_EQ(outside, 0);
  EXPECT_GT(report->answered, 4);
  EXPECT_LT(report->answered, 10'000);
  EXPECT_EQ(report->failed, 0) << report->first_error;
  // A conversation that fails is an error, not a load without one.
  const ScriptedServer broken([&](const auto& caller) {
    if (IsCompletion(caller)) caller.Say("HTTP/1.1 400 No\r\n\r\n{\"error\": \"too long\"}");
  });
  const auto none = RunLoad(broken.address(), options);
  ASSERT_FALSE(none.has_value());
  EXPECT_NE(none.error().message().find("too long"), std::string::npos);
}

TEST(LoadBench, ReadsFourServersMetrics) {
  for (const char* text :
       {"oscar_requests_running 3\noscar_preemptions_total 0\n",
        "vllm:num_requests_running{engine=\"0\"} 2\nvllm:num_requests_running{engine=\"1\"} 1\n",
        "sglang:num_running_reqs{tp=\"0\"} 3\n", "llamacpp:requests_processing 3\n"}) {
    const ScriptedServer server([&](const auto& caller) {
      if (caller.line.starts_with("GET /metrics ")) {
        caller.Say(std::string("HTTP/1.1 200 OK\r\n\r\n") + text);
      } else {
        Answer(caller, 2, std::chrono::milliseconds(1));
      }
    });
    const auto report = RunLoad(server.address(), {});
    ASSERT_TRUE(report.has_value());
    EXPECT_EQ(report->most_running, 3.0) << text;
  }
}

TEST(LoadBench, TellsFailuresApart) {
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
