// EventChannel: the engine thread's end of a request's handle. The engine pushes and never waits; a
// reader waits in Next. Bounded by the request itself: at most one event a token of its limit, plus
// one to start and one to end, so a reader that does not read holds back neither the engine nor
// pages (docs/engine-contract.md section 6).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <utility>

#include "engine/service.h"

namespace oscar {

class EventChannel {
 public:
  // `on_event` may be empty; it is called after each Push, without a lock.
  explicit EventChannel(int64_t max_tokens, std::function<void()> on_event = {})
      : capacity_(static_cast<size_t>(max_tokens) + 2), on_event_(std::move(on_event)) {}

  // Engine thread. Nothing may follow kFinished or kFailed.
  void Push(EngineEvent event);
  // After the last event was taken, further calls return kFailed (kUnavailable) at once.
  EngineEvent Next(std::chrono::milliseconds timeout);

  void Cancel() { cancelled_.store(true, std::memory_order_relaxed); }
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }

 private:
  const size_t capacity_;
  const std::function<void()> on_event_;
  std::atomic<bool> cancelled_{false};
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<EngineEvent> events_;
  bool ended_ = false;
};

}  // namespace oscar
