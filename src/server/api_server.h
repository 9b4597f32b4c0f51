// ApiServer: routes, keys, CORS, state and the handlers behind the routes. The threads of HTTP come
// in through HttpHandler; one owner thread moves the state along: loading -> ready -> draining ->
// aborting. All methods are safe from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "generation/generation.h"
#include "generation/served_model.h"
#include "http/auth.h"
#include "http/http.h"
#include "http/http_server.h"
#include "openai/api_error.h"
#include "oscar/status.h"
#include "server/metrics.h"

namespace oscar::server {

struct ApiOptions {
  HttpOptions http;  // what the HTTP layer enforces; told by GET /props
  KeyRing keys;
  bool guard_metrics = true;
  // Origins that browsers may call from; "*" allows any. Empty: CORS is off.
  std::vector<std::string> cors_origins;
  std::chrono::milliseconds request_timeout{0};  // 0: none
  std::chrono::milliseconds ping_interval{15'000};
  // Requests of different keys never share cached prefixes.
  bool isolate_keys = false;
};

class ApiServer final : public HttpHandler {
 public:
  explicit ApiServer(ApiOptions options);

  // Loading is over. `model` stays published for the life of the server.
  void SetModel(std::shared_ptr<const ServedModel> model);
  // New generation requests are refused from here on; running ones continue.
  void BeginDrain();
  // Running ones end now, with an error that says why.
  void Abort();
  // Generation requests whose answers are not yet sent.
  int64_t active_requests() const { return active_.load(); }

  std::optional<HttpResponse> Admit(const HttpRequest& request) override;
  HttpResponse Handle(const HttpRequest& request) override;
  HttpResponse ProtocolError(int status, std::string_view message) override;
  void Finish(const HttpRequest& request, HttpResponse& response) override;

 private:
  friend class GenerationRun;
  struct Route;
  struct Context {
    const HttpRequest& http;
    const std::shared_ptr<const ServedModel>& model;
    KeyIdentity key;  // empty where no keys are set
    std::string request_id;
    std::chrono::steady_clock::time_point received;
  };
  using RouteFunction = HttpResponse (ApiServer::*)(const Context&);
  static const std::vector<Route>& Routes();
  static const Route* FindRoute(std::string_view path);
  bool Guarded(const HttpRequest& request, const Route* route) const;
  // What keeps the cached prefixes of a key apart, as the end of every salt of its requests; empty
  // without --isolate-keys.
  std::string SaltOf(const KeyIdentity& key) const {
    return options_.isolate_keys ? "\n" + key.hash : std::string();
  }
  // The client's own where it is plain text, else a new one.
  std::string RequestId(const HttpRequest& request);
  std::shared_ptr<const ServedModel> model() const;
  std::optional<ApiError> Unready(const ServedModel* model) const;
  static std::optional<ApiError> CheckModelName(const ServedModel& model, const std::string& name);

  // handlers_generation.cc
  HttpResponse HandleChat(const Context& context);
  HttpResponse HandleCompletions(const Context& context);
  HttpResponse Generate(const Context& context, std::string endpoint,
                        const GenerationParams& params, GenerationPlan plan);
  // handlers_text.cc
  HttpResponse HandleTokenize(const Context& context);
  HttpResponse HandleDetokenize(const Context& context);
  HttpResponse HandleApplyTemplate(const Context& context);
  // handlers_info.cc
  HttpResponse HandleHealth(const Context& context);
  HttpResponse HandleModels(const Context& context);
  HttpResponse HandleModel(const Context& context);
  HttpResponse HandleMetrics(const Context& context);
  HttpResponse HandleVersion(const Context& context);
  HttpResponse HandleProps(const Context& context);
  HttpResponse HandleCache(const Context& context);
  HttpResponse HandlePage(const Context& context);
  HttpResponse HandleStyle(const Context& context);
  HttpResponse HandleScript(const Context& context);

  ApiOptions options_;
  ServerMetrics metrics_;
  mutable std::mutex mutex_;
  std::shared_ptr<const ServedModel> model_;  // guarded by mutex_
  std::atomic<bool> draining_{false};
  std::atomic<bool> aborting_{false};
  std::atomic<int64_t> active_{0};
  std::mutex runs_mutex_;
  // What wakes each running request, for Abort; guarded by runs_mutex_.
  std::unordered_map<const void*, std::function<void()>> wakes_;
  std::atomic<uint64_t> next_id_{0};
  uint64_t id_seed_;
};

// A conversation, rendered and tokenised.
ApiResult<Prompt> TokenizeChat(const ServedModel& model, const ChatRequest& request,
                               std::string_view request_id);

}  // namespace oscar::server
