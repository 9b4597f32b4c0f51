// A server with OpenAI's API as the system under test: any peer can be measured by the same tasks
// and scores. Chats go to /v1/chat/completions; prompts that are given as they are, to
// /v1/completions. Requests that fail for a reason that may pass (429, 5xx, no connection) are
// repeated with growing pauses; a server that cannot be reached at the start is given up within
// seconds. Safe from any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "oscar/options.h"
#include "oscar/status.h"
#include "tasks/suite.h"

namespace oscar {

struct EndpointOptions {
  std::string url;      // http://host:port, perhaps with a path such as /v1
  std::string model;    // empty: the first that the server lists
  std::string api_key;  // empty: none is sent
  int parallel = 8;     // requests at a time
  int attempts = 8;
  double timeout_seconds = 3600;     // of one answer
  double first_pause_seconds = 0.5;  // doubled after each failure
};

struct EndpointReply {
  std::string text;  // the answer; reasoning that the server gives apart is not in it
  int64_t prompt_tokens = 0, output_tokens = 0;  // 0 where the server does not say
};

class Endpoint {
 public:
  // Asks the server for its models.
  static Result<Endpoint> Connect(const EndpointOptions& options);
  const std::string& model() const { return options_.model; }
  // Tokens of its context, where its list of models says (max_model_len); 0: unknown.
  int64_t context() const { return context_; }

  // Where the item's assistant turn has a prefix, it ends the user's message.
  Result<EndpointReply> Complete(const EvalItem& item,
                                 const std::optional<SamplingOptions>& sampling,
                                 uint64_t seed) const;

 private:
  explicit Endpoint(EndpointOptions options) : options_(std::move(options)) {}
  // `patience`: seconds in which a connection that fails is tried again.
  Result<std::string> Send(const std::string& route, const std::string* body,
                           double patience) const;

  EndpointOptions options_;
  int64_t context_ = 0;
  std::string host_;  // scheme://host:port
  std::string path_;  // "/v1"
};

}  // namespace oscar
