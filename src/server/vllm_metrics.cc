#include "server/vllm_metrics.h"

#include <map>

namespace oscar::server {
namespace {

// vLLM's words for how a request ended; "" for those it does not count.
std::string FinishedReason(const std::string& ours) {
  if (ours == "stop" || ours == "tool_calls") return "stop";
  if (ours == "length") return "length";
  if (ours == "cancelled") return "abort";
  if (ours == "error") return "error";
  return "";
}

std::map<Labels, uint64_t> Finished(const ServerMetrics& metrics) {
  std::map<Labels, uint64_t> out;
  // A dashboard that divides wants every reason from the start.
  for (const char* reason : {"stop", "length", "abort", "error"}) {
    out[{{"finished_reason", reason}}] = 0;
  }
  for (const auto& [labels, count] : metrics.requests.Read()) {
    for (const auto& [name, value] : labels) {
      if (name != "finish_reason") continue;
      const std::string reason = FinishedReason(value);
      if (!reason.empty()) out[{{"finished_reason", reason}}] += count;
    }
  }
  return out;
}

}  // namespace

Histogram::Snapshot BatchTokens(const EngineStats& stats) {
  Histogram::Snapshot batch;
  for (size_t i = 0; i < BatchHistogram::kBounds; ++i) {
    batch.count += stats.batch_tokens.counts[i];
    batch.cumulative.emplace_back(static_cast<double>(uint64_t{1} << i), batch.count);
  }
  batch.count += stats.batch_tokens.counts.back();
  batch.sum = static_cast<double>(stats.batch_tokens.sum);
  return batch;
}

std::string VllmMetrics(const ServerMetrics& metrics, const EngineStats& stats,
                        const std::string& model) {
  ExpositionWriter out("vllm:", {{"model_name", model}, {"engine", "0"}});
  out.Gauge("num_requests_running", "Sequences in the batch", static_cast<double>(stats.running));
  out.Gauge("num_requests_waiting", "Sequences that wait", static_cast<double>(stats.waiting));
  const double usage = stats.kv_budget_bytes > 0 ? static_cast<double>(stats.kv_bytes) /
                                                       static_cast<double>(stats.kv_budget_bytes)
                                                 : 0.0;
  out.Gauge("kv_cache_usage_perc", "Share of the cache in use; 1 is all of it", usage);
  out.Gauge("gpu_cache_usage_perc", "The same by its earlier name", usage);
  // In tokens, as vLLM counts them.
  const bool has_prefixes = stats.prefix_queries > 0;
  out.Counter("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache",
              has_prefixes ? stats.prompt_tokens : 0);
  out.Counter("prefix_cache_hits_total", "Prompt tokens found there",
              has_prefixes ? stats.cached_prompt_tokens : 0);
  out.Counter("num_preemptions_total", "Sequences put back for want of room", stats.preemptions);
  out.Counter("prompt_tokens_total", "Prompt tokens", stats.prompt_tokens);
  out.Counter("generation_tokens_total", "Generated tokens", stats.generated_tokens);
  out.Counter("request_success_total", "Requests by how they ended", Finished(metrics));
  out.Add("iteration_tokens_total", "Tokens of each forward pass", BatchTokens(stats));
  out.Add("request_prompt_tokens", "Prompt tokens of a request", metrics.request_prompt_tokens);
  out.Add("request_generation_tokens", "Tokens generated for a request",
          metrics.request_generation_tokens);
  out.Add("time_to_first_token_seconds", "From arrival to the first token",
          metrics.time_to_first_token);
  out.Add("inter_token_latency_seconds", "Time between two tokens", metrics.inter_token);
  out.Add("time_per_output_token_seconds", "The same by its earlier name", metrics.inter_token);
  out.Add("request_time_per_output_token_seconds", "Mean time between the tokens of a choice",
          metrics.time_per_output_token);
  out.Add("e2e_request_latency_seconds", "From arrival to the end", metrics.request_duration);
  out.Add("request_queue_time_seconds", "Waiting for admission", metrics.queue);
  out.Add("request_prefill_time_seconds", "From admission to the first token", metrics.prefill);
  out.Add("request_decode_time_seconds", "From the first token to the last", metrics.decode);
  return out.text();
}

}  // namespace oscar::server
