// Requests to a hub. Redirects are followed here, so that a token stays with the host it is for.
// Certificates are verified; proxies come from the environment. Safe from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>

#include "hub/url.h"
#include "oscar/status.h"

namespace oscar::hub {

struct HttpAnswer {
  int status = 0;
  bool is_home = true;  // from the host that was asked, not one it sent on to
  std::map<std::string, std::string> headers;  // of the last answer; names in lower case
  // What the hub itself said on the way to the answer, before it sent elsewhere.
  std::map<std::string, std::string> linked;
  std::string body;  // where it was not received piece by piece; cut at max_body bytes
  std::string Header(const std::string& name) const;
  std::string Linked(const std::string& name) const;
};

struct HttpRequest {
  std::string method = "GET";
  Url url;
  std::string token;  // sent to the origin of `url` alone
  std::string range;  // "bytes=5-"; empty: all
  uint64_t max_body = uint64_t{64} << 10;
  // A redirect to another host is the answer: what is signed for GET refuses HEAD.
  bool stays_home = false;
  // Where set, called with the head of a 200 or 206 before its bytes; those then go to `receive`.
  // An error ends the request and is its result.
  std::function<Status(const HttpAnswer&)> begin;
  std::function<Status(std::span<const char>)> receive;
};

struct HttpOptions {
  int connect_seconds = 10;
  int read_seconds = 30;  // without a byte
  int max_redirects = 5;
};

// An answer of any status. kUnavailable: no connection, or one that ended early; others will not
// become better by a second attempt.
Result<HttpAnswer> Send(const HttpRequest& request, const HttpOptions& options);

}  // namespace oscar::hub
