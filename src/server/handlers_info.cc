// Endpoints that tell what the server is and how it does.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "messages/model_list.h"
#include "openai/response.h"
#include "oscar/version.h"
#include "server/api_server.h"
#include "server/vllm_metrics.h"
#include "server/web_page.h"

namespace oscar::server {
namespace {

using Json = nlohmann::ordered_json;

HttpResponse JsonResponse(const Json& json) {
  HttpResponse response;
  response.body = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  return response;
}

ModelCard CardOf(const ServedModel& model, const std::string& name) {
  return {name, model.root, model.created, model.engine->max_context()};
}

void WriteEngine(const EngineStats& stats, ExpositionWriter* out) {
  const auto number = [](uint64_t value) { return static_cast<double>(value); };
  out->Counter("prompt_tokens_total", "Prompt tokens of admitted requests", stats.prompt_tokens);
  out->Counter("cached_prompt_tokens_total", "Prompt tokens found in the prefix cache",
               stats.cached_prompt_tokens);
  out->Counter("generation_tokens_total", "Tokens generated", stats.generated_tokens);
  out->Counter("preemptions_total", "Sequences set back to make room", stats.preemptions);
  out->Counter("evictions_total", "Cached prefix pages dropped to make room", stats.evictions);
  out->Counter("engine_cancelled_total", "Requests cancelled in the engine", stats.cancelled);
  out->Counter("prefix_cache_queries_total", "Prompts looked up in the prefix cache",
               stats.prefix_queries);
  out->Counter("prefix_cache_hits_total", "Prompts of which a part was found", stats.prefix_hits);
  out->Counter("engine_steps_total", "Forward passes", stats.steps);
  out->Gauge("requests_running", "Sequences in the batch", static_cast<double>(stats.running));
  out->Gauge("requests_waiting", "Sequences in the queue", static_cast<double>(stats.waiting));
  out->Counter("cells_by_layer_total",
               "Cells of prompts read layer by layer because they did not fit otherwise",
               stats.cells_by_layer);
  out->Add("batch_tokens", "Tokens of each forward pass", BatchTokens(stats));
  // Two sizes share one budget: what is free counts in each kind, so used + free = total holds.
  const uint64_t free_bytes =
      stats.kv_budget_bytes - std::min(stats.kv_budget_bytes, stats.kv_bytes);
  std::vector<std::pair<Labels, double>> used, free, total;
  const auto blocks = [&](const char* kind, uint64_t in_use, uint64_t bytes) {
    if (bytes == 0) return;
    const uint64_t more = free_bytes / bytes;
    used.push_back({{{"kind", kind}}, number(in_use)});
    free.push_back({{{"kind", kind}}, number(more)});
    total.push_back({{{"kind", kind}}, number(in_use + more)});
  };
  blocks("open", stats.open_pages, stats.open_page_bytes);
  blocks("sealed", stats.sealed_pages, stats.sealed_page_bytes);
  out->Gauge("kv_blocks_used", "Cache pages of 64 tokens in use, by kind", used);
  out->Gauge("kv_blocks_free", "More pages of this kind that the free bytes hold", free);
  out->Gauge("kv_blocks_total", "Pages in use and free, by kind", total);
  out->Gauge(
      "kv_usage_ratio", "Share of the cache budget in use",
      stats.kv_budget_bytes > 0 ? number(stats.kv_bytes) / number(stats.kv_budget_bytes) : 0.0);
  out->Gauge("kv_bytes", "Bytes of cache pages by what they hold",
             {{{{"region", "sink"}}, number(stats.sink_bytes)},
              {{{"region", "bulk"}}, number(stats.quantized_bytes)},
              {{{"region", "recent"}}, number(stats.recent_bytes)},
              {{{"region", "state"}}, number(stats.state_bytes)},
              {{{"region", "snapshots"}}, number(stats.snapshot_bytes)}});
  out->Gauge("kv_used_bytes", "Bytes of all cache pages", number(stats.kv_bytes));
  out->Gauge("kv_budget_bytes", "Bytes that cache pages may take", number(stats.kv_budget_bytes));
  out->Gauge("kv_prefix_bytes", "Bytes of pages that only the prefix cache holds",
             number(stats.prefix_bytes));
  out->Gauge("kv_effective_bits", "Stored bits a K or V number, windows and metadata counted",
             stats.bits_per_element);
}

Json SequenceJson(const SequenceInfo& sequence) {
  const CacheUsage& usage = sequence.usage;
  return {{"id", sequence.request_id},
          {"running", sequence.running},
          {"tokens", usage.tokens},
          {"open_pages", usage.open_pages},
          {"sealed_pages", usage.sealed_pages},
          {"shared_pages", usage.shared_pages},
          {"bytes", usage.bytes},
          {"state_bytes", usage.state_bytes},
          {"bf16_bytes", usage.bf16_bytes},
          {"bits_per_element", usage.bits_per_element},
          {"saturated", usage.saturated},
          {"pages", sequence.pages}};
}

// The page runs its own script and style alone and talks to this server alone, whatever a model
// says.
HttpResponse WebFile(std::string_view bytes, std::string_view type) {
  HttpResponse response;
  response.content_type = type;
  response.headers = {{"Content-Security-Policy",
                       "default-src 'none'; script-src 'self'; style-src 'self'; connect-src "
                       "'self'; img-src data:; "
                       "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
                      {"X-Content-Type-Options", "nosniff"},
                      {"Referrer-Policy", "no-referrer"},
                      {"Cache-Control", "no-cache"}};
  response.body = bytes;
  return response;
}

}  // namespace

HttpResponse ApiServer::HandleHealth(const Context& context) {
  if (auto error = Unready(context.model.get())) return ErrorResponse(*error);
  return JsonResponse({{"status", "ok"}});
}

HttpResponse ApiServer::HandleModels(const Context& context) {
  std::vector<ModelCard> cards;
  for (const std::string& name : context.model->names)
    cards.push_back(CardOf(*context.model, name));
  HttpResponse response;
  response.body =
      SpeaksMessages(context.http) ? MessagesModelListBody(cards) : ModelListBody(cards);
  return response;
}

HttpResponse ApiServer::HandleModel(const Context& context) {
  constexpr std::string_view kPrefix = "/models/";
  const std::string& path = context.http.path;
  const std::string name = path.substr(path.find(kPrefix) + kPrefix.size());
  if (auto error = CheckModelName(*context.model, name)) return ErrorResponse(*error);
  HttpResponse response;
  const ModelCard card = CardOf(*context.model, name);
  response.body = SpeaksMessages(context.http) ? MessagesModelBody(card) : ModelBody(card);
  return response;
}

HttpResponse ApiServer::HandleMetrics(const Context& context) {
  ExpositionWriter out;
  out.Counter("requests_total", "Generation requests by endpoint and how they ended",
              metrics_.requests.Read());
  out.Counter("http_responses_total", "HTTP responses by status code",
              metrics_.http_responses.Read());
  out.Counter("cancelled_total", "Requests whose client went away", metrics_.cancelled.load());
  out.Gauge("streams", "Open event streams", static_cast<double>(metrics_.streams.load()));
  out.Gauge("model_loaded", "1 once requests can be served", context.model == nullptr ? 0.0 : 1.0);
  const ResponseStore::Stats responses = responses_.stats();
  out.Gauge("responses_stored", "Responses that can be continued",
            static_cast<double>(responses.count));
  out.Gauge("response_store_bytes", "Bytes of stored responses and of what they continue",
            static_cast<double>(responses.bytes));
  out.Counter("responses_evicted_total", "Stored responses dropped to make room",
              responses.evicted);
  const ServedModel* model = context.model.get();
  out.Gauge("build_info", "What is running; always 1",
            {{{{"version", kVersion},
               {"simd", model == nullptr ? "" : model->simd},
               {"device", model == nullptr ? "" : model->device}},
              1.0}});
  if (model != nullptr) WriteEngine(model->engine->Stats(), &out);
  out.Add("time_to_first_token_seconds", "From the request's arrival to its first token",
          metrics_.time_to_first_token);
  out.Add("time_per_output_token_seconds", "Mean time between the tokens of a choice",
          metrics_.time_per_output_token);
  out.Add("inter_token_seconds", "Time between two tokens of a choice", metrics_.inter_token);
  out.Add("request_duration_seconds", "From the request's arrival to its end",
          metrics_.request_duration);
  out.Add("queue_seconds", "Waiting for admission", metrics_.queue);
  out.Add("prefill_seconds", "From admission to the first token", metrics_.prefill);
  out.Add("decode_seconds", "From the first token to the last", metrics_.decode);
  out.Add("request_prompt_tokens", "Prompt tokens of a request", metrics_.request_prompt_tokens);
  out.Add("request_generation_tokens", "Tokens generated for a request",
          metrics_.request_generation_tokens);
  HttpResponse response;
  response.content_type = "text/plain; version=0.0.4; charset=utf-8";
  response.body = out.text();
  if (options_.metrics_compat && model != nullptr) {
    response.body += VllmMetrics(metrics_, model->engine->Stats(), model->names.front());
  }
  return response;
}

HttpResponse ApiServer::HandleVersion(const Context&) {
  return JsonResponse({{"version", kVersion}});
}

HttpResponse ApiServer::HandleProps(const Context& context) {
  const ServedModel& served = *context.model;
  const RequestLimits& limits = served.limits;
  const SamplingOptions& sampling = limits.defaults;
  const int64_t max_tokens = served.dialogue->defaults().max_tokens;
  Json body = {
      {"version", kVersion},
      {"model", served.names.front()},
      {"aliases", served.names},
      {"system_fingerprint", served.fingerprint},
      {"max_model_len", served.engine->max_context()},
      {"chat_template", served.dialogue->has_chat()},
      {"tool_parser", NameOf(served.dialogue->call_format())},
      {"reasoning_parser", NameOf(served.dialogue->reasoning())},
      {"simd", served.simd},
      {"device", served.device},
      {"limits",
       {{"json_depth", limits.max_json_depth},
        {"messages", limits.max_messages},
        {"n", limits.max_n},
        {"stops", limits.max_stops},
        {"stop_bytes", limits.max_stop_bytes},
        {"top_logprobs", limits.max_top_logprobs},
        {"logit_bias", limits.max_logit_bias},
        {"prompts", limits.max_prompts},
        {"answer_logprobs", served.max_answer_logprobs()},
        {"tools", limits.max_tools},
        {"json_values", limits.max_json_values},
        {"conversation_bytes", limits.max_conversation_bytes},
        {"response_store_bytes", responses_.max_bytes()},
        {"response_store_count", responses_.max_count()},
        {"body_bytes", options_.http.max_body_bytes},
        {"body_bytes_total", options_.http.max_bytes_in_flight},
        {"header_bytes", options_.http.max_header_bytes},
        {"headers", options_.http.max_headers},
        {"connections", options_.http.max_connections},
        {"header_timeout_s", static_cast<double>(options_.http.header_timeout.count()) / 1e3},
        {"body_timeout_s", static_cast<double>(options_.http.body_timeout.count()) / 1e3},
        {"write_timeout_s", static_cast<double>(options_.http.write_timeout.count()) / 1e3},
        {"request_timeout_s", static_cast<double>(options_.request_timeout.count()) / 1e3}}},
      {"default_generation_settings",
       {{"temperature", sampling.temperature},
        {"top_p", sampling.top_p},
        {"top_k", sampling.top_k},
        {"min_p", sampling.min_p},
        {"repetition_penalty", sampling.repetition_penalty},
        {"max_tokens", max_tokens > 0 ? Json(max_tokens) : Json(nullptr)}}},
      {"sample_prompts", served.dialogue->sample_prompts()}};
  if (!served.properties.empty()) {
    if (auto extra = ParseOrderedJson(served.properties, "properties"); extra.has_value()) {
      body.update(*extra, /*merge_objects=*/true);
    }
  }
  return JsonResponse(body);
}

HttpResponse ApiServer::HandleCache(const Context& context) {
  const EngineStats stats = context.model->engine->Stats();
  Json sequences = Json::array();
  const std::string salt = SaltOf(context.key);
  for (const SequenceInfo& sequence : context.model->engine->Sequences()) {
    if (sequence.cache_salt.ends_with(salt)) sequences.push_back(SequenceJson(sequence));
  }
  return JsonResponse({{"budget_bytes", stats.kv_budget_bytes},
                       {"used_bytes", stats.kv_bytes},
                       {"sink_bytes", stats.sink_bytes},
                       {"quantized_bytes", stats.quantized_bytes},
                       {"recent_bytes", stats.recent_bytes},
                       {"prefix_bytes", stats.prefix_bytes},
                       {"state_bytes", stats.state_bytes},
                       {"snapshot_bytes", stats.snapshot_bytes},
                       {"bits_per_element", stats.bits_per_element},
                       {"running", stats.running},
                       {"waiting", stats.waiting},
                       {"sequences", std::move(sequences)}});
}

HttpResponse ApiServer::HandlePage(const Context&) {
  return WebFile(WebPage(), "text/html; charset=utf-8");
}

HttpResponse ApiServer::HandleStyle(const Context&) {
  return WebFile(WebStyle(), "text/css; charset=utf-8");
}

HttpResponse ApiServer::HandleScript(const Context&) {
  return WebFile(WebScript(), "text/javascript; charset=utf-8");
}

}  // namespace oscar::server
