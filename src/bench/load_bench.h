// Load: many clients that stream completions from an OpenAI-compatible server over HTTP, and what
// they saw. Behind `oscar bench serve`; knows nothing of engines, so that any server can be asked.
//
// Thread-safety: RunLoad starts its own threads and returns when they have ended.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/status.h"

namespace oscar {

// Where a server listens. Plain HTTP only.
struct ServerAddress {
  std::string host = "127.0.0.1";
  int port = 8000;
  std::string api_key;  // empty: none is sent
};
// "http://host:port", with or without "/v1".
Result<ServerAddress> ParseServerAddress(std::string_view url);

// One answer as its client saw it; seconds from the moment the request was sent.
struct LoadAnswer {
  Status status;
  double first_token = 0.0;
  double total = 0.0;
  int64_t prompt_tokens = 0, cached_tokens = 0, completion_tokens = 0;
};

// Streams one completion: POST /v1/completions with `body` (a JSON object, "stream" set).
LoadAnswer StreamCompletion(const ServerAddress& address, const std::string& body);
// The body of a 200, else an error with the status.
Result<std::string> HttpGet(const ServerAddress& address, const std::string& path);
// Every sample of a Prometheus text by its name with labels.
std::map<std::string, double> ParseMetrics(std::string_view text);

struct LoadOptions {
  int clients = 1;
  int requests = 1;             // all clients together
  int64_t prompt_tokens = 512;  // of one request, the shared prefix not counted
  int64_t shared_tokens = 0;    // that all prompts begin with
  int64_t max_tokens = 64;      // generated, exactly: end tokens are ignored
  int vocab_size = 8192;        // prompts are random ids in [vocab / 64, vocab)
  uint64_t seed = 1;            // other seeds, other prompts
  std::string model;            // empty: the server's first
};

struct LoadReport {
  int64_t answered = 0, failed = 0;
  std::string first_error;
  double seconds = 0.0;
  double output_tokens_per_second = 0.0;
  double input_tokens_per_second = 0.0;  // prompt tokens, cached ones included
  double cached_share = 0.0;             // of the prompt tokens
  // Of answered requests, seconds.
  double first_token_p50 = 0.0, first_token_p95 = 0.0;
  double per_token_p50 = 0.0, per_token_p95 = 0.0;
  // From GET /metrics every 50 ms; negative where the server does not say.
  double most_running = -1.0, most_kv_bytes = -1.0, kv_budget_bytes = -1.0, preemptions = -1.0;
};

// Sends the shared prefix once before the clock starts where there is one: it is then cached.
Result<LoadReport> RunLoad(const ServerAddress& address, const LoadOptions& options,
                           const std::function<void()>& on_answer = {});

}  // namespace oscar
