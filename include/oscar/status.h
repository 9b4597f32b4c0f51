// Status and Result: how the library reports anticipated failures (bad input, missing files, full
// caches). Programmer errors abort through OSCAR_CHECK instead; no exception crosses this API.
// Both types are values: copy, move and read them from any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <tl/expected.hpp>
#include <utility>

namespace oscar {

enum class StatusCode : uint8_t {
  kOk = 0,
  kInvalidArgument,    // the caller's request or option is wrong
  kNotFound,           // a file, model or tensor does not exist
  kOutOfRange,         // longer than the context or the format allows
  kResourceExhausted,  // memory or cache budget
  kCancelled,
  kDeadlineExceeded,
  kUnavailable,    // busy, draining, or the device has failed
  kUnimplemented,  // well-formed, but this build or version cannot do it
  kDataLoss,       // corrupt or hostile bytes
  kInternal,
};

// What a status means to the outside. One row a code; exit codes are 0 ok, 1 failure, 2 usage,
// 130 interrupted.
struct StatusCodeInfo {
  StatusCode code;
  std::string_view name;
  int http_status;
  int exit_code;
};

const StatusCodeInfo& InfoOf(StatusCode code);

class [[nodiscard]] Status {
 public:
  Status() = default;  // OK
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }
  // Name of the request field or option at fault; empty where none is.
  const std::string& param() const { return param_; }
  Status&& WithParam(std::string param) && {
    param_ = std::move(param);
    return std::move(*this);
  }
  // "what: message", so that the reader learns which file or step failed.
  Status WithContext(std::string_view what) const;

  std::string ToString() const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
  std::string param_;
};

template <typename T>
using Result = tl::expected<T, Status>;

inline tl::unexpected<Status> Unexpected(Status status) {
  return tl::unexpected<Status>(std::move(status));
}

inline Status InvalidArgument(std::string message) {
  return {StatusCode::kInvalidArgument, std::move(message)};
}
inline Status NotFound(std::string message) { return {StatusCode::kNotFound, std::move(message)}; }
inline Status OutOfRange(std::string message) {
  return {StatusCode::kOutOfRange, std::move(message)};
}
inline Status ResourceExhausted(std::string message) {
  return {StatusCode::kResourceExhausted, std::move(message)};
}
inline Status Unavailable(std::string message) {
  return {StatusCode::kUnavailable, std::move(message)};
}
inline Status Unimplemented(std::string message) {
  return {StatusCode::kUnimplemented, std::move(message)};
}
inline Status DataLoss(std::string message) { return {StatusCode::kDataLoss, std::move(message)}; }
inline Status Internal(std::string message) { return {StatusCode::kInternal, std::move(message)}; }

}  // namespace oscar

// Returns from the enclosing function (one that returns Status or Result<T>) when `expr`, a Status,
// is not OK.
#define OSCAR_RETURN_IF_ERROR(expr)                      \
  do {                                                   \
    ::oscar::Status oscar_status_ = (expr);              \
    if (!oscar_status_.ok()) {                           \
      return ::oscar::internal::AsReturn{oscar_status_}; \
    }                                                    \
  } while (false)

// OSCAR_ASSIGN_OR_RETURN(auto file, Open(path)): assigns the value or returns the error.
#define OSCAR_ASSIGN_OR_RETURN(lhs, expr) \
  OSCAR_ASSIGN_OR_RETURN_IMPL_(OSCAR_CONCAT_(oscar_result_, __LINE__), lhs, expr)
#define OSCAR_ASSIGN_OR_RETURN_IMPL_(result, lhs, expr) \
  auto result = (expr);                                 \
  if (!result.has_value()) {                            \
    return ::oscar::internal::AsReturn{result.error()}; \
  }                                                     \
  lhs = std::move(result).value()
#define OSCAR_CONCAT_(a, b) OSCAR_CONCAT_IMPL_(a, b)
#define OSCAR_CONCAT_IMPL_(a, b) a##b

namespace oscar::internal {
// Lets one macro serve functions that return Status and functions that return Result<T>.
struct AsReturn {
  const Status& status;
  operator Status() const { return status; }  // NOLINT(google-explicit-constructor)
  template <typename T>
  operator Result<T>() const {  // NOLINT(google-explicit-constructor)
    return Unexpected(status);
  }
};
}  // namespace oscar::internal
