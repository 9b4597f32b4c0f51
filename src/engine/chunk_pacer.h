// How many prompt tokens a pass may hold beside generated ones, so that passes take the time that
// is wanted between two tokens of an answer. Follows what passes took: the longer a pass for so
// many prompt tokens, the fewer the next one gets. Changes speed, never an answer: a prompt may be
// cut anywhere. Plain value; one thread.
#pragma once

#include <algorithm>

namespace oscar {

class ChunkPacer {
 public:
  // Prompts are read however slow the machine is.
  static constexpr int kFewest = 16;
  static constexpr int kFirst = 64;  // before anything was measured

  // `target_seconds` 0: any number of tokens, up to `most`.
  ChunkPacer(double target_seconds, int most)
      : target_(target_seconds),
        most_(most),
        limit_(std::min(target_seconds > 0 ? kFirst : most, most)) {}

  int limit() const { return limit_; }

  // A pass with `tokens` of prompts took so long, generated tokens included. With t = a + b n, a
  // share n target / t of it tends to the n whose pass takes `target`, whatever a is below that.
  void Observe(int tokens, double seconds) {
    if (target_ <= 0 || tokens <= 0 || seconds <= 0) return;
    const double fitting = static_cast<double>(tokens) * target_ / seconds;
    // One slow pass may be the machine's; several are not.
    const double fewest = std::max<double>(kFewest, static_cast<double>(limit_) / 4);
    if (seconds > target_) {
      limit_ = std::min(limit_, static_cast<int>(std::max(fitting, fewest)));
    } else if (tokens >= limit_) {  // a smaller one says little of how long a full one takes
      const double most = std::min<double>(most_, static_cast<double>(limit_) * 1.5 + 1);
      limit_ =
          static_cast<int>(std::clamp<double>(fitting, limit_, std::max<double>(most, limit_)));
    }
    limit_ = std::clamp(limit_, std::min(kFewest, most_), most_);
  }

 private:
  double target_;
  int most_, limit_;
};

}  // namespace oscar
