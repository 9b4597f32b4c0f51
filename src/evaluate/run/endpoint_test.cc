// Against a server of its own, so that every request is seen.
#include "run/endpoint.h"

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <httplib.h>
#include <unistd.h>

#include <chrono>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "run/endpoint_evaluation.h"
#include "run/eval_items.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class EndpointTest : public testing::Test {
 protected:
  void SetUp() override {
    server_.Get("/v1/models", [this](const httplib::Request&, httplib::Response& response) {
      response.set_content(models_, "application/json");
    });
    server_.Post("/v1/chat/completions", [this](const httplib::Request& request,
                                                httplib::Response& response) {
      const json body = json::parse(request.body);
      const std::lock_guard lock(mutex_);
      requests_.push_back(body);
      if (failures_ > 0 || (fail_after_ > 0 && requests_.size() > fail_after_)) {
        --failures_;
        response.status = 503;
        return;
      }
      const std::string prompt = body["messages"].back()["content"];
      if (prompt == refused_) {
        response.status = 400;
        response.set_content("{\"error\": \"too long\"}", "application/json");
        return;
      }
      if (!raw_reply_.empty()) {
        response.set_content(raw_reply_, "application/json");
        return;
      }
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
  size_t fail_after_ = 0;  // requests that are answered; 0: all
  std::string refused_;    // a prompt that is answered with 400
  std::string raw_reply_;  // in place of an answer
  std::string models_ = R"({"data": [{"id": "peer"}]})";
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

TEST_F(EndpointTest, WhatIsNoAnswerIsNotScored) {
  for (const char* message : {R"(null)", R"("4")", R"({"content": ["4"]})", R"({"content": 4})"}) {
    raw_reply_ = fmt::format(R"({{"choices": [{{"message": {}}}]}})", message);
    const auto result = EvaluateEndpoint(options_, endpoint_);
    ASSERT_FALSE(result.has_value()) << message;
    EXPECT_NE(result.error().message().find("an answer without text"), std::string::npos)
        << message;
  }
  // Cut short while it thought.
  raw_reply_ = R"({"choices": [{"message": {"content": null, "reasoning_content": "hm"}}],
                   "usage": {"prompt_tokens": -1, "completion_tokens": 18446744073709551615}})";
  const auto result = EvaluateEndpoint(options_, endpoint_);
  ASSERT_TRUE(result.has_value()) << result.error().ToString();
  EXPECT_EQ(*result->methods[0].tasks.at("sums").answer, 0);
  EXPECT_EQ(result->methods[0].tasks.at("sums").mean_tokens, 0);
}

TEST_F(EndpointTest, AnAnswerWithoutEndIsCut) {
  constexpr size_t kBlock = 1 << 20;
  int blocks = 0;
  server_.Get("/endless/v1/models", [&](const httplib::Request&, httplib::Response& response) {
    response.set_chunked_content_provider("application/json", [&](size_t, httplib::DataSink& sink) {
      if (++blocks == 256) {
        sink.done();
        return true;
      }
      const std::string block(kBlock, ' ');
      return sink.write(block.data(), block.size());
    });
  });
  endpoint_.url += "/endless";
  const auto result = Endpoint::Connect(endpoint_);
  ASSERT_FALSE(result.has_value());
  EXPECT_NE(result.error().message().find("more than"), std::string::npos)
      << result.error().message();
}

// The key would go along.
TEST_F(EndpointTest, DoesNotFollowToAnotherAddress) {
  server_.Get("/moved/v1/models", [&](const httplib::Request&, httplib::Response& response) {
    response.set_redirect("http://127.0.0.1:" + std::to_string(port_) + "/v1/models");
  });
  endpoint_.url += "/moved";
  const auto result = Endpoint::Connect(endpoint_);
  ASSERT_FALSE(result.has_value());
  EXPECT_NE(result.error().message().find("/v1/models; give --endpoint that address"),
            std::string::npos)
      << result.error().message();
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

// A request that fails for good must not raise a score: it is wrong until it is answered.
TEST_F(EndpointTest, FailedRequestsCountAsWrongAndAreAskedAgain) {
  refused_ = "3+3?";
  const auto lost = EvaluateEndpoint(options_, endpoint_);
  ASSERT_TRUE(lost.has_value()) << lost.error().ToString();
  const TaskScore& score = lost->methods[0].tasks.at("sums");
  EXPECT_EQ(*score.answer, 50);  // not 100
  EXPECT_EQ(score.items, 2);
  EXPECT_EQ(score.failed, 1);
  ASSERT_EQ(lost->warnings.size(), 1u);
  EXPECT_NE(lost->warnings[0].find("1 of 2 requests have no answer"), std::string::npos);
  EXPECT_NE(lost->warnings[0].find("too long"), std::string::npos);
  EXPECT_TRUE(lost->methods[0].is_remote);
  refused_.clear();
  requests_.clear();
  const auto whole = EvaluateEndpoint(options_, endpoint_);
  ASSERT_TRUE(whole.has_value());
  EXPECT_EQ(requests_.size(), 1u);
  EXPECT_EQ(whole->methods[0].Failed(), 0);
  EXPECT_TRUE(whole->warnings.empty());
}

TEST_F(EndpointTest, NoAnswerAtAllIsAnError) {
  failures_ = 1000;
  const auto lost = EvaluateEndpoint(options_, endpoint_);
  ASSERT_FALSE(lost.has_value());
  EXPECT_EQ(lost.error().code(), StatusCode::kUnavailable);
}

// After 2 x parallel items without an answer, at least 8, the server is taken to be gone.
TEST_F(EndpointTest, AServerThatWentAwayIsNotWaitedFor) {
  EvalTask& task = options_.suite.tasks[0];
  for (int i = 0; i < 100; ++i) {
    task.items.push_back(task.items[1]);
    task.items.back().id = std::to_string(i);
  }
  endpoint_.parallel = 1;
  endpoint_.attempts = 1;
  ASSERT_TRUE(EvaluateEndpoint(options_, endpoint_).has_value());
  options_.seed = 3;
  requests_.clear();
  failures_ = 4;  // passes
  EXPECT_EQ(EvaluateEndpoint(options_, endpoint_)->methods[0].Failed(), 4);
  EXPECT_EQ(requests_.size(), 102u);
  requests_.clear();
  options_.seed = 4;
  fail_after_ = 10;
  const auto gone = EvaluateEndpoint(options_, endpoint_);
  ASSERT_TRUE(gone.has_value());
  EXPECT_EQ(requests_.size(), 18u);
  EXPECT_EQ(gone->methods[0].Failed(), 92);
}

// With the tokenizer, texts are cut to what the server's context holds; without, that is said.
TEST_F(EndpointTest, CutsLongTextsWhereTheTokenizerIsKnown) {
  options_.suite.tasks[0].max_input = 200;
  std::string& prompt = options_.suite.tasks[0].items[0].prompt;
  for (int i = 0; i < 300; ++i) prompt += " filler";
  const std::string whole = prompt;
  const auto uncut = EvaluateEndpoint(options_, endpoint_);
  ASSERT_TRUE(uncut.has_value());
  ASSERT_EQ(uncut->warnings.size(), 1u);
  EXPECT_NE(uncut->warnings[0].find("not cut"), std::string::npos);
  options_.model.model = OSCAR_DEMO_MODEL;
  endpoint_.parallel = 1;
  const auto length_sent = [&] {
    requests_.clear();
    EXPECT_TRUE(EvaluateEndpoint(options_, endpoint_)->warnings.empty());
    return requests_.at(0)["messages"].back()["content"].get<std::string>().size();
  };
  const size_t published = length_sent();
  EXPECT_LT(published, whole.size());
  models_ = R"({"data": [{"id": "peer", "max_model_len": 200}]})";
  EXPECT_LT(length_sent(), published);
}

TEST_F(EndpointTest, SendsPenaltiesAndShortDecimals) {
  const auto server = Endpoint::Connect(endpoint_);
  ASSERT_TRUE(server.has_value());
  SamplingOptions sampling;
  sampling.top_p = 0.95f;
  sampling.temperature = 0.6f;
  sampling.repetition_penalty = 1.1f;
  sampling.presence_penalty = 0.3f;
  sampling.frequency_penalty = -0.2f;
  ASSERT_TRUE(server->Complete(options_.suite.tasks[0].items[0], sampling, 5).has_value());
  EXPECT_EQ(requests_[0]["top_p"].dump(), "0.95");
  EXPECT_EQ(requests_[0]["temperature"].dump(), "0.6");
  EXPECT_EQ(requests_[0]["repetition_penalty"].dump(), "1.1");
  EXPECT_EQ(requests_[0]["presence_penalty"].dump(), "0.3");
  EXPECT_EQ(requests_[0]["frequency_penalty"].dump(), "-0.2");
  // Greedy outputs have penalties too, but nothing to sample.
  ASSERT_TRUE(SetSampling(
                  options_.suite,
                  [](SamplingOptions base) {
                    base.repetition_penalty = 1.1f;
                    return base;
                  },
                  0)
                  .ok());
  requests_.clear();
  ASSERT_TRUE(EvaluateEndpoint(options_, endpoint_).has_value());
  EXPECT_EQ(requests_.at(0)["repetition_penalty"].dump(), "1.1");
  EXPECT_EQ(requests_.at(0)["temperature"], 0);
  EXPECT_FALSE(requests_.at(0).contains("top_p"));
  EXPECT_FALSE(requests_.at(0).contains("presence_penalty"));
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
  // With the patience of a run: a server that was never there is not waited for.
  endpoint_.attempts = 8;
  endpoint_.first_pause_seconds = 0.5;
  const auto start = std::chrono::steady_clock::now();
  const std::string here = "127.0.0.1:" + std::to_string(port_);
  for (const auto& [url, say] :
       {std::pair<std::string, std::string>{"http://127.0.0.1:1", "is a server running"},
        {"https://" + here, "http://"}}) {
    endpoint_.url = url;
    const auto refused = Endpoint::Connect(endpoint_);
    ASSERT_FALSE(refused.has_value());
    EXPECT_NE(refused.error().message().find(url + "/v1/models"), std::string::npos);
    EXPECT_NE(refused.error().message().find(say), std::string::npos) << refused.error().message();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

}  // namespace
}  // namespace oscar
