// HttpServer: listens, and runs each connection on a thread of its own. The library behind it
// (cpp-httplib) parses requests and frames responses; accepting, timeouts, byte budgets,
// keep-alive and connection caps are ours, because the library's own loop cannot bound a slow
// client, skips an oversized body of any claimed length, answers on a connection whose body was
// never read, and shares ports (SO_REUSEPORT).
//
// Start and Stop from one thread; handlers are called from connection threads.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "http/http.h"
#include "oscar/status.h"

namespace oscar::server {

struct HttpOptions {
  std::string host = "127.0.0.1";
  int port = 8000;  // 0: any free one
  int max_connections = 512;
  uint64_t max_body_bytes = uint64_t{16} << 20;
  uint64_t max_header_bytes = uint64_t{64} << 10;
  int max_headers = 128;
  std::chrono::milliseconds header_timeout{10'000};      // the whole head
  std::chrono::milliseconds body_timeout{60'000};        // the whole body
  std::chrono::milliseconds keep_alive_timeout{30'000};  // idle between requests
  std::chrono::milliseconds write_timeout{20'000};       // without progress
};

class HttpServer {
 public:
  // Binds and listens; connections wait in the backlog until Start. An address in use is
  // kUnavailable with advice.
  static Result<std::unique_ptr<HttpServer>> Bind(const HttpOptions& options);
  virtual ~HttpServer() = default;  // stops

  virtual int port() const = 0;
  // `handler` must outlive the server.
  virtual void Start(HttpHandler& handler) = 0;
  // Closes the listener and idle connections, waits up to `grace` for requests in progress and
  // cuts off those that are left. Returns whether all had ended.
  virtual bool Stop(std::chrono::milliseconds grace) = 0;
  virtual int num_connections() const = 0;
};

}  // namespace oscar::server
