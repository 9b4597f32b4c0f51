#include "openai/api_error.h"

#include <fmt/core.h>

#include <array>
#include <nlohmann/json.hpp>
#include <utility>

namespace oscar::server {
namespace {

struct TypeRow {
  int http_status;
  std::string_view type;
};
constexpr std::array<TypeRow, 7> kTypes = {{
    {401, "authentication_error"},
    {403, "permission_error"},
    {404, "not_found_error"},
    {408, "timeout_error"},
    {429, "rate_limit_error"},
    {501, "not_supported_error"},
    {503, "unavailable_error"},
}};

std::string_view CodeOf(StatusCode code) {
  switch (code) {
    case StatusCode::kOutOfRange:
      return "context_length_exceeded";
    case StatusCode::kResourceExhausted:
      return "queue_full";
    case StatusCode::kCancelled:
      return "cancelled";
    case StatusCode::kDeadlineExceeded:
      return "request_timeout";
    case StatusCode::kUnavailable:
      return "unavailable";
    case StatusCode::kUnimplemented:
      return "not_supported";
    case StatusCode::kInvalidArgument:
      return "invalid_value";
    case StatusCode::kNotFound:
      return "not_found";
    case StatusCode::kOk:
    case StatusCode::kDataLoss:
    case StatusCode::kInternal:
      return "internal_error";
  }
  return "internal_error";
}

}  // namespace

std::string_view ErrorTypeOf(int http_status) {
  for (const TypeRow& row : kTypes) {
    if (row.http_status == http_status) return row.type;
  }
  return http_status < 500 ? "invalid_request_error" : "server_error";
}

ApiError InvalidValue(std::string param, std::string message) {
  return {400, "invalid_value", std::move(message), std::move(param), 0};
}

ApiError MissingParameter(std::string param) {
  std::string message = fmt::format("'{}' is required", param);
  return {400, "missing_required_parameter", std::move(message), std::move(param), 0};
}

ApiError UnsupportedParameter(std::string param, std::string message) {
  return {400, "unsupported_parameter", std::move(message), std::move(param), 0};
}

ApiError MakeApiError(int http_status, std::string code, std::string message) {
  return {http_status, std::move(code), std::move(message), "", http_status == 503 ? 1 : 0};
}

ApiError FromStatus(const Status& status, std::string_view request_id) {
  ApiError error;
  error.http_status = InfoOf(status.code()).http_status;
  error.code = CodeOf(status.code());
  error.param = status.param();
  if (error.http_status == 499) error.http_status = 503;  // cancelled by us, not by the client
  if (error.http_status == 500) {
    error.message = fmt::format("internal error in request {}; the log has the cause", request_id);
  } else {
    error.message = status.message();
  }
  if (error.http_status == 429 || error.http_status == 503) error.retry_after_s = 1;
  return error;
}

std::string ErrorBody(const ApiError& error) {
  const auto or_null = [](const std::string& text) {
    return text.empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(text);
  };
  const nlohmann::ordered_json body = {{"error",
                                        {{"message", error.message},
                                         {"type", ErrorTypeOf(error.http_status)},
                                         {"param", or_null(error.param)},
                                         {"code", or_null(error.code)}}}};
  return body.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

HttpResponse ErrorResponse(const ApiError& error) {
  HttpResponse response;
  response.status = error.http_status;
  response.body = ErrorBody(error);
  if (error.http_status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  if (error.retry_after_s > 0) {
    response.headers.emplace_back("Retry-After", std::to_string(error.retry_after_s));
  }
  return response;
}

}  // namespace oscar::server
