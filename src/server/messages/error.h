// Errors as clients of Anthropic's Messages API expect them: {"type": "error", "error": {"type",
// "message", "details": {"error_code"}}, "request_id"}. Pure functions.
#pragma once

#include <string>
#include <string_view>

#include "http/http.h"

namespace oscar::server {

// "invalid_request_error", "overloaded_error", ... for an HTTP status.
std::string_view MessagesErrorType(int http_status);
// `code` is ApiError's; empty: no details.
std::string MessagesErrorBody(int http_status, std::string_view code, std::string_view message,
                              std::string_view request_id);
// An error of this server in that shape, whoever refused the request: a handler, the keys, or the
// HTTP layer. What is no error stays as it is.
void ToMessagesError(std::string_view request_id, HttpResponse* response);

}  // namespace oscar::server
