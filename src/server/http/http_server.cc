#include "http/http_server.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <malloc.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/log.h"
#include "http/connection.h"
#include "http/response_head.h"
#include "http/tls_context.h"

namespace oscar::server {
namespace {

using boost::asio::ip::tcp;
using std::chrono::milliseconds;

// How long to wait when the system has no descriptor for another connection.
constexpr milliseconds kAcceptPause{100};
// Memory goes back to the system this often at most: it costs a walk over the heap.
constexpr milliseconds kTrimInterval{500};

int ThreadsOf(const HttpOptions& options) {
  if (options.threads > 0) return options.threads;
  return static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 4u));
}

// What connections refer to; lives until the last of them is gone.
class Core final : public ConnectionHost, public std::enable_shared_from_this<Core> {
 public:
  Core(const HttpOptions& server_options, std::unique_ptr<boost::asio::ssl::context> tls)
      : ConnectionHost(server_options, ThreadsOf(server_options)),
        io(ThreadsOf(server_options)),
        tls_(std::move(tls)),
        strand_(boost::asio::make_strand(io.get_executor())),
        acceptor_(strand_),
        pause_(strand_),
        trim_(strand_) {}

  void Listen(const tcp& protocol, int fd) { acceptor_.assign(protocol, fd); }
  tcp::endpoint local() const { return acceptor_.local_endpoint(); }

  void StartAccepting() {
    boost::asio::post(strand_, [self = shared_from_this()] { self->Accept(); });
  }

  void StopAccepting() {
    stopping = true;
    boost::asio::post(strand_, [self = shared_from_this()] {
      ErrorCode ignored;
      self->acceptor_.close(ignored);
      self->pause_.cancel();
      self->trim_.cancel();
    });
    ForEach([](Connection& connection) { connection.CloseIfIdle(); });
  }

  bool WaitForConnections(milliseconds grace) {
    std::unique_lock lock(mutex_);
    return all_done_.wait_for(lock, grace, [this] { return connections_.empty(); });
  }
  void WaitForConnections() {
    std::unique_lock lock(mutex_);
    all_done_.wait(lock, [this] { return connections_.empty(); });
  }

  void CutOffAll() {
    ForEach([](Connection& connection) { connection.CutOff(); });
  }

  int num_connections() const {
    std::lock_guard lock(mutex_);
    return static_cast<int>(connections_.size());
  }

  bool Crowded() override { return num_connections() * 4 >= options.max_connections * 3; }

  void Ended(Connection& connection) override {
    std::shared_ptr<Connection> last;  // not destroyed under the lock
    std::lock_guard lock(mutex_);
    const auto at = connections_.find(&connection);
    if (at == connections_.end()) return;
    last = std::move(at->second);
    connections_.erase(at);
    if (connections_.empty()) all_done_.notify_all();
  }

  void MemoryFreed() override {
    boost::asio::post(strand_, [self = shared_from_this()] {
      if (self->trim_armed_ || self->stopping) return;
      self->trim_armed_ = true;
      self->trim_.expires_after(kTrimInterval);
      self->trim_.async_wait([self](ErrorCode error) {
        self->trim_armed_ = false;
        if (!error) self->workers.Post([] { ::malloc_trim(0); }, /*heavy=*/false);
      });
    });
  }

  boost::asio::io_context io;

 private:
  template <typename Function>
  void ForEach(const Function& function) {
    std::vector<std::shared_ptr<Connection>> all;
    {
      std::lock_guard lock(mutex_);
      for (const auto& [key, connection] : connections_) all.push_back(connection);
    }
    for (const auto& connection : all) function(*connection);
  }

  void Accept() {
    if (stopping || !acceptor_.is_open()) return;
    acceptor_.async_accept(boost::asio::make_strand(io.get_executor()),
                           [self = shared_from_this()](ErrorCode error, Socket socket) {
                             if (self->stopping) return;
                             if (!error) {
                               self->Admit(std::move(socket));
                             } else if (error != boost::asio::error::operation_aborted) {
                               LogWarning("server: accept: {}", error.message());
                               self->pause_.expires_after(kAcceptPause);
                               self->pause_.async_wait([self](ErrorCode) { self->Accept(); });
                               return;
                             }
                             self->Accept();
                           });
  }

  void Admit(Socket socket) {
    ErrorCode ignored;
    socket.set_option(tcp::no_delay(true), ignored);
    socket.set_option(boost::asio::socket_base::keep_alive(true), ignored);
    if (num_connections() >= options.max_connections) return Refuse(std::move(socket));
    auto connection =
        std::make_shared<Connection>(shared_from_this(), std::move(socket), tls_.get());
    {
      std::lock_guard lock(mutex_);
      connections_.emplace(connection.get(), connection);
    }
    connection->Start();
  }

  // Never blocks: a new connection's send buffer is empty.
  void Refuse(Socket socket) {
    ErrorCode ignored;
    HttpResponse response = handler->ProtocolError(503, "too many connections; try again later");
    handler->Finish({}, response);
    const std::string text =
        ResponseHeadText(response, {.close = true, .content_length = response.body.size()}) +
        response.body;
    socket.non_blocking(true, ignored);
    // Under TLS nothing can be said before a handshake.
    if (tls_ == nullptr) socket.write_some(boost::asio::buffer(text), ignored);
    socket.shutdown(Socket::shutdown_send, ignored);
  }

  std::unique_ptr<boost::asio::ssl::context> tls_;
  Strand strand_;
  boost::asio::basic_socket_acceptor<tcp, Strand> acceptor_;
  boost::asio::basic_waitable_timer<std::chrono::steady_clock,
                                    boost::asio::wait_traits<std::chrono::steady_clock>, Strand>
      pause_, trim_;
  bool trim_armed_ = false;  // of the strand
  mutable std::mutex mutex_;
  std::condition_variable all_done_;
  // Guarded by mutex_.
  std::unordered_map<Connection*, std::shared_ptr<Connection>> connections_;
};

class Server final : public HttpServer {
 public:
  explicit Server(std::shared_ptr<Core> core)
      : core_(std::move(core)),
        work_(boost::asio::make_work_guard(core_->io)),
        port_(core_->local().port()),
        is_loopback_(core_->local().address().is_loopback()) {}

  ~Server() override {
    Stop(milliseconds{0});
    if (!threads_.empty()) core_->WaitForConnections();
    core_->workers.Stop();
    work_.reset();
    for (std::thread& thread : threads_) thread.join();
    // What nobody ran, because nothing was started or too late, refers to the core that holds it.
    core_->io.restart();
    core_->io.poll();
  }

  int port() const override { return port_; }
  bool is_loopback() const override { return is_loopback_; }
  int num_connections() const override { return core_->num_connections(); }

  void Start(HttpHandler& handler) override {
    core_->handler = &handler;
    core_->StartAccepting();
    for (int i = 0; i < ThreadsOf(core_->options); ++i) {
      threads_.emplace_back([this] { Run(); });
    }
  }

  bool Stop(milliseconds grace) override {
    core_->StopAccepting();
    if (core_->WaitForConnections(grace)) return true;
    // Reads and writes in progress fail from here on: no client may hold the process any longer.
    core_->CutOffAll();
    return false;
  }

 private:
  void Run() {
    while (true) {
      try {
        core_->io.run();
        return;
      } catch (const std::exception& error) {  // bad_alloc
        LogError("server: connection: {}", error.what());
      }
    }
  }

  std::shared_ptr<Core> core_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  const int port_;
  const bool is_loopback_;
  std::vector<std::thread> threads_;
};

struct AddressList {
  addrinfo* head = nullptr;
  ~AddressList() {
    if (head != nullptr) ::freeaddrinfo(head);
  }
};

}  // namespace

Result<std::unique_ptr<HttpServer>> HttpServer::Bind(const HttpOptions& options) {
  std::unique_ptr<boost::asio::ssl::context> tls;
  if (!options.tls_certificate.empty() || !options.tls_key.empty()) {
    OSCAR_ASSIGN_OR_RETURN(tls, LoadTlsContext(options.tls_certificate, options.tls_key));
  }
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
    if (::bind(fd, at->ai_addr, at->ai_addrlen) == 0 && ::listen(fd, SOMAXCONN) == 0 &&
        ::fcntl(fd, F_SETFL, O_NONBLOCK) == 0) {
      auto core = std::make_shared<Core>(options, std::move(tls));
      core->Listen(at->ai_family == AF_INET6 ? tcp::v6() : tcp::v4(), fd);
      return std::make_unique<Server>(std::move(core));
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
