// When to try again: growing pauses, what the server asks for, and an end. One thread.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "hub/http_client.h"
#include "oscar/status.h"

namespace oscar::hub {

struct RetryPolicy {
  int attempts = 6;                   // that bring nothing, one after the other
  double first_pause = 0.5;           // seconds; doubled each time
  double longest_pause = 300;         // a server that asks for more is an error
  std::function<void(double)> sleep;  // unset: the clock's
};

// Whether another attempt may bring what this status did not.
bool IsPassing(int status);
// Seconds that an answer asks to wait for: Retry-After (seconds or a date, `now` in seconds since
// 1970), or the t= of RateLimit.
std::optional<double> RetryAfter(const HttpAnswer& answer, int64_t now);

class Patience {
 public:
  explicit Patience(const RetryPolicy& policy) : policy_(policy) {}
  // Something arrived: counts from the start again.
  void Restart() { failures_ = 0; }
  // Waits, so that the caller may try again; an error where it should not. `why` is what failed;
  // `asked`: seconds that the server wants.
  Status Wait(const Status& why, std::optional<double> asked = std::nullopt);

 private:
  const RetryPolicy& policy_;
  int failures_ = 0;
};

}  // namespace oscar::hub
