// One HTTP/1.1 request on its own connection, for load tests: the body is handed on as bytes
// arrive, so that the moment of each token is seen; a deadline bounds the whole exchange, and what
// is kept of a server's bytes is bounded, too. Plain HTTP. Safe from any thread.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <string_view>

#include "oscar/status.h"

namespace oscar {

// Where a server listens.
struct ServerAddress {
  std::string host = "127.0.0.1";
  int port = 8000;
  std::string api_key;  // empty: none is sent
};
// "http://host:port", with or without "/v1".
Result<ServerAddress> ParseServerAddress(std::string_view url);

struct Exchange {
  std::string method = "GET";
  std::string path;
  std::string body;                            // JSON; empty: none
  std::chrono::milliseconds timeout{600'000};  // of everything together; a queue may be long
};

// Called with the status and each piece of the body. True: enough was read.
using OnPiece = std::function<Result<bool>(int status, std::string_view piece)>;

// The status, once the body has ended or was enough. kUnavailable where there is no connection or
// it ends early, kDeadlineExceeded, kDataLoss for what is not HTTP; else the error of `on_piece`.
Result<int> RunExchange(const ServerAddress& address, const Exchange& exchange,
                        const OnPiece& on_piece);

}  // namespace oscar
