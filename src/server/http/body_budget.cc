#include "http/body_budget.h"

#include <algorithm>
#include <utility>

namespace oscar::server {

BodyBudget::Share::~Share() { budget_.Close(age_); }

std::unique_ptr<BodyBudget::Share> BodyBudget::Open(std::function<void()> resume) {
  std::lock_guard lock(mutex_);
  const uint64_t age = next_age_++;
  entries_[age].resume = std::move(resume);
  return std::unique_ptr<Share>(new Share(*this, age));
}

uint64_t BodyBudget::used() const {
  std::lock_guard lock(mutex_);
  return used_;
}

bool BodyBudget::Share::Raise(uint64_t bytes) {
  std::lock_guard lock(budget_.mutex_);
  Entry& entry = budget_.entries_.at(age_);
  entry.wanted = 0;
  if (bytes <= entry.held) return true;
  const uint64_t more = bytes - entry.held;
  const bool oldest = budget_.entries_.begin()->first == age_;
  if (!oldest && budget_.used_ + more > budget_.limit_) {
    entry.wanted = more;
    return false;
  }
  entry.held = bytes;
  budget_.used_ += more;
  return true;
}

void BodyBudget::Close(uint64_t age) {
  std::lock_guard lock(mutex_);
  const auto at = entries_.find(age);
  used_ -= at->second.held;
  entries_.erase(at);
  ResumeWaiters();
}

// Wakes the oldest waiters as far as the free bytes reach, and always the very oldest.
void BodyBudget::ResumeWaiters() {
  uint64_t room = limit_ - std::min(limit_, used_);
  bool oldest = true;
  for (auto& [age, entry] : entries_) {
    if (entry.wanted > 0) {
      if (!oldest && entry.wanted > room) return;
      room -= std::min(room, entry.wanted);
      entry.wanted = 0;  // once: it asks again
      entry.resume();
    }
    oldest = false;
  }
}

}  // namespace oscar::server
