// For tests: an engine without a model. Says what it is told, at the speed it is told, and keeps
// books on who was cancelled. One thread rings for everybody.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/service.h"

namespace oscar::server {

class FakeEngine final : public EngineService {
 public:
  struct Script {
    std::vector<int32_t> tokens;  // said in turn, then a stop token if the request has one
    std::chrono::milliseconds start_delay{0}, token_delay{0};
    int64_t cached_tokens = 0;
    // Fails after this many tokens; negative: never.
    int64_t fail_after = -1;
    Status failure;
    bool endless = false;  // repeats the tokens
  };
  using Author = std::function<Script(const EngineRequest&)>;
  explicit FakeEngine(Author author, int64_t context = 1024)
      : author_(std::move(author)), context_(context) {
    bell_ = std::jthread([this](const std::stop_token& stop) { Ring(stop); });
  }

  Result<std::unique_ptr<RequestHandle>> Submit(EngineRequest request) override {
    std::lock_guard lock(mutex_);
    if (draining_) return Unexpected(Unavailable("draining"));
    if (!refuse_.ok()) return Unexpected(refuse_);
    requests_.push_back(request);
    ++running_;
    auto handle = std::make_unique<Handle>(*this, std::move(request));
    handles_.insert(handle.get());
    return handle;
  }
  EngineStats Stats() const override {
    EngineStats stats;
    stats.running = running_;
    stats.cancelled = static_cast<uint64_t>(cancelled_.load());
    stats.kv_budget_bytes = 1000;
    return stats;
  }
  std::vector<SequenceInfo> Sequences() const override {
    std::lock_guard lock(mutex_);
    std::vector<SequenceInfo> infos;
    for (const EngineRequest& request : requests_) {
      SequenceInfo& info = infos.emplace_back();
      info.request_id = request.id;
      info.cache_salt = request.cache_salt;
      info.running = true;
      info.usage.tokens = 130;
      info.pages = "Sqr";
    }
    return infos;
  }
  Status Health() const override {
    std::lock_guard lock(mutex_);
    return health_;
  }
  void Drain() override {
    std::lock_guard lock(mutex_);
    draining_ = true;
  }
  bool Drained() const override { return running_ == 0; }
  int64_t max_context() const override { return context_; }

  void Refuse(Status status) {
    std::lock_guard lock(mutex_);
    refuse_ = std::move(status);
  }
  void SetHealth(Status status) {
    std::lock_guard lock(mutex_);
    health_ = std::move(status);
  }
  std::vector<EngineRequest> requests() const {
    std::lock_guard lock(mutex_);
    return requests_;
  }
  int64_t running() const { return running_; }
  int64_t cancelled() const { return cancelled_; }

 private:
  using Clock = std::chrono::steady_clock;

  class Handle final : public RequestHandle {
   public:
    Handle(FakeEngine& engine, EngineRequest request)
        : engine_(engine), request_(std::move(request)), script_(engine.author_(request_)) {
      next_ = Clock::now() + script_.start_delay;
      limit_ = request_.max_tokens > 0
                   ? request_.max_tokens
                   : engine_.context_ - static_cast<int64_t>(request_.prompt.size());
    }
    ~Handle() override {
      {
        std::lock_guard lock(engine_.mutex_);
        engine_.handles_.erase(this);
      }
      Cancel();
    }
    // Something is there to be taken.
    bool Due(Clock::time_point now) const { return !ended_ && next_.load() <= now; }
    void Notify() const {
      if (request_.on_event) request_.on_event();
    }
    EngineEvent Next(std::chrono::milliseconds timeout) override {
      EngineEvent event;
      const Clock::time_point next = next_;
      const auto wait = std::min(Clock::now() + timeout, next);
      if (next > Clock::now()) std::this_thread::sleep_until(wait);
      if (next > Clock::now() || ended_) return event;
      if (!started_) {
        started_ = true;
        event.kind = EngineEvent::Kind::kStarted;
        event.cached_tokens = script_.cached_tokens;
        if (request_.want_prompt_logprobs) {
          for (size_t i = 1; i < request_.prompt.size(); ++i) {
            event.prompt_logprobs.push_back(Said(request_.prompt[i]));
          }
        }
      } else if (script_.fail_after == said_) {
        event.kind = EngineEvent::Kind::kFailed;
        event.status = script_.failure;
        End();
      } else if (said_ >= limit_ || finish_next_) {
        event.kind = EngineEvent::Kind::kFinished;
        event.reason = finish_next_ ? FinishReason::kStop : FinishReason::kLength;
        End();
      } else {
        event.kind = EngineEvent::Kind::kToken;
        const auto at = static_cast<size_t>(said_);
        const size_t count = script_.tokens.size();
        if (at < count || script_.endless) {
          event.token = Said(script_.tokens[at % count]);
        } else if (!request_.stop_tokens.empty()) {
          event.token = Said(request_.stop_tokens.front());
        } else {
          event.token = Said(0);
        }
        for (const int32_t stop : request_.stop_tokens) finish_next_ |= stop == event.token.token;
        ++said_;
        next_ = Clock::now() + script_.token_delay;
      }
      return event;
    }
    void Cancel() override {
      if (ended_) return;
      ++engine_.cancelled_;
      End();
    }

   private:
    GeneratedToken Said(int32_t token) const {
      GeneratedToken said;
      said.token = token;
      if (request_.want_logprobs || request_.want_prompt_logprobs) {
        said.logprob = -0.5f;
        for (int i = 0; i < request_.top_logprobs; ++i) {
          said.top.push_back({token + i, -0.5f - static_cast<float>(i)});
        }
      }
      return said;
    }
    void End() {
      ended_ = true;
      --engine_.running_;
    }
    FakeEngine& engine_;
    EngineRequest request_;
    Script script_;
    std::atomic<Clock::time_point> next_;
    int64_t said_ = 0, limit_ = 0;
    bool started_ = false, finish_next_ = false;
    std::atomic<bool> ended_{false};
  };

  void Ring(const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      {
        std::lock_guard lock(mutex_);
        const auto now = Clock::now();
        for (const Handle* handle : handles_) {
          if (handle->Due(now)) handle->Notify();
        }
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  Author author_;
  int64_t context_;
  mutable std::mutex mutex_;
  std::vector<EngineRequest> requests_;
  Status refuse_, health_;
  bool draining_ = false;
  std::atomic<int64_t> running_{0}, cancelled_{0};
  std::set<const Handle*> handles_;  // guarded by mutex_
  std::jthread bell_;
};

}  // namespace oscar::server
