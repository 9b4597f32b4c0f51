#include "hub/http_client.h"

#include <fmt/core.h>
#include <httplib.h>
#include <signal.h>

#include <algorithm>

#include "base/error_text.h"
#include "oscar/version.h"

namespace oscar::hub {
namespace {

// A write to a connection that the server has closed must not end the program.
class PipeSignalBlock {
 public:
  PipeSignalBlock() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~PipeSignalBlock() {
    const timespec now{};
    if (!was_pending_) sigtimedwait(&pipe_, nullptr, &now);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  PipeSignalBlock(const PipeSignalBlock&) = delete;
  PipeSignalBlock& operator=(const PipeSignalBlock&) = delete;

 private:
  sigset_t pipe_, before_;
  bool was_pending_ = false;
};

std::string Lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

std::string Find(const std::map<std::string, std::string>& headers, const std::string& name) {
  const auto found = headers.find(name);
  return found == headers.end() ? "" : found->second;
}

Status SetProxy(const Url& url, httplib::Client& client) {
  std::string proxy = ProxyFor(url);
  if (proxy.empty()) return {};
  const std::string given = proxy;
  if (proxy.find("://") == std::string::npos) proxy = "http://" + proxy;
  std::string user;
  if (const size_t at = proxy.rfind('@'); at != std::string::npos) {
    const size_t start = proxy.find("://") + 3;
    user = proxy.substr(start, at - start);
    proxy.erase(start, at + 1 - start);
  }
  const auto parsed = ParseUrl(proxy);
  if (!parsed.has_value() || parsed->scheme != "http") {  // its password is not for a message
    return InvalidArgument(
        fmt::format("the proxy for {} in the environment is not http://HOST:PORT", url.Origin()));
  }
  client.set_proxy(parsed->host, parsed->port);
  if (!user.empty()) {
    const size_t colon = std::min(user.find(':'), user.size());
    client.set_proxy_basic_auth(user.substr(0, colon),
                                colon < user.size() ? user.substr(colon + 1) : "");
  }
  return {};
}

Status ErrorOf(httplib::Error error, const Url& url) {
  const std::string where = url.ForMessages();
  switch (error) {
    case httplib::Error::SSLConnection:
    case httplib::Error::SSLLoadingCerts:
      return DataLoss(fmt::format("{}: no TLS connection; is this the right address?", where));
    case httplib::Error::SSLServerVerification:
      return DataLoss(fmt::format(
          "{}: the server's certificate is not trusted; a certificate of your own network goes "
          "into SSL_CERT_FILE",
          where));
    case httplib::Error::Read:
    case httplib::Error::Write:
      return Unavailable(fmt::format("{}: the connection ended early", where));
    default:
      return Unavailable(
          fmt::format("{}: cannot be reached ({})", where, httplib::to_string(error)));
  }
}

// One request, no redirect.
Result<HttpAnswer> SendOnce(const HttpRequest& request, const Url& url, bool with_token,
                            const HttpOptions& options) {
#ifndef CPPHTTPLIB_OPENSSL_SUPPORT
  if (url.scheme == "https") return Unexpected(Unimplemented("this build has no TLS"));
#endif
  const PipeSignalBlock block;
  httplib::Client client(url.Origin());
  if (!client.is_valid()) {
    return Unexpected(Unavailable(fmt::format("{}: cannot be reached", url.Origin())));
  }
  OSCAR_RETURN_IF_ERROR(SetProxy(url, client));
  client.set_connection_timeout(options.connect_seconds);
  client.set_read_timeout(options.read_seconds);
  client.set_write_timeout(options.read_seconds);
  client.set_follow_location(false);
  client.set_url_encode(false);
  client.set_decompress(false);
  httplib::Request sent;
  sent.method = request.method;
  sent.path = url.target;
  sent.set_header("User-Agent", fmt::format("oscar/{}", kVersion));
  sent.set_header("Accept", "*/*");
  sent.set_header("Accept-Encoding", "identity");
  if (with_token) sent.set_header("Authorization", "Bearer " + request.token);
  if (!request.range.empty()) sent.set_header("Range", request.range);
  HttpAnswer answer;
  Status own;  // what ended it from our side
  bool is_wanted = false;
  sent.response_handler = [&](const httplib::Response& head) {
    answer.status = head.status;
    for (const auto& [name, value] : head.headers) answer.headers.emplace(Lower(name), value);
    is_wanted = request.receive != nullptr && (head.status == 200 || head.status == 206);
    if (is_wanted && request.begin != nullptr) own = request.begin(answer);
    return own.ok();
  };
  sent.content_receiver = [&](const char* data, size_t size, uint64_t, uint64_t) {
    if (is_wanted) {
      own = request.receive({data, size});
      return own.ok();
    }
    if (size > request.max_body - answer.body.size()) {
      answer.body.append(data, request.max_body - answer.body.size());
      // The text of an error may be cut; an answer that was asked for may not.
      if (answer.status == 200) {
        own = DataLoss(fmt::format("{}: an answer of more than {} bytes", url.ForMessages(),
                                   request.max_body));
      }
      return false;
    }
    answer.body.append(data, size);
    return true;
  };
  const httplib::Result result = client.send(sent);
  if (!own.ok()) return Unexpected(own);
  if (!result) {
    const bool is_cut = result.error() == httplib::Error::Canceled && answer.status != 0;
    if (!is_cut) return Unexpected(ErrorOf(result.error(), url));
  }
  if (answer.status == 0) answer.status = result->status;
  if (answer.headers.empty() && result) {
    for (const auto& [name, value] : result->headers) answer.headers.emplace(Lower(name), value);
  }
  return answer;
}

}  // namespace

std::string HttpAnswer::Header(const std::string& name) const { return Find(headers, name); }
std::string HttpAnswer::Linked(const std::string& name) const { return Find(linked, name); }

Result<HttpAnswer> Send(const HttpRequest& request, const HttpOptions& options) {
  Url url = request.url;
  std::map<std::string, std::string> linked;
  for (int hop = 0; hop <= options.max_redirects; ++hop) {
    const bool is_home = url.Origin() == request.url.Origin();
    OSCAR_ASSIGN_OR_RETURN(HttpAnswer answer,
                           SendOnce(request, url, is_home && !request.token.empty(), options));
    answer.is_home = is_home;
    if (is_home) {
      for (const auto& [name, value] : answer.headers) {
        if (name.starts_with("x-linked-") || name.starts_with("x-repo-") || name == "etag") {
          linked.emplace(name, value);
        }
      }
    }
    const bool is_redirect = answer.status == 301 || answer.status == 302 || answer.status == 303 ||
                             answer.status == 307 || answer.status == 308;
    if (!is_redirect) {
      answer.linked = std::move(linked);
      return answer;
    }
    auto next = ResolveUrl(url, answer.Header("location"));
    if (!next.has_value()) {
      return Unexpected(DataLoss(fmt::format("{}: sends on to {}, which is no address",
                                             url.ForMessages(), Quote(answer.Header("location")))));
    }
    if (url.scheme == "https" && next->scheme != "https") {
      return Unexpected(DataLoss(fmt::format("{}: sends on to {}, which is not encrypted",
                                             url.ForMessages(), next->ForMessages())));
    }
    if (request.stays_home && next->Origin() != request.url.Origin()) {
      answer.linked = std::move(linked);
      return answer;
    }
    url = std::move(*next);
  }
  return Unexpected(DataLoss(fmt::format("{}: sends on more than {} times",
                                         request.url.ForMessages(), options.max_redirects)));
}

}  // namespace oscar::hub
