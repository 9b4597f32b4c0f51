#include "messages/error.h"

#include <nlohmann/json.hpp>

#include "base/json.h"

namespace oscar::server {

std::string_view MessagesErrorType(int http_status) {
  switch (http_status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 408:
    case 504:
      return "timeout_error";
    case 413:
      return "request_too_large";
    case 429:
      return "rate_limit_error";
    case 503:
      return "overloaded_error";
    default:
      return http_status < 500 ? "invalid_request_error" : "api_error";
  }
}

std::string MessagesErrorBody(int http_status, std::string_view code, std::string_view message,
                              std::string_view request_id) {
  nlohmann::ordered_json body = {
      {"type", "error"},
      {"error", {{"type", MessagesErrorType(http_status)}, {"message", message}}},
      {"request_id", request_id}};
  if (!code.empty()) body["error"]["details"] = {{"error_code", code}};
  return body.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

void ToMessagesError(std::string_view request_id, HttpResponse* response) {
  if (response->status < 400) return;
  const auto body = ParseOrderedJson(response->body, "error");
  if (!body.has_value() || !body->is_object() || !body->contains("error")) return;
  const auto& error = body->at("error");
  if (!error.is_object() || !error.contains("message") || !error.at("message").is_string()) return;
  const auto code = error.find("code");
  const bool has_code = code != error.end() && code->is_string();
  response->body = MessagesErrorBody(
      response->status,
      has_code ? std::string_view(code->get_ref<const std::string&>()) : std::string_view(),
      error.at("message").get_ref<const std::string&>(), request_id);
}

}  // namespace oscar::server
