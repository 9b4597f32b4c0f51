// RunServer: the life of `oscar serve`: bind, answer "loading" while the model loads, serve, and
// on a signal drain and leave.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "http/http_server.h"
#include "oscar/status.h"
#include "server/api_server.h"

namespace oscar::server {

struct ServeOptions {
  HttpOptions http;
  ApiOptions api;
  // How long running requests may continue after the first signal.
  std::chrono::milliseconds shutdown_timeout{30'000};
  // How long /health answers 503 after the engine has failed, before the end.
  std::chrono::milliseconds failure_grace{3'000};
};

// What loading yields: the model, and whatever keeps it alive.
struct Loaded {
  std::shared_ptr<const ServedModel> model;
  std::shared_ptr<void> owner;  // shared because its type is the loader's business
};
using LoadFunction = std::function<Result<Loaded>()>;

// The address that is printed for people and scripts to use.
std::string ServerUrl(const HttpOptions& options, int port);

// Returns after a signal: OK when every request had ended by itself. Or when the engine has failed
// (a device's errors do not go away): never OK.
Status RunServer(const ServeOptions& options, const LoadFunction& load);

}  // namespace oscar::server
