// The whole server in one process on the demo model, with 100 streams at once and clients that
// leave: for ThreadSanitizer, and for leaks.
#include <gtest/gtest.h>

#include <atomic>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "bench/load_bench.h"
#include "generation/model_host.h"
#include "http/http_server.h"
#include "server/api_server.h"
#include "server/server_fixture.h"

namespace oscar::server {
namespace {

TEST(ServerStress, HundredStreamsAtOnce) {
  SetLogLevel(LogLevel::kOff);
  ModelOptions model;
  model.model = OSCAR_DEMO_MODEL;
  model.kv_memory = uint64_t{48} << 20;  // not enough for all of them: some wait, some give way
  model.num_threads = 2;
  HostOptions host_options;
  host_options.engine.max_running = 128;
  auto host = ModelHost::Prepare(model, host_options);
  ASSERT_TRUE(host.has_value()) << host.error().ToString();
  auto served = (*host)->Load();
  ASSERT_TRUE(served.has_value()) << served.error().ToString();
  ApiServer api{{}};
  HttpOptions http_options;
  http_options.port = 0;
  auto http = HttpServer::Bind(http_options);
  ASSERT_TRUE(http.has_value());
  (*http)->Start(api);
  api.SetModel(*served);
  ServerAddress address;
  address.port = (*http)->port();

  // Besides: clients that leave in the middle, and one that looks at everything.
  std::atomic<bool> stop{false};
  std::vector<std::jthread> others;
  for (int i = 0; i < 8; ++i) {
    others.emplace_back([&, i] {
      for (int n = 0; !stop; ++n) {
        RawClient client((*http)->port());
        const Json body = {{"prompt", "Once upon a time " + std::to_string(i * 1000 + n)},
                           {"max_tokens", 200},
                           {"ignore_eos", true},
                           {"stream", n % 2 == 0}};
        client.Send(TestServer::Head("POST", "/v1/completions", body.dump()));
        if (n % 2 == 0) client.ReadUntil("data: ", 200 * (1 + i));
      }
    });
  }
  others.emplace_back([&] {
    while (!stop) {
      for (const char* path : {"/health", "/metrics", "/v1/oscar/cache", "/props"}) {
        EXPECT_TRUE(HttpGet(address, path).has_value()) << path;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  });
  LoadOptions load;
  load.clients = 100;
  load.requests = 100;
  load.workload.prompt_tokens = 40;
  load.workload.shared_tokens = 70;
  load.workload.max_tokens = 6;
  const auto report = RunLoad(address, load);
  stop = true;
  others.clear();
  ASSERT_TRUE(report.has_value()) << report.error().ToString();
  EXPECT_EQ(report->answered, 100) << report->first_error;
  EXPECT_GT(report->cached_share, 0.0);
  EXPECT_LE(report->most_kv_bytes, report->kv_budget_bytes);
  for (int i = 0; i < 1000 && (*served)->engine->Stats().running > 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  const EngineStats stats = (*served)->engine->Stats();
  EXPECT_EQ(stats.running + stats.waiting, 0);
  EXPECT_EQ(stats.kv_bytes, stats.prefix_bytes);
  EXPECT_GT(stats.cancelled, 0u);
  api.Abort();
  EXPECT_TRUE((*http)->Stop(std::chrono::seconds(20)));
}

}  // namespace
}  // namespace oscar::server
