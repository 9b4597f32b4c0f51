#include "dialogue/stop_matcher.h"

#include <algorithm>

namespace oscar {

bool StopMatcher::Push(std::string_view text, bool armed, std::string* out) {
  if (stops_.empty()) {
    out->append(text);
    emitted_ += text.size();
    return false;
  }
  const size_t old = held_.size();
  held_.append(text);
  if (armed) {
    for (size_t end = old + 1; end <= held_.size(); ++end) {
      const std::string_view seen = std::string_view(held_).substr(0, end);
      const std::string* best = nullptr;
      for (size_t i = 0; i < stops_.size(); ++i) {
        if (!seen.ends_with(stops_[i])) continue;
        if (best == nullptr || stops_[i].size() > best->size()) {
          best = &stops_[i];
          matched_ = i;
        }
      }
      if (best == nullptr) continue;
      const size_t keep = include_match_ ? end : end - best->size();
      out->append(held_, 0, keep);
      emitted_ += keep;
      held_.clear();
      return true;
    }
  }
  const size_t hold = HeldSuffix();
  const size_t release = held_.size() - hold;
  out->append(held_, 0, release);
  emitted_ += release;
  held_.erase(0, release);
  return false;
}

void StopMatcher::Finish(std::string* out) {
  out->append(held_);
  emitted_ += held_.size();
  held_.clear();
}

// The longest suffix that a stop string could still begin with.
size_t StopMatcher::HeldSuffix() const {
  size_t longest = 0;
  for (const std::string& stop : stops_) {
    const size_t most = std::min(stop.size() - 1, held_.size());
    for (size_t size = most; size > longest; --size) {
      if (std::string_view(held_).ends_with(std::string_view(stop).substr(0, size))) {
        longest = size;
        break;
      }
    }
  }
  return longest;
}

}  // namespace oscar
