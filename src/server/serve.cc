#include "server/serve.h"

#include <fmt/core.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <future>
#include <thread>
#include <utility>

#include "base/log.h"
#include "server/signals.h"

namespace oscar::server {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kTick{20};
// After the drain: for error chunks to go out and connections to end.
constexpr milliseconds kAbortGrace{5000};
constexpr milliseconds kCloseGrace{2000};
// How often the engine is asked how it is.
constexpr milliseconds kHealthTick{200};

// Every connection takes a descriptor; so do weights, cached prefixes and the event loop.
constexpr int kOtherDescriptors = 128;

// The soft limit is often 1,024; the hard one is the administrator's.
void RaiseFileLimit(int connections) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t needed = static_cast<rlim_t>(connections) + kOtherDescriptors;
  if (limit.rlim_cur < limit.rlim_max) {
    limit.rlim_cur = limit.rlim_max;
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) ::getrlimit(RLIMIT_NOFILE, &limit);
  }
  if (limit.rlim_cur >= needed) return;
  LogWarning(
      "--max-connections {} needs {} open files and the system allows {}: raise it (ulimit -Hn, "
      "LimitNOFILE= of systemd) or lower --max-connections",
      connections, needed, limit.rlim_cur);
}

bool WaitForRequests(const ApiServer& api, milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  while (api.active_requests() > 0) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kTick);
  }
  return true;
}

Status Shutdown(ApiServer& api, HttpServer& http, const ServedModel& model, milliseconds timeout) {
  LogInfo("shutting down: {} requests running, at most {} s; a second signal ends at once",
          api.active_requests(), timeout.count() / 1000);
  api.BeginDrain();
  // Requests that were admitted to HTTP but not yet to the engine are refused by it from here on.
  model.engine->Drain();
  const bool clean = WaitForRequests(api, timeout);
  if (!clean) {
    LogWarning("{} requests did not end in time and are cancelled", api.active_requests());
    api.Abort();
    WaitForRequests(api, kAbortGrace);
  }
  if (!http.Stop(kCloseGrace)) LogWarning("connections were still open and have been cut off");
  if (!clean)
    return {StatusCode::kDeadlineExceeded, "some requests were cancelled by the shutdown"};
  LogInfo("all requests have ended");
  return {};
}

}  // namespace

std::string ServerUrl(const HttpOptions& options, int port) {
  const char* scheme = options.tls_certificate.empty() ? "http" : "https";
  // The colons of an IPv6 address are not the port's.
  const bool is_ipv6 = options.host.find(':') != std::string::npos;
  const std::string host = is_ipv6 ? fmt::format("[{}]", options.host) : options.host;
  return fmt::format("{}://{}:{}", scheme, host, port);
}

Status RunServer(const ServeOptions& options, const LoadFunction& load) {
  SignalWatch signals;
  RaiseFileLimit(options.http.max_connections);
  // In the order of destruction, reversed: the model outlives the handlers, they the connections.
  Loaded loaded;
  ApiOptions api_options = options.api;
  api_options.http = options.http;
  ApiServer api(std::move(api_options));
  OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<HttpServer> http, HttpServer::Bind(options.http));
  http->Start(api);
  const std::string url = ServerUrl(options.http, http->port());
  LogInfo("listening on {}, loading the model", url);
  if (!http->is_loopback() && options.api.keys.empty()) {
    LogWarning("{} is open to the network without an API key; add --api-key", options.http.host);
  }

  std::future<Result<Loaded>> loading = std::async(std::launch::async, load);
  while (loading.wait_for(kTick) != std::future_status::ready) {
    if (!signals.Wait(milliseconds{0})) continue;
    // Nothing to drain, and weights may take minutes to read: leave without unwinding.
    LogInfo("interrupted while loading");
    std::fflush(nullptr);
    ::_exit(0);
  }
  OSCAR_ASSIGN_OR_RETURN(loaded, loading.get());
  api.SetModel(loaded.model);
  // Not a log line: scripts wait for it whatever the log level.
  // Where it cannot be written (a full disk), serving goes on.
  std::fputs(fmt::format("oscar: ready: serving {} on {}/v1, page at {}/\n",
                         loaded.model->names.front(), url, url)
                 .c_str(),
             stderr);

  // A device that failed does not come back: /health has said so for a while, requests have ended.
  while (!signals.Wait(kHealthTick)) {
    const Status health = loaded.model->engine->Health();
    if (health.ok()) continue;
    std::this_thread::sleep_for(options.failure_grace);
    http->Stop(kCloseGrace);
    return Internal(health.message());
  }
  return Shutdown(api, *http, *loaded.model, options.shutdown_timeout);
}

}  // namespace oscar::server
