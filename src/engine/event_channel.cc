#include "engine/event_channel.h"

#include "base/check.h"

namespace oscar {

void EventChannel::Push(EngineEvent event) {
  {
    const std::lock_guard lock(mutex_);
    OSCAR_CHECK(!ended_ && events_.size() < capacity_);
    ended_ = event.kind == EngineEvent::Kind::kFinished || event.kind == EngineEvent::Kind::kFailed;
    events_.push_back(std::move(event));
  }
  ready_.notify_all();
  if (on_event_) on_event_();
}

EngineEvent EventChannel::Next(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  ready_.wait_for(lock, timeout, [&] { return !events_.empty() || ended_; });
  EngineEvent event;
  if (!events_.empty()) {
    event = std::move(events_.front());
    events_.pop_front();
  } else if (ended_) {
    event.kind = EngineEvent::Kind::kFailed;
    event.status = Unavailable("the request has ended");
  }
  return event;
}

}  // namespace oscar
