// ApiError: a failure as a client of the HTTP API sees it. The body is always
// {"error": {"message", "type", "param", "code"}}; the type follows from the HTTP status, the code
// is a word that programs can switch on. A value.
#pragma once

#include <string>
#include <string_view>
#include <tl/expected.hpp>

#include "http/http.h"
#include "oscar/status.h"

namespace oscar::server {

struct ApiError {
  int http_status = 500;
  std::string code;  // empty: null
  std::string message;
  std::string param;      // empty: null
  int retry_after_s = 0;  // 0: no header
};

template <typename T>
using ApiResult = tl::expected<T, ApiError>;

// "invalid_request_error", "server_error", ... for an HTTP status.
std::string_view ErrorTypeOf(int http_status);

// 400 with a code and the field at fault.
ApiError InvalidValue(std::string param, std::string message);
ApiError MissingParameter(std::string param);
ApiError UnsupportedParameter(std::string param, std::string message);
ApiError MakeApiError(int http_status, std::string code, std::string message);

// What a Status from the engine or the text module means to the client. Messages of internal
// errors are replaced by one that carries the request id and tells nothing else.
ApiError FromStatus(const Status& status, std::string_view request_id);

// {"error": {...}} as text.
std::string ErrorBody(const ApiError& error);
HttpResponse ErrorResponse(const ApiError& error);

}  // namespace oscar::server
