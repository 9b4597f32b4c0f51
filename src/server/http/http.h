// HTTP as the handlers see it: plain values, no library types. A handler runs on its connection's
// thread; requests and responses belong to that thread.
#pragma once

#include <functional>
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
  // True once the client has closed its end. Cheap: one poll() without waiting.
  std::function<bool()> peer_gone;
};

class StreamSink {
 public:
  virtual ~StreamSink() = default;
  // One chunk, sent at once. False: the client is gone; nothing more will arrive.
  virtual bool Write(std::string_view bytes) = 0;
  virtual bool PeerGone() = 0;
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  HttpHeaders headers;
  std::string body;
  // Where set, called once after the headers have gone out, and the source of the body.
  std::function<void(StreamSink&)> stream;
  bool close = false;  // end the connection after this response
};

class HttpHandler {
 public:
  virtual ~HttpHandler() = default;
  // Sees the request before its body is read; a response refuses it and ends the connection.
  virtual std::optional<HttpResponse> Admit(const HttpRequest& request) = 0;
  virtual HttpResponse Handle(const HttpRequest& request) = 0;
  // The body of an error that the HTTP layer itself found (malformed, too large, too slow).
  virtual HttpResponse ProtocolError(int status, std::string_view message) = 0;
  // Every response passes here just before it is sent: common headers, counters.
  virtual void Finish(const HttpRequest& request, HttpResponse& response) = 0;
};

}  // namespace oscar::server
