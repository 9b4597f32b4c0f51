// HttpServer: HTTP/1.1 over TCP or TLS for any number of connections on a fixed number of threads.
// A few I/O threads (Boost.Asio) move bytes; a few workers run handlers of requests that have a
// body; a waiting stream holds neither. Beast parses requests, with stricter rules on top
// (http/request_reader.h). Every client is bounded: bytes and time of heads and bodies, bytes of
// all bodies together, time without progress of writes, number of connections.
//
// Start and Stop from one thread; handlers are called from I/O threads and workers.
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
  // PEM files: TLS instead of plain HTTP. Both or neither.
  std::string tls_certificate, tls_key;
  int threads = 0;  // for I/O, and as many workers; 0: one per processor, 4 at most
  int max_connections = 4096;
  uint64_t max_body_bytes = uint64_t{16} << 20;
  // Of all bodies that are being received or parsed. The oldest request always proceeds.
  uint64_t max_bytes_in_flight = uint64_t{64} << 20;
  uint64_t max_header_bytes = uint64_t{64} << 10;
  int max_headers = 128;
  std::chrono::milliseconds header_timeout{10'000};      // the whole head
  std::chrono::milliseconds body_timeout{60'000};        // the whole body
  std::chrono::milliseconds budget_timeout{10'000};      // waiting for max_bytes_in_flight
  std::chrono::milliseconds keep_alive_timeout{30'000};  // idle between requests
  std::chrono::milliseconds write_timeout{20'000};       // without progress
};

class HttpServer {
 public:
  // Reads the TLS files, binds and listens; connections wait in the backlog until Start. An address
  // in use is kUnavailable with advice.
  static Result<std::unique_ptr<HttpServer>> Bind(const HttpOptions& options);
  virtual ~HttpServer() = default;  // stops

  virtual int port() const = 0;
  // Only this machine reaches the address.
  virtual bool is_loopback() const = 0;
  // `handler` must outlive the server.
  virtual void Start(HttpHandler& handler) = 0;
  // Closes the listener and idle connections, waits up to `grace` for requests in progress and
  // cuts off those that are left. Returns whether all had ended.
  virtual bool Stop(std::chrono::milliseconds grace) = 0;
  virtual int num_connections() const = 0;
};

}  // namespace oscar::server
