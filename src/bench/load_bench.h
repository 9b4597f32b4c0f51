// Load: many clients that stream completions from an OpenAI-compatible server over HTTP, and what
// they saw. Behind `oscar bench serve`; knows nothing of engines, so that any server can be asked.
//
// Thread-safety: RunLoad starts its own threads and returns when they have ended.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bench/completion_client.h"
#include "bench/workload.h"
#include "oscar/status.h"

namespace oscar {

// Every sample of a Prometheus text by its name with labels.
std::map<std::string, double> ParseMetrics(std::string_view text);

// Requests at a time, at most: each has a thread.
inline constexpr int kMaxInFlight = 4096;

struct LoadOptions {
  Workload workload;
  int requests = 1;  // all clients together
  // Either so many clients, each of which sends its next request when it has its answer, or, above
  // 0, requests per second that arrive whatever has been answered (infinity: all at once).
  int clients = 1;
  double rate = 0.0;
  std::string model;  // of the requests; empty: none is named
  std::chrono::milliseconds timeout{600'000};
  // What an answer has to keep to, to count as good; seconds. Infinite: anything does.
  double target_first_token = INFINITY, target_per_token = INFINITY;
  // One conversation that runs meanwhile: the others arrive from its first token on, until it has
  // ended, `requests` of them at most. 0: none.
  int64_t beside_prompt_tokens = 0, beside_max_tokens = 512;
};

// Seconds; zeros where nothing was seen.
struct Percentiles {
  int64_t count = 0;
  double mean = 0.0, p50 = 0.0, p90 = 0.0, p95 = 0.0, p99 = 0.0, max = 0.0;
};
Percentiles PercentilesOf(std::vector<double> values);
// Linear between the nearest two; 0 of none. REQUIRES: in order.
double Quantile(std::span<const double> sorted, double share);

struct LoadReport {
  int64_t answered = 0, failed = 0;
  std::string first_error;
  double seconds = 0.0;
  double requests_per_second = 0.0;  // answered ones
  double output_tokens_per_second = 0.0;
  double input_tokens_per_second = 0.0;  // prompt tokens, cached ones included
  double cached_share = 0.0;             // of the prompt tokens
  // Answers within both targets: per second, and their share of all requests.
  double good_per_second = 0.0, good_share = 0.0;
  // Of answered requests. Between tokens: every gap between two pieces of text; per token: the mean
  // of an answer after its first.
  Percentiles first_token, per_token, between_tokens, latency;
  // At 0, 1, ... 100 percent, for plots.
  std::vector<double> first_token_curve, per_token_curve, between_tokens_curve;
  // Answers that are shorter than asked for, and such whose tokens the server did not count.
  int64_t short_answers = 0, uncounted = 0;
  double latest_arrival = 0.0;  // seconds by which a request was sent late, at most
  // From GET /metrics every 50 ms; negative where the server does not say.
  double most_running = -1.0, most_kv_bytes = -1.0, kv_budget_bytes = -1.0, preemptions = -1.0;
  // The conversation beside: its first token, its tokens, the gaps between them.
  struct Beside {
    double first_token = 0.0;
    int64_t prompt_tokens = 0, completion_tokens = 0;
    Percentiles between_tokens;
  };
  std::optional<Beside> beside;
};

// Sends the shared prefix once before the clock starts where there is one: it is then cached. An
// error where that or the conversation beside fails.
Result<LoadReport> RunLoad(const ServerAddress& address, const LoadOptions& options,
                           const std::function<void()>& on_answer = {});

}  // namespace oscar
