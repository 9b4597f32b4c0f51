#include "server/api_server.h"

#include <fmt/core.h>
#include <strings.h>

#include <algorithm>
#include <cctype>
#include <random>
#include <utility>

#include "base/log.h"
#include "messages/error.h"

namespace oscar::server {

struct ApiServer::Route {
  std::string_view method;
  std::string_view path;  // without /v1; a trailing '*' takes the rest as an argument
  RouteFunction function;
  bool open = false;        // needs no key
  bool needs_model = true;  // 503 while loading
  bool generates = false;   // 503 while draining
};

const std::vector<ApiServer::Route>& ApiServer::Routes() {
  static const std::vector<Route> routes = {
      {"POST", "/chat/completions", &ApiServer::HandleChat, false, true, true},
      {"POST", "/completions", &ApiServer::HandleCompletions, false, true, true},
      {"POST", "/responses", &ApiServer::HandleResponses, false, true, true},
      {"POST", "/responses/input_tokens", &ApiServer::HandleInputTokens},
      {"GET", "/responses/*", &ApiServer::HandleStoredResponse},
      {"DELETE", "/responses/*", &ApiServer::HandleDeleteResponse},
      {"POST", "/messages", &ApiServer::HandleMessages, false, true, true},
      {"POST", "/messages/count_tokens", &ApiServer::HandleCountTokens},
      {"POST", "/chat/completions/render", &ApiServer::HandleApplyTemplate},
      {"POST", "/apply-template", &ApiServer::HandleApplyTemplate},
      {"POST", "/tokenize", &ApiServer::HandleTokenize},
      {"POST", "/detokenize", &ApiServer::HandleDetokenize},
      {"GET", "/models", &ApiServer::HandleModels},
      {"GET", "/models/*", &ApiServer::HandleModel},
      {"GET", "/health", &ApiServer::HandleHealth, true, false},
      {"GET", "/ping", &ApiServer::HandleHealth, true, false},
      {"GET", "/metrics", &ApiServer::HandleMetrics, false, false},
      {"GET", "/version", &ApiServer::HandleVersion, false, false},
      {"GET", "/props", &ApiServer::HandleProps},
      {"GET", "/server_info", &ApiServer::HandleProps},
      {"GET", "/oscar/cache", &ApiServer::HandleCache},
      {"GET", "/", &ApiServer::HandlePage, true, false},
      {"GET", "/app.css", &ApiServer::HandleStyle, true, false},
      {"GET", "/app.js", &ApiServer::HandleScript, true, false},
  };
  return routes;
}

namespace {

std::string_view WithoutPrefix(std::string_view path) {
  return path.starts_with("/v1/") ? path.substr(3) : path;
}

bool Matches(std::string_view pattern, std::string_view path) {
  if (!pattern.ends_with('*')) return pattern == path;
  pattern.remove_suffix(1);
  return path.size() > pattern.size() && path.starts_with(pattern);
}

bool IsJson(std::string_view content_type) {
  const std::string_view type = content_type.substr(0, content_type.find(';'));
  constexpr std::string_view kJson = "application/json";
  const size_t end = type.find_last_not_of(' ');
  return end != std::string_view::npos && end + 1 == kJson.size() &&
         ::strncasecmp(type.data(), kJson.data(), kJson.size()) == 0;
}

// Ids given by the client go into headers and logs.
bool IsPlainId(std::string_view id) {
  return !id.empty() && id.size() <= 128 &&
         std::all_of(id.begin(), id.end(), [](unsigned char c) { return c > 0x20 && c < 0x7f; });
}

// What a preflight may ask for: names of headers, repeated in the answer. Clients of the API send
// many of their own (X-Stainless-...).
bool IsHeaderList(std::string_view text) {
  return !text.empty() && text.size() <= 4096 &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) {
           return std::isalnum(c) != 0 || c == '-' || c == '_' || c == ',' || c == ' ';
         });
}

bool HasMethod(std::string_view method, const HttpRequest& request) {
  return request.method == method || (request.method == "HEAD" && method == "GET");
}

HttpResponse MethodNotAllowed(std::string_view allowed) {
  HttpResponse response = ErrorResponse(
      MakeApiError(405, "method_not_allowed", fmt::format("this path answers {} only", allowed)));
  response.headers.emplace_back("Allow", fmt::format("{}, OPTIONS", allowed));
  return response;
}

}  // namespace

bool ApiServer::SpeaksMessages(const HttpRequest& request) {
  const std::string_view path = WithoutPrefix(request.path);
  return path == "/messages" || path.starts_with("/messages/") ||
         FindHeader(request.headers, "Anthropic-Version") != nullptr;
}

ApiServer::ApiServer(ApiOptions options)
    : options_(std::move(options)),
      responses_(options_.response_store_bytes, options_.response_store_count) {
  std::random_device device;
  id_seed_ = (uint64_t{device()} << 32) | device();
}

const ApiServer::Route* ApiServer::FindRoute(const HttpRequest& request) {
  const Route* first = nullptr;
  for (const Route& route : Routes()) {
    if (!Matches(route.path, WithoutPrefix(request.path))) continue;
    if (HasMethod(route.method, request)) return &route;
    if (first == nullptr) first = &route;
  }
  return first;
}

void ApiServer::SetModel(std::shared_ptr<const ServedModel> model) {
  std::lock_guard lock(mutex_);
  model_ = std::move(model);
}

void ApiServer::BeginDrain() { draining_ = true; }
void ApiServer::Abort() {
  draining_ = true;
  aborting_ = true;
  std::lock_guard lock(runs_mutex_);
  for (const auto& [run, wake] : wakes_) wake();
}

std::shared_ptr<const ServedModel> ApiServer::model() const {
  std::lock_guard lock(mutex_);
  return model_;
}

std::optional<ApiError> ApiServer::Unready(const ServedModel* model) const {
  if (draining_) return MakeApiError(503, "draining", "the server is shutting down");
  if (model == nullptr) return MakeApiError(503, "loading", "the model is still loading");
  if (const Status health = model->engine->Health(); !health.ok()) {
    return MakeApiError(503, "device_failed", health.message());
  }
  return std::nullopt;
}

std::optional<ApiError> ApiServer::CheckModelName(const ServedModel& model,
                                                  const std::string& name) {
  if (name.empty() ||
      std::find(model.names.begin(), model.names.end(), name) != model.names.end()) {
    return std::nullopt;
  }
  ApiError error = MakeApiError(
      404, "model_not_found",
      fmt::format("the model '{}' is not served here; '{}' is", name, model.names.front()));
  error.param = "model";
  return error;
}

bool ApiServer::Guarded(const HttpRequest& request, const Route* route) const {
  if (options_.keys.empty() || request.method == "OPTIONS") return false;
  if (route == nullptr) return true;
  if (route->path == "/metrics") return options_.guard_metrics;
  return !route->open;
}

std::optional<HttpResponse> ApiServer::Admit(const HttpRequest& request) {
  const Route* route = FindRoute(request);
  if (Guarded(request, route) && !options_.keys.Check(request).has_value()) {
    return ErrorResponse(MakeApiError(401, "invalid_api_key",
                                      "a valid API key is required: Authorization: Bearer KEY"));
  }
  if (request.method == "OPTIONS") return std::nullopt;
  if (route == nullptr) {
    return ErrorResponse(
        MakeApiError(404, "not_found", fmt::format("there is no {}", request.path)));
  }
  if (!HasMethod(route->method, request)) {
    std::string allowed;
    for (const Route& other : Routes()) {
      if (!Matches(other.path, WithoutPrefix(request.path))) continue;
      allowed += fmt::format("{}{}", allowed.empty() ? "" : ", ", other.method);
    }
    return MethodNotAllowed(allowed);
  }
  if (route->method == "POST") {
    const std::string* type = FindHeader(request.headers, "Content-Type");
    if (type != nullptr && !IsJson(*type)) {
      return ErrorResponse(
          MakeApiError(415, "unsupported_media_type", "the Content-Type must be application/json"));
    }
    const std::string* encoding = FindHeader(request.headers, "Content-Encoding");
    if (encoding != nullptr && *encoding != "identity") {
      return ErrorResponse(MakeApiError(415, "unsupported_media_type",
                                        "compressed request bodies are not accepted"));
    }
  }
  if (route->generates || route->needs_model) {
    const auto served = model();
    if (served == nullptr || route->generates) {
      if (auto error = Unready(served.get())) return ErrorResponse(*error);
    }
  }
  return std::nullopt;
}

std::string ApiServer::RequestId(const HttpRequest& request) {
  const std::string* given = FindHeader(request.headers, "X-Request-Id");
  if (given != nullptr && IsPlainId(*given)) return *given;
  return fmt::format("{:016x}", ChoiceSeed(id_seed_, ++next_id_));
}

HttpResponse ApiServer::Handle(const HttpRequest& request) {
  if (request.method == "OPTIONS") {
    HttpResponse response;
    response.status = 204;
    return response;
  }
  const Route* route = FindRoute(request);
  const auto served = model();
  Context context{request, served, {}, "", std::chrono::steady_clock::now()};
  if (auto key = options_.keys.Check(request)) context.key = std::move(*key);
  context.request_id = RequestId(request);
  HttpResponse response = (this->*route->function)(context);
  if (FindHeader(response.headers, "X-Request-Id") == nullptr) {
    response.headers.emplace_back("X-Request-Id", context.request_id);
  }
  return response;
}

HttpResponse ApiServer::ProtocolError(int status, std::string_view message) {
  std::string code;
  switch (status) {
    case 408:
      code = "request_timeout";
      break;
    case 413:
      code = "payload_too_large";
      break;
    case 500:
      code = "internal_error";
      break;
    case 503:
      code = "overloaded";
      break;
    default:
      code = "bad_request";
  }
  return ErrorResponse(MakeApiError(status, code, std::string(message)));
}

void ApiServer::Finish(const HttpRequest& request, HttpResponse& response) {
  metrics_.http_responses.Add({{"code", std::to_string(response.status)}});
  // What was refused before it reached a handler has an id, too.
  if (FindHeader(response.headers, "X-Request-Id") == nullptr) {
    response.headers.emplace_back("X-Request-Id", RequestId(request));
  }
  if (SpeaksMessages(request)) {
    const std::string id = *FindHeader(response.headers, "X-Request-Id");
    response.headers.emplace_back("Request-Id", id);
    ToMessagesError(id, &response);
  }
  const std::string* origin = FindHeader(request.headers, "Origin");
  if (origin == nullptr || options_.cors_origins.empty()) return;
  for (const std::string& allowed : options_.cors_origins) {
    if (allowed != "*" && allowed != *origin) continue;
    response.headers.emplace_back("Access-Control-Allow-Origin", allowed == "*" ? "*" : *origin);
    response.headers.emplace_back("Vary", "Origin");
    response.headers.emplace_back("Access-Control-Expose-Headers", "X-Request-Id, Retry-After");
    if (request.method == "OPTIONS") {
      response.headers.emplace_back("Access-Control-Allow-Methods", "GET, POST, DELETE, OPTIONS");
      const std::string* wanted = FindHeader(request.headers, "Access-Control-Request-Headers");
      response.headers.emplace_back("Access-Control-Allow-Headers",
                                    wanted != nullptr && IsHeaderList(*wanted)
                                        ? *wanted
                                        : "Authorization, Content-Type, X-Api-Key, X-Request-Id, "
                                          "Anthropic-Version, Anthropic-Beta");
      response.headers.emplace_back("Access-Control-Max-Age", "600");
    }
    return;
  }
}

}  // namespace oscar::server
