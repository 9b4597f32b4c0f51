// A client of OpenAI-compatible servers: streams one completion and notes when each piece of text
// came. vLLM, SGLang, llama.cpp and this project's server differ in the fields that are read here;
// docs/benchmarks.md names them. Everything a server says is checked. Safe from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bench/http_exchange.h"
#include "oscar/status.h"

namespace oscar {

// One answer as its client saw it; seconds from the moment the request was sent.
struct LoadAnswer {
  Status status;
  double first_token = 0.0;
  double last_token = 0.0;
  double total = 0.0;       // until the stream's end
  std::vector<float> gaps;  // between one piece of text and the next
  int64_t prompt_tokens = 0, completion_tokens = 0;
  int64_t cached_tokens = -1;  // of the prompt; -1: the server does not say
  bool has_usage = false;      // or pieces were counted as tokens

  // Seconds per token after the first; negative where there is one token at most.
  double per_token() const {
    return completion_tokens < 2
               ? -1.0
               : (last_token - first_token) / static_cast<double>(completion_tokens - 1);
  }
};

// POST /v1/completions with `body` (a JSON object, "stream" set). `on_first` is called when the
// first piece of text has come.
LoadAnswer StreamCompletion(const ServerAddress& address, const std::string& body,
                            std::chrono::milliseconds timeout = Exchange().timeout,
                            const std::function<void()>& on_first = {});

// The body of a 200, else an error with the status.
Result<std::string> HttpGet(const ServerAddress& address, const std::string& path);

// What a server is: its first model's name, and who says to serve it ("vllm", "sglang", "llamacpp",
// "oscar"); empty where it does not say.
struct ServerInfo {
  std::string model, owner;
};
Result<ServerInfo> AskServer(const ServerAddress& address);

}  // namespace oscar
