#include "http/http_server.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <httplib.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <set>
#include <system_error>
#include <thread>

#include "base/log.h"
#include "http/socket_channel.h"

namespace oscar::server {

const std::string* FindHeader(const HttpHeaders& headers, std::string_view name) {
  for (const auto& [key, value] : headers) {
    if (key.size() == name.size() && ::strncasecmp(key.data(), name.data(), name.size()) == 0) {
      return &value;
    }
  }
  return nullptr;
}

namespace {

using std::chrono::milliseconds;

// After a refusal, what the client is still sending is discarded up to here.
constexpr uint64_t kLingerBytes = uint64_t{64} << 20;
constexpr milliseconds kLingerTime{3000};
// With three quarters of the connections taken, idle ones make room quickly.
constexpr milliseconds kCrowdedKeepAlive{1000};

// One request on its way through the library, which hands its callbacks only its own types.
struct Exchange {
  SocketChannel* channel = nullptr;
  HttpRequest request;
  bool head_parsed = false;
  bool must_close = false;
  bool linger = false;
  bool http_1_0 = false;
  bool answered = false;
  // Found while the head was parsed, to be answered instead of routing.
  std::optional<HttpResponse> refusal;
};
thread_local Exchange* t_exchange = nullptr;

class LibraryStream final : public httplib::Stream {
 public:
  explicit LibraryStream(SocketChannel& channel) : channel_(channel) {}
  bool is_readable() const override { return channel_.failure() == SocketChannel::Failure::kNone; }
  bool is_writable() const override { return !channel_.PeerGone(); }
  ssize_t read(char* out, size_t size) override { return channel_.Read(out, size); }
  ssize_t write(const char* data, size_t size) override { return channel_.Write(data, size); }
  void get_remote_ip_and_port(std::string& ip, int& port) const override {
    ip = channel_.PeerAddress();
    port = 0;
  }
  void get_local_ip_and_port(std::string& ip, int& port) const override {
    ip.clear();
    port = 0;
  }
  socket_t socket() const override { return channel_.fd(); }

 private:
  SocketChannel& channel_;
};

class LibrarySink final : public StreamSink {
 public:
  LibrarySink(httplib::DataSink& sink, SocketChannel& channel) : sink_(sink), channel_(channel) {}
  bool Write(std::string_view bytes) override {
    return sink_.write(bytes.data(), bytes.size()) && !channel_.write_failed();
  }
  bool PeerGone() override { return channel_.PeerGone(); }

 private:
  httplib::DataSink& sink_;
  SocketChannel& channel_;
};

bool EqualsIgnoringCase(std::string_view a, std::string_view b) {
  return a.size() == b.size() && ::strncasecmp(a.data(), b.data(), a.size()) == 0;
}

class Server final : public HttpServer, private httplib::Server {
 public:
  Server(const HttpOptions& options, int listener, int port)
      : options_(options), listener_(listener), port_(port) {
    wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    // The library stops streams while its own socket is invalid.
    svr_sock_ = listener;
    set_payload_max_length(options_.max_body_bytes);
    set_pre_routing_handler([this](const httplib::Request& request, httplib::Response& response) {
      return PreRoute(request, response);
    });
    // Only these read a body; every other method is answered before routing. The path is "/" by
    // then: ours is in the exchange.
    const auto handle = [this](const httplib::Request& request, httplib::Response& response) {
      HandleBody(request, response);
    };
    Post("/", handle);
    Put("/", handle);
    Patch("/", handle);
    set_error_handler(
        HandlerWithResponse([this](const httplib::Request&, httplib::Response& response) {
          return FillError(response);
        }));
  }

  ~Server() override {
    Stop(milliseconds{0});
    std::unique_lock lock(mutex_);
    all_done_.wait(lock, [this] { return connections_ == 0; });
    svr_sock_ = INVALID_SOCKET;
    ::close(wake_);
  }

  int port() const override { return port_; }
  int num_connections() const override {
    std::lock_guard lock(mutex_);
    return connections_;
  }

  void Start(HttpHandler& handler) override {
    handler_ = &handler;
    acceptor_ = std::jthread([this] { AcceptLoop(); });
  }

  bool Stop(milliseconds grace) override {
    if (!stopping_.exchange(true)) {
      const uint64_t one = 1;
      if (::write(wake_, &one, sizeof(one)) < 0) LogError("server: cannot wake the acceptor");
    }
    if (acceptor_.joinable()) acceptor_.join();
    if (listener_ >= 0) ::close(std::exchange(listener_, -1));
    std::unique_lock lock(mutex_);
    if (all_done_.wait_for(lock, grace, [this] { return connections_ == 0; })) return true;
    // Reads and writes in progress fail from here on: no client may hold the process any longer.
    cut_off_ = true;
    for (const int fd : open_) ::shutdown(fd, SHUT_RDWR);
    return false;
  }

 private:
  void AcceptLoop() {
    while (!stopping_) {
      pollfd fds[2] = {{listener_, POLLIN, 0}, {wake_, POLLIN, 0}};
      if (::poll(fds, 2, -1) < 0 && errno != EINTR) {
        LogError("server: poll: {}", std::strerror(errno));
        return;
      }
      if (stopping_) return;
      if ((fds[0].revents & POLLIN) == 0) continue;
      const int fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (fd < 0) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
          LogWarning("server: accept: {}", std::strerror(errno));
          std::this_thread::sleep_for(milliseconds{100});
        }
        continue;
      }
      const int one = 1;
      ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
      ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one));
      StartConnection(fd);
    }
  }

  void StartConnection(int fd) {
    {
      std::lock_guard lock(mutex_);
      if (connections_ >= options_.max_connections) {
        RefuseConnection(fd);
        return;
      }
      ++connections_;
    }
    try {
      std::thread([this, fd] { ConnectionThread(fd); }).detach();
    } catch (const std::system_error& error) {
      LogWarning("server: cannot start a connection thread: {}", error.what());
      RefuseConnection(fd);
      EndConnection();
    }
  }

  // A whole response, for errors that the library has no way to answer.
  std::string RawError(int status, const char* reason, std::string_view message) {
    HttpResponse response = handler_->ProtocolError(status, message);
    handler_->Finish({}, response);
    std::string text = fmt::format("HTTP/1.1 {} {}\r\nContent-Type: {}\r\n", status, reason,
                                   response.content_type);
    for (const auto& [key, value] : response.headers) text += fmt::format("{}: {}\r\n", key, value);
    return text + fmt::format("Connection: close\r\nContent-Length: {}\r\n\r\n{}",
                              response.body.size(), response.body);
  }

  // Never blocks: a new connection's send buffer is empty.
  void RefuseConnection(int fd) {
    const std::string text =
        RawError(503, "Service Unavailable", "too many connections; try again later");
    if (::send(fd, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
      LogDebug("server: refused connection: {}", std::strerror(errno));
    }
    ::shutdown(fd, SHUT_WR);
    ::close(fd);
  }

  void EndConnection() {
    std::lock_guard lock(mutex_);
    if (--connections_ == 0) all_done_.notify_all();
  }

  void ConnectionThread(int fd) {
    try {
      SocketChannel channel(fd, wake_, options_.write_timeout);
      const OpenEntry entry(*this, fd);  // gone before the number is free for another socket
      ServeConnection(channel);
    } catch (const std::exception& error) {
      LogError("server: connection: {}", error.what());
    }
    EndConnection();
  }

  // A connection's socket in open_.
  class OpenEntry {
   public:
    OpenEntry(Server& server, int fd) : server_(server), fd_(fd) {
      std::lock_guard lock(server_.mutex_);
      server_.open_.insert(fd_);
      if (server_.cut_off_) ::shutdown(fd_, SHUT_RDWR);
    }
    ~OpenEntry() {
      std::lock_guard lock(server_.mutex_);
      server_.open_.erase(fd_);
    }
    OpenEntry(const OpenEntry&) = delete;
    OpenEntry& operator=(const OpenEntry&) = delete;

   private:
    Server& server_;
    const int fd_;
  };

  void ServeConnection(SocketChannel& channel) {
    bool first = true;
    while (true) {
      milliseconds idle = first ? options_.header_timeout : options_.keep_alive_timeout;
      if (num_connections() * 4 >= options_.max_connections * 3) {
        idle = std::min(idle, kCrowdedKeepAlive);
      }
      if (channel.WaitForRequest(idle) != SocketChannel::Wait::kReadable) return;
      first = false;
      Exchange exchange;
      exchange.channel = &channel;
      exchange.request.peer_gone = [&channel] { return channel.PeerGone(); };
      t_exchange = &exchange;
      channel.SetReadBudget(options_.max_header_bytes, options_.header_timeout);
      LibraryStream stream(channel);
      bool library_closes = false;
      const bool ok = process_request(stream, /*close_connection=*/stopping_, library_closes,
                                      [this](httplib::Request& request) { AfterHead(request); });
      t_exchange = nullptr;
      if (!exchange.answered) AnswerLostHead(channel);
      if (!ok || library_closes || !exchange.head_parsed || exchange.must_close || stopping_ ||
          channel.failure() != SocketChannel::Failure::kNone || channel.write_failed()) {
        // A client that was too slow has nothing on the way.
        if ((exchange.linger || !exchange.head_parsed) &&
            channel.failure() != SocketChannel::Failure::kTimeout) {
          channel.LingerAndClose(kLingerBytes, kLingerTime);
        }
        return;
      }
    }
  }

  // The library says nothing when the request line itself does not arrive.
  void AnswerLostHead(SocketChannel& channel) {
    std::string text;
    if (channel.failure() == SocketChannel::Failure::kTooLarge) {
      text = RawError(431, "Request Header Fields Too Large", "the headers are too large");
    } else if (channel.failure() == SocketChannel::Failure::kTimeout) {
      text = RawError(408, "Request Timeout", "the request did not arrive in time");
    }
    if (!text.empty()) channel.Write(text.data(), text.size());
  }

  // Called by the library between head and body.
  void AfterHead(httplib::Request& request) {
    Exchange& exchange = *t_exchange;
    exchange.head_parsed = true;
    exchange.http_1_0 = request.version == "HTTP/1.0";
    HttpRequest& out = exchange.request;
    out.method = request.method;
    out.path = request.path;
    const size_t question = request.target.find('?');
    if (question != std::string::npos) out.query = request.target.substr(question + 1);
    out.remote_address = exchange.channel->PeerAddress();
    for (const auto& [key, value] : request.headers) {
      // The library adds these to what the client sent.
      if (key == "REMOTE_ADDR" || key == "REMOTE_PORT" || key == "LOCAL_ADDR" ||
          key == "LOCAL_PORT") {
        continue;
      }
      out.headers.emplace_back(key, value);
    }
    if (const std::string* value = FindHeader(out.headers, "Connection");
        value != nullptr && EqualsIgnoringCase(*value, "close")) {
      exchange.must_close = true;
    }
    exchange.refusal = CheckFraming(request, exchange);
    // The library must not compress (it would buffer events), cut ranges out of answers, or match
    // paths by regular expressions.
    request.headers.erase("Accept-Encoding");
    request.headers.erase("Range");
    request.ranges.clear();
    request.path.assign(1, '/');
    if (exchange.refusal.has_value()) request.headers.erase("Expect");
    exchange.channel->SetReadBudget(options_.max_body_bytes + (uint64_t{64} << 10),
                                    options_.body_timeout);
  }

  // What would let two parties disagree on where a body ends, or let one grow without bound.
  std::optional<HttpResponse> CheckFraming(const httplib::Request& request, Exchange& exchange) {
    const auto refuse = [&](int status, std::string_view message) {
      exchange.must_close = exchange.linger = true;
      return handler_->ProtocolError(status, message);
    };
    if (static_cast<int>(exchange.request.headers.size()) > options_.max_headers) {
      return refuse(431, fmt::format("more than {} header fields", options_.max_headers));
    }
    const bool chunked = request.has_header("Transfer-Encoding");
    const size_t lengths = request.get_header_value_count("Content-Length");
    if (lengths > 1 || (chunked && lengths > 0)) {
      return refuse(400, "conflicting Content-Length or Transfer-Encoding headers");
    }
    if (chunked && !EqualsIgnoringCase(request.get_header_value("Transfer-Encoding"), "chunked")) {
      return refuse(400, "Transfer-Encoding must be chunked");
    }
    uint64_t length = 0;
    if (lengths == 1) {
      const std::string text = request.get_header_value("Content-Length");
      if (text.empty() || text.size() > 18 ||
          text.find_first_not_of("0123456789") != std::string::npos) {
        return refuse(400, "Content-Length is not a number of bytes");
      }
      length = std::stoull(text);
      if (length > options_.max_body_bytes) {
        return refuse(413, fmt::format("the body has {} bytes; the limit is {}", length,
                                       options_.max_body_bytes));
      }
    }
    const bool reads_body =
        request.method == "POST" || request.method == "PUT" || request.method == "PATCH";
    if (!reads_body && (chunked || length > 0)) exchange.must_close = exchange.linger = true;
    if (reads_body && !chunked && lengths == 0) {
      return refuse(411, "a Content-Length is required");
    }
    return std::nullopt;
  }

  httplib::Server::HandlerResponse PreRoute(const httplib::Request& request,
                                            httplib::Response& response) {
    Exchange& exchange = *t_exchange;
    std::optional<HttpResponse> answer = std::move(exchange.refusal);
    const bool has_body =
        request.method == "POST" || request.method == "PUT" || request.method == "PATCH";
    if (!answer.has_value()) {
      answer = Guarded(
          [&]() -> std::optional<HttpResponse> { return handler_->Admit(exchange.request); });
      if (answer.has_value() && has_body) exchange.must_close = exchange.linger = true;
    }
    if (!answer.has_value() && !has_body) {
      answer = Guarded([&] { return std::optional(handler_->Handle(exchange.request)); });
    }
    if (!answer.has_value()) return HandlerResponse::Unhandled;
    Send(std::move(*answer), response);
    return HandlerResponse::Handled;
  }

  void HandleBody(const httplib::Request& request, httplib::Response& response) {
    Exchange& exchange = *t_exchange;
    exchange.request.body = request.body;
    Send(*Guarded([&] { return std::optional(handler_->Handle(exchange.request)); }), response);
  }

  // Nothing that a handler throws (bad_alloc and its kin) may reach the library, which would put
  // the text of the exception into a header.
  template <typename Function>
  std::optional<HttpResponse> Guarded(const Function& function) {
    try {
      return function();
    } catch (const std::exception& error) {
      LogError("server: {} {}: {}", t_exchange->request.method, t_exchange->request.path,
               error.what());
      return handler_->ProtocolError(500, "internal error; the log has the cause");
    }
  }

  void Send(HttpResponse answer, httplib::Response& response) {
    Exchange& exchange = *t_exchange;
    exchange.answered = true;
    handler_->Finish(exchange.request, answer);
    if (answer.close) exchange.must_close = true;
    response.status = answer.status;
    for (const auto& [key, value] : answer.headers) response.set_header(key, value);
    if (exchange.must_close || exchange.http_1_0) response.set_header("Connection", "close");
    if (!answer.stream) {
      response.set_content(answer.body, answer.content_type);
      return;
    }
    const auto provide = [stream = std::move(answer.stream), channel = exchange.channel](
                             size_t, httplib::DataSink& sink) {
      LibrarySink adapter(sink, *channel);
      stream(adapter);
      sink.done();
      return !channel->write_failed();
    };
    if (exchange.http_1_0) {  // knows no chunks: the end of the connection ends the body
      exchange.must_close = true;
      response.set_content_provider(answer.content_type, provide);
    } else {
      response.set_chunked_content_provider(answer.content_type, provide);
    }
  }

  // Errors of the library's own making have a status and no body.
  httplib::Server::HandlerResponse FillError(httplib::Response& response) {
    if (!response.body.empty()) return HandlerResponse::Unhandled;
    Exchange& exchange = *t_exchange;
    exchange.answered = exchange.must_close = exchange.linger = true;
    int status = response.status;
    std::string_view message = "malformed HTTP request";
    switch (exchange.channel->failure()) {
      case SocketChannel::Failure::kTooLarge:
        status = exchange.head_parsed ? 413 : 431;
        message = exchange.head_parsed ? "the body is over the limit" : "the headers are too large";
        break;
      case SocketChannel::Failure::kTimeout:
        status = 408;
        message = "the request did not arrive in time";
        break;
      case SocketChannel::Failure::kClosed:
      case SocketChannel::Failure::kNone:
        if (status == 413) message = "the body is over the limit";
        if (status == 414) message = "the request target is too long";
        break;
    }
    HttpResponse answer = handler_->ProtocolError(status, message);
    handler_->Finish(exchange.request, answer);
    response.status = answer.status;
    for (const auto& [key, value] : answer.headers) response.set_header(key, value);
    response.set_header("Connection", "close");
    response.set_content(answer.body, answer.content_type);
    return HandlerResponse::Handled;
  }

  HttpOptions options_;
  int listener_;
  int port_;
  int wake_ = -1;
  HttpHandler* handler_ = nullptr;
  std::atomic<bool> stopping_{false};
  mutable std::mutex mutex_;
  std::condition_variable all_done_;
  int connections_ = 0;   // guarded by mutex_
  std::set<int> open_;    // their sockets; guarded by mutex_
  bool cut_off_ = false;  // guarded by mutex_
  std::jthread acceptor_;
};

struct AddressList {
  addrinfo* head = nullptr;
  ~AddressList() {
    if (head != nullptr) ::freeaddrinfo(head);
  }
};

int PortOf(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return 0;
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                             : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
}

}  // namespace

Result<std::unique_ptr<HttpServer>> HttpServer::Bind(const HttpOptions& options) {
  const std::string where = fmt::format("{}:{}", options.host, options.port);
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  AddressList addresses;
  const int found = ::getaddrinfo(options.host.c_str(), std::to_string(options.port).c_str(),
                                  &hints, &addresses.head);
  if (found != 0) {
    return Unexpected(
        InvalidArgument(fmt::format("--host {}: {}", options.host, ::gai_strerror(found))));
  }
  int error = EADDRNOTAVAIL;
  for (const addrinfo* at = addresses.head; at != nullptr; at = at->ai_next) {
    const int fd = ::socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, at->ai_protocol);
    if (fd < 0) {
      error = errno;
      continue;
    }
    // Restarting must not wait for old connections to time out; two servers on one port must fail.
    const int one = 1;
    ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (::bind(fd, at->ai_addr, at->ai_addrlen) == 0 && ::listen(fd, 512) == 0 &&
        ::fcntl(fd, F_SETFL, O_NONBLOCK) == 0) {
      return std::make_unique<Server>(options, fd, PortOf(fd));
    }
    error = errno;
    ::close(fd);
  }
  if (error == EADDRINUSE) {
    return Unexpected(Unavailable(
        fmt::format("{} is in use by another program; stop it or choose another --port", where)));
  }
  return Unexpected(
      Unavailable(fmt::format("cannot listen on {}: {}", where, std::strerror(error))));
}

}  // namespace oscar::server
