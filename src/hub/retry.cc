#include "hub/retry.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <ctime>
#include <thread>

namespace oscar::hub {
namespace {

std::optional<double> Seconds(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data() || value < 0) return std::nullopt;
  return static_cast<double>(value);
}

}  // namespace

bool IsPassing(int status) {
  return status == 408 || status == 429 || status == 500 || status == 502 || status == 503 ||
         status == 504;
}

std::optional<double> RetryAfter(const HttpAnswer& answer, int64_t now) {
  const std::string after = answer.Header("retry-after");
  if (const auto seconds = Seconds(after)) return seconds;
  std::tm date{};
  if (!after.empty() && strptime(after.c_str(), "%a, %d %b %Y %H:%M:%S GMT", &date) != nullptr) {
    return static_cast<double>(std::max<int64_t>(timegm(&date) - now, 0));
  }
  // RateLimit: "api";r=0;t=55
  const std::string limit = answer.Header("ratelimit");
  if (const size_t at = limit.find(";t="); at != std::string::npos) {
    return Seconds(std::string_view(limit).substr(at + 3));
  }
  return std::nullopt;
}

Status Patience::Wait(const Status& why, std::optional<double> asked) {
  if (++failures_ >= policy_.attempts) {
    return {why.code(), fmt::format("{}; gave up after {} attempts", why.message(), failures_)};
  }
  if (asked.has_value() && *asked > policy_.longest_pause) {
    return {why.code(), fmt::format("{}; it asks to come back in {:.0f} s", why.message(), *asked)};
  }
  const double pause =
      asked.value_or(policy_.first_pause * std::exp2(static_cast<double>(failures_ - 1)));
  if (policy_.sleep != nullptr) {
    policy_.sleep(pause);
  } else {
    std::this_thread::sleep_for(std::chrono::duration<double>(pause));
  }
  return {};
}

}  // namespace oscar::hub
