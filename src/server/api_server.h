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
#include "openai/answer_writer.h"
#include "openai/api_error.h"
#include "oscar/status.h"
#include "responses/response_store.h"
#include "server/metrics.h"

namespace oscar::server {

struct ApiOptions {
  HttpOptions http;  // what the HTTP layer enforces; told by GET /props
  KeyRing keys;
  bool guard_metrics = true;
  // GET /metrics also under vLLM's names, for its dashboards.
  bool metrics_compat = false;
  // Origins that browsers may call from; "*" allows any. Empty: CORS is off.
  std::vector<std::string> cors_origins;
  std::chrono::milliseconds request_timeout{0};  // 0: none
  std::chrono::milliseconds ping_interval{15'000};
  bool ignore_priority = false;  // serve by arrival, whatever requests ask
  // Requests of different keys never share cached prefixes.
  bool isolate_keys = false;
  // What is kept of /v1/responses, for all keys together.
  uint64_t response_store_bytes = uint64_t{256} << 20;
  size_t response_store_count = 4096;
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
  // Of several that have the path, the one of the method; else the first.
  static const Route* FindRoute(const HttpRequest& request);
  // A client of Anthropic's API: it wants errors and models in its shapes.
  static bool SpeaksMessages(const HttpRequest& request);
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

  // What a writer is told of a request that was accepted.
  struct WriterContext {
    std::string request_id;
    int64_t created = 0;  // unix seconds
    std::string model;
    bool context_is_limit = false;  // the context has less room than max_tokens
  };
  using MakeWriter = std::function<std::unique_ptr<AnswerWriter>(const WriterContext&)>;

  // handlers_generation.cc
  HttpResponse HandleChat(const Context& context);
  HttpResponse HandleCompletions(const Context& context);
  HttpResponse Generate(const Context& context, std::string endpoint, const GenerationParams& given,
                        GenerationPlan plan, const MakeWriter& make_writer);
  HttpResponse GenerateCompletion(const Context& context, const char* endpoint,
                                  const GenerationParams& params, GenerationPlan plan);
  // The conversation as a prompt, and how its answer is to be read.
  static ApiResult<GenerationPlan> PlanChat(const Context& context, const ChatRequest& request);
  // handlers_responses.cc
  static ApiResult<GenerationPlan> PlanTruncated(const Context& context, const ChatRequest& chat);
  HttpResponse HandleResponses(const Context& context);
  HttpResponse HandleInputTokens(const Context& context);
  HttpResponse HandleStoredResponse(const Context& context);
  HttpResponse HandleDeleteResponse(const Context& context);
  // handlers_messages.cc
  HttpResponse HandleMessages(const Context& context);
  HttpResponse HandleCountTokens(const Context& context);
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
  ResponseStore responses_;
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
