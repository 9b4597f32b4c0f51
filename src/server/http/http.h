// HTTP as the handlers see it: plain values, no library types.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace oscar::server {

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

// Value of the first header of that name (any case), or null.
const std::string* FindHeader(const HttpHeaders& headers, std::string_view name);

struct HttpRequest {
  std::string method;  // upper case, as sent
  std::string path;    // decoded, without the query
  std::string query;   // as sent, without '?'
  HttpHeaders headers;
  std::string body;
  std::string remote_address;
  // Asks the source of this request's answer again, soon. From any thread, also after the answer
  // has ended; never waits.
  std::function<void()> wake;
};

class AnswerSource;

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  HttpHeaders headers;
  std::string body;
  bool close = false;  // end the connection after this response
  // Where set, the answer takes time and comes from here; everything above is ignored.
  std::unique_ptr<AnswerSource> source;
};

// An answer that takes time: asked for what there is to send whenever it was woken, its time has
// come, or what it gave before has been sent. It is never asked while the client does not take what
// it gave, so a slow client holds one step's bytes and no more. Calls come one at a time, from
// different threads. Destroying it cancels what is still running.
class AnswerSource {
 public:
  using Clock = std::chrono::steady_clock;

  enum class Peer : uint8_t {
    kThere,
    kHalfClosed,  // has ended its sending side and may be gone: writing shows which
    kGone,        // nothing more will arrive
  };

  struct Step {
    // Status and headers, once, before any bytes. With `done` and no bytes: the whole answer.
    std::optional<HttpResponse> head;
    // The whole answer, where it may be large: built on a worker thread.
    std::function<HttpResponse()> compose;
    std::string bytes;  // of the body
    bool done = false;
    // Asked again at this time at the latest.
    Clock::time_point again = Clock::time_point::max();
  };

  virtual ~AnswerSource() = default;
  // Never waits. After kGone the source is done, whatever it returns.
  virtual Step Next(Peer peer) = 0;
};

// Called from several threads at once. Admit, Finish, ProtocolError, and Handle for requests
// without a body run on threads that move bytes: they must be quick.
class HttpHandler {
 public:
  virtual ~HttpHandler() = default;
  // Sees the request before its body is read; a response refuses it and ends the connection.
  virtual std::optional<HttpResponse> Admit(const HttpRequest& request) = 0;
  // With a body: on a worker thread.
  virtual HttpResponse Handle(const HttpRequest& request) = 0;
  // The body of an error that the HTTP layer itself found (malformed, too large, too slow).
  virtual HttpResponse ProtocolError(int status, std::string_view message) = 0;
  // Every response passes here just before it is sent: common headers, counters, the shape of
  // errors.
  virtual void Finish(const HttpRequest& request, HttpResponse& response) = 0;
};

}  // namespace oscar::server
