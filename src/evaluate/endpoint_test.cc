// Against a server of its own, so that every request is seen.
#include "evaluate/endpoint.h"

#include <gtest/gtest.h>
#include <httplib.h>
#include <unistd.h>

#include <chrono>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "evaluate/endpoint_evaluation.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class EndpointTest : public testing::Test {
 protected:
  void SetUp() override {
    server_.Get("/v1/models", [](const httplib::Request&, httplib::Response& response) {
      response.set_content(R"({"data": [{"id": "peer"}]})", "application/json");
    });
    server_.Post("/v1/chat/completions", [this](const httplib::Request& request,
                                                httplib::Response& response) {
      const json body = json::parse(request.body);
      const std::lock_guard lock(mutex_);
      requests_.push_back(body);
      if (failures_ > 0) {
        --failures_;
        response.status = 503;
        return;
      }
      const std::string prompt = body["messages"].back()["content"];
      const std::string text = prompt == "2+2?" ? "<think>hm</think>4" : "no idea";
      response.set_content(json{{"choices", {{{"message", {{"content", text}}}}}},
                                {"usage", {{"prompt_tokens", 7}, {"completion_tokens", 3}}}}
                               .dump(),
                           "application/json");
    });
    port_ = server_.bind_to_any_port("127.0.0.1");
    thread_ = std::thread([this] { server_.listen_after_bind(); });
    while (!server_.is_running()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    directory_ = fs::temp_directory_path() / ("oscar_endpoint_test_" + std::to_string(getpid()));
    endpoint_.url = "http://127.0.0.1:" + std::to_string(port_);
    endpoint_.first_pause_seconds = 0.01;
    endpoint_.attempts = 3;
    EvalTask task;
    task.name = "sums";
    for (const auto& [prompt, answer] : {std::pair{"2+2?", "4"}, std::pair{"3+3?", "6"}}) {
      EvalItem item;
      item.id = prompt;
      item.prompt = prompt;
      item.answer = answer;
      item.max_tokens = 16;
      task.items.push_back(std::move(item));
    }
    options_.suite.tasks.push_back(std::move(task));
    options_.out = directory_;
    options_.show_progress = false;
  }
  void TearDown() override {
    server_.stop();
    thread_.join();
    fs::remove_all(directory_);
  }

  httplib::Server server_;
  std::thread thread_;
  std::mutex mutex_;
  std::vector<json> requests_;
  int failures_ = 0;
  int port_ = 0;
  fs::path directory_;
  EndpointOptions endpoint_;
  EvalOptions options_;
};

TEST_F(EndpointTest, ScoresAndResumes) {
  const auto first = EvaluateEndpoint(options_, endpoint_);
  ASSERT_TRUE(first.has_value()) << first.error().ToString();
  EXPECT_EQ(first->model, "peer");
  EXPECT_EQ(*first->methods[0].tasks.at("sums").answer, 50);
  EXPECT_FALSE(first->methods[0].tasks.at("sums").strict.has_value());
  ASSERT_EQ(requests_.size(), 2u);
  EXPECT_EQ(requests_[0]["temperature"], 0);
  EXPECT_EQ(requests_[0]["max_tokens"], 16);
  const auto again = EvaluateEndpoint(options_, endpoint_);
  EXPECT_EQ(ResultsToJson(*again), ResultsToJson(*first));
  EXPECT_EQ(requests_.size(), 2u);  // nothing was asked twice
}

TEST_F(EndpointTest, RepeatsFailedRequestsAndNamesLostOnes) {
  failures_ = 2;
  endpoint_.parallel = 1;
  const auto good = EvaluateEndpoint(options_, endpoint_);
  ASSERT_TRUE(good.has_value()) << good.error().ToString();
  EXPECT_TRUE(good->warnings.empty());
  EXPECT_EQ(requests_.size(), 4u);
  failures_ = 3;
  options_.seed = 9;  // other settings: asked again
  const auto lost = EvaluateEndpoint(options_, endpoint_);
  ASSERT_TRUE(lost.has_value());
  ASSERT_EQ(lost->warnings.size(), 1u);
  EXPECT_NE(lost->warnings[0].find("503"), std::string::npos) << lost->warnings[0];
}

TEST_F(EndpointTest, SendsSamplingSystemAndPrefix) {
  const auto server = Endpoint::Connect(endpoint_);
  ASSERT_TRUE(server.has_value());
  EvalItem item = options_.suite.tasks[0].items[0];
  item.system = "Be brief.";
  item.prefix = " So";
  SamplingOptions sampling;
  sampling.top_k = 40;
  const auto reply = server->Complete(item, sampling, 5);
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(reply->output_tokens, 3);
  EXPECT_EQ(requests_[0]["messages"][0]["content"], "Be brief.");
  EXPECT_EQ(requests_[0]["messages"][1]["content"], "2+2? So");
  EXPECT_EQ(requests_[0]["top_k"], 40);
  EXPECT_EQ(requests_[0]["seed"], 5);
}

TEST_F(EndpointTest, RefusesWhatIsNoServer) {
  endpoint_.url = "localhost:1";
  EXPECT_FALSE(Endpoint::Connect(endpoint_).has_value());
  endpoint_.url = "http://127.0.0.1:1";
  endpoint_.attempts = 1;
  const auto refused = Endpoint::Connect(endpoint_);
  ASSERT_FALSE(refused.has_value());
  EXPECT_NE(refused.error().message().find("127.0.0.1:1/v1/models"), std::string::npos);
}

}  // namespace
}  // namespace oscar
