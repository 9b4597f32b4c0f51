#include "oscar/status.h"

#include <fmt/core.h>

#include <array>

#include "base/check.h"

namespace oscar {
namespace {

// The one table from codes to the outside world. 499 is the customary "client closed request".
constexpr std::array<StatusCodeInfo, 11> kCodes = {{
    {StatusCode::kOk, "ok", 200, 0},
    {StatusCode::kInvalidArgument, "invalid argument", 400, 2},
    {StatusCode::kNotFound, "not found", 404, 1},
    {StatusCode::kOutOfRange, "out of range", 400, 1},
    {StatusCode::kResourceExhausted, "resource exhausted", 429, 1},
    {StatusCode::kCancelled, "cancelled", 499, 130},
    {StatusCode::kDeadlineExceeded, "deadline exceeded", 408, 1},
    {StatusCode::kUnavailable, "unavailable", 503, 1},
    {StatusCode::kUnimplemented, "not supported", 501, 1},
    {StatusCode::kDataLoss, "corrupt data", 500, 1},
    {StatusCode::kInternal, "internal error", 500, 1},
}};

}  // namespace

const StatusCodeInfo& InfoOf(StatusCode code) {
  const auto index = static_cast<size_t>(code);
  OSCAR_CHECK(index < kCodes.size() && kCodes[index].code == code, "status code {}", index);
  return kCodes[index];
}

Status Status::WithContext(std::string_view what) const {
  Status status(code_, fmt::format("{}: {}", what, message_));
  status.param_ = param_;
  return status;
}

std::string Status::ToString() const {
  if (ok()) return "ok";
  return fmt::format("{}: {}", InfoOf(code_).name, message_);
}

}  // namespace oscar
