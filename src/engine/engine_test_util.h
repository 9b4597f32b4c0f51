// For tests: an engine with a model and a pool, and what a request came to.
#pragma once

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/fake_model.h"
#include "engine/service.h"

namespace oscar {

struct Answer {
  std::vector<int32_t> tokens;
  std::vector<GeneratedToken> details;
  std::vector<GeneratedToken> prompt_logprobs;
  int64_t cached_tokens = -1;
  bool finished = false;
  FinishReason reason = FinishReason::kStop;
  Status status;
};

// Reads a request to its end.
inline Answer Collect(RequestHandle& handle) {
  using Kind = EngineEvent::Kind;
  Answer answer;
  for (int idle = 0; idle < 600;) {
    EngineEvent event = handle.Next(std::chrono::milliseconds(100));
    switch (event.kind) {
      case Kind::kTimeout:
        ++idle;
        continue;
      case Kind::kStarted:
        EXPECT_EQ(answer.cached_tokens, -1) << "started twice";
        answer.cached_tokens = event.cached_tokens;
        answer.prompt_logprobs = std::move(event.prompt_logprobs);
        break;
      case Kind::kToken:
        EXPECT_GE(answer.cached_tokens, 0) << "a token before the start";
        answer.tokens.push_back(event.token.token);
        answer.details.push_back(std::move(event.token));
        break;
      case Kind::kFinished:
        answer.finished = true;
        answer.reason = event.reason;
        return answer;
      case Kind::kFailed:
        answer.status = event.status;
        return answer;
    }
    idle = 0;
  }
  ADD_FAILURE() << "the request did not end";
  return answer;
}

// Waits for something that another thread is about to do.
inline bool Eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 6000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

struct FakeEngine {
  explicit FakeEngine(uint64_t budget_pages = 4096, const EngineServiceOptions& options = {},
                      const FakeModel::Options& model_options = {}, int num_threads = 1)
      : threads(num_threads),
        model(model_options, threads),
        pool(budget_pages * kOpenPage, model.kv().host_sealer()) {
    model.pool_of_cells = &pool;
    service = MakeEngineService(model, pool, threads, options);
  }
  ~FakeEngine() {
    service.reset();
    EXPECT_EQ(pool.pages_in_use(), 0);
    EXPECT_LE(pool.peak_bytes(), pool.budget());
  }

  std::unique_ptr<RequestHandle> Submit(EngineRequest request) {
    auto handle = service->Submit(std::move(request));
    EXPECT_TRUE(handle.has_value()) << handle.error().ToString();
    return handle.has_value() ? std::move(*handle) : nullptr;
  }
  Answer Ask(EngineRequest request) { return Collect(*Submit(std::move(request))); }
  // The same request in a separate engine.
  static Answer Alone(const EngineRequest& request, const FakeModel::Options& model_options = {}) {
    EngineServiceOptions options;
    options.prefix_cache = false;
    FakeEngine engine(4096, options, model_options);
    return engine.Ask(request);
  }
  bool Idle() const {
    const EngineStats stats = service->Stats();
    return stats.running == 0 && stats.waiting == 0;
  }

  static constexpr uint64_t kOpenPage = 2 * 64 * 64 * 2 * FakeModel::kLayers;  // bytes

  ThreadPool threads;
  FakeModel model;
  PagePool pool;
  std::unique_ptr<EngineService> service;
};

// Varied sampling, so that sampler state shows as well.
inline EngineRequest FakeRequest(uint64_t seed, size_t prompt, int64_t max_tokens) {
  EngineRequest request;
  request.id = fmt::format("r{}", seed);
  request.prompt = FakeTokens(seed, prompt);
  request.max_tokens = max_tokens;
  request.sampling.temperature = seed % 2 == 0 ? 0.0f : 0.8f;
  request.sampling.frequency_penalty = seed % 3 == 0 ? 0.5f : 0.0f;
  request.sampling.repetition_penalty = seed % 5 == 0 ? 1.3f : 1.0f;
  request.sampling.seed = seed;
  return request;
}

}  // namespace oscar
