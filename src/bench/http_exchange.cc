#include "bench/http_exchange.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <limits>
#include <memory>

#include "base/error_text.h"

namespace oscar {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMaxHead = size_t{64} << 10;
constexpr size_t kMaxChunkLine = 1024;
constexpr uint64_t kMaxBody = uint64_t{1} << 30;
constexpr uint64_t kUntilClose = std::numeric_limits<uint64_t>::max();

std::string Lower(std::string_view text) {
  std::string out(text);
  std::ranges::transform(out, out.begin(), [](unsigned char c) {
    return static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  });
  return out;
}

// A connection whose every wait ends at the deadline.
class Connection {
 public:
  Connection(const ServerAddress& address, Clock::time_point deadline)
      : name_(fmt::format("{}:{}", address.host, address.port)), deadline_(deadline) {}
  ~Connection() {
    if (fd_ >= 0) ::close(fd_);
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  Status Open(const ServerAddress& address) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (const int error = ::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(),
                                        &hints, &found);
        error != 0) {
      return Unavailable(fmt::format("{}: {}", name_, ::gai_strerror(error)));
    }
    const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> list(found, ::freeaddrinfo);
    Status status = Unavailable(fmt::format("{}: no address", name_));
    for (const addrinfo* entry = list.get(); entry != nullptr; entry = entry->ai_next) {
      status = ConnectTo(*entry);
      if (status.ok()) return status;
    }
    return status;
  }

  Status SendAll(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent > 0) {
        bytes.remove_prefix(static_cast<size_t>(sent));
      } else if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) {
        OSCAR_RETURN_IF_ERROR(Wait(POLLOUT));
      } else if (errno == EPIPE || errno == ECONNRESET) {
        return {};  // it may have answered before it closed
      } else {
        return Failed("send");
      }
    }
    return {};
  }

  // Empty at the end.
  Result<std::string_view> Receive() {
    while (true) {
      const ssize_t got = ::recv(fd_, buffer_.data(), buffer_.size(), 0);
      if (got >= 0) return std::string_view(buffer_.data(), static_cast<size_t>(got));
      if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
        return Unexpected(Failed("receive"));
      }
      OSCAR_RETURN_IF_ERROR(Wait(POLLIN));
    }
  }

  Status CheckTime() const { return Clock::now() < deadline_ ? Status{} : TooLate(); }
  const std::string& name() const { return name_; }

 private:
  Status ConnectTo(const addrinfo& entry) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = ::socket(entry.ai_family, entry.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC,
                   entry.ai_protocol);
    if (fd_ < 0) return Failed("socket");
    const int on = 1;
    ::setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    if (::connect(fd_, entry.ai_addr, entry.ai_addrlen) == 0) return {};
    if (errno != EINPROGRESS) return Failed("connect");
    OSCAR_RETURN_IF_ERROR(Wait(POLLOUT));
    int error = 0;
    socklen_t size = sizeof(error);
    ::getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &size);
    errno = error;
    return error == 0 ? Status{} : Failed("connect");
  }
  Status Wait(int16_t events) const {
    while (true) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now());
      if (left.count() <= 0) return TooLate();
      pollfd entry{fd_, events, 0};
      const int ready =
          ::poll(&entry, 1, static_cast<int>(std::min<int64_t>(left.count(), 60'000)));
      if (ready > 0) return {};
      if (ready < 0 && errno != EINTR) return Failed("poll");
    }
  }
  Status Failed(const char* what) const {
    return Unavailable(fmt::format("{}: {}: {}", name_, what, std::strerror(errno)));
  }
  Status TooLate() const {
    return {StatusCode::kDeadlineExceeded, fmt::format("{}: no answer in time", name_)};
  }

  std::string name_;
  Clock::time_point deadline_;
  int fd_ = -1;
  std::array<char, 16384> buffer_{};
};

// The head of a response and how its body is framed.
struct Head {
  int status = 0;
  bool chunked = false;
  uint64_t length = kUntilClose;
};

Result<Head> ParseHead(std::string_view text) {
  const auto wrong = [&] {
    return Unexpected(DataLoss(fmt::format("not an HTTP response: {}", Quote(text.substr(0, 60)))));
  };
  Head head;
  std::string_view line = text.substr(0, text.find('\n'));
  if (!line.starts_with("HTTP/1.") || line.size() < 12 || line[8] != ' ') return wrong();
  const auto parsed = std::from_chars(line.data() + 9, line.data() + 12, head.status);
  if (parsed.ec != std::errc() || head.status < 100) return wrong();
  while (!text.empty()) {
    line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    const std::string lower = Lower(line.substr(0, line.find_last_not_of("\r \t") + 1));
    const size_t colon = std::min(lower.find(':'), lower.size());
    const std::string_view name = std::string_view(lower).substr(0, colon);
    std::string_view value = std::string_view(lower).substr(std::min(colon + 1, lower.size()));
    value.remove_prefix(std::min(value.find_first_not_of(" \t"), value.size()));
    if (name == "transfer-encoding") head.chunked = value.ends_with("chunked");
    if (name == "content-length") {
      const char* const end = value.data() + value.size();
      const auto number = std::from_chars(value.data(), end, head.length);
      if (number.ec != std::errc() || number.ptr != end) return wrong();
    }
  }
  return head;
}

// Takes chunked framing off bytes as they come.
class Dechunker {
 public:
  // Calls `on_data` with what is data in `bytes`; true: the last chunk has come.
  template <typename OnData>
  Result<bool> Feed(std::string_view bytes, const OnData& on_data) {
    while (!bytes.empty()) {
      if (left_ > 0) {
        const std::string_view data =
            bytes.substr(0, static_cast<size_t>(std::min<uint64_t>(left_, bytes.size())));
        left_ -= data.size();
        bytes.remove_prefix(data.size());
        OSCAR_ASSIGN_OR_RETURN(const bool enough, on_data(data));
        if (enough) return true;
        continue;
      }
      const char c = bytes.front();
      bytes.remove_prefix(1);
      if (c != '\n') {
        if (line_.size() >= kMaxChunkLine) return Wrong();
        line_ += c;
        continue;
      }
      const std::string line = std::exchange(line_, {});
      if (line == "\r" || line.empty()) continue;  // after a chunk's data
      const auto parsed = std::from_chars(line.data(), line.data() + line.size(), left_, 16);
      if (parsed.ec != std::errc() || left_ > kMaxBody) return Wrong();
      if (left_ == 0) return true;
    }
    return false;
  }

 private:
  static Result<bool> Wrong() { return Unexpected(DataLoss("chunks that are none")); }
  std::string line_;
  uint64_t left_ = 0;
};

}  // namespace

Result<ServerAddress> ParseServerAddress(std::string_view url) {
  ServerAddress address;
  const auto refuse = [&] {
    return Unexpected(InvalidArgument(
        fmt::format("'{}' is not the address of a server; expected http://HOST:PORT", url)));
  };
  constexpr std::string_view kScheme = "http://";
  std::string_view rest = url;
  if (!rest.starts_with(kScheme)) return refuse();
  rest.remove_prefix(kScheme.size());
  std::string_view authority = rest.substr(0, rest.find('/'));
  const std::string_view path = rest.substr(authority.size());
  if (!path.empty() && path != "/" && path != "/v1" && path != "/v1/") return refuse();
  const size_t colon = authority.rfind(':');
  address.port = 80;
  if (colon != std::string_view::npos && authority.find(']', colon) == std::string_view::npos) {
    const std::string_view port = authority.substr(colon + 1);
    const auto parsed = std::from_chars(port.data(), port.data() + port.size(), address.port);
    if (parsed.ec != std::errc() || parsed.ptr != port.data() + port.size()) return refuse();
    if (address.port < 1 || address.port > 65535) return refuse();
    authority = authority.substr(0, colon);
  }
  if (authority.starts_with('[') && authority.ends_with(']')) {
    authority = authority.substr(1, authority.size() - 2);
  }
  if (authority.empty()) return refuse();
  address.host = authority;
  return address;
}

Result<int> RunExchange(const ServerAddress& address, const Exchange& exchange,
                        const OnPiece& on_piece) {
  Connection connection(address, Clock::now() + exchange.timeout);
  OSCAR_RETURN_IF_ERROR(connection.Open(address));
  const bool is_ipv6 = address.host.find(':') != std::string::npos;
  std::string request = fmt::format(
      "{} {} HTTP/1.1\r\nHost: {}:{}\r\nAccept: */*\r\nConnection: close\r\n", exchange.method,
      exchange.path, is_ipv6 ? "[" + address.host + "]" : address.host, address.port);
  if (!address.api_key.empty()) {
    request += fmt::format("Authorization: Bearer {}\r\n", address.api_key);
  }
  if (!exchange.body.empty()) {
    request += fmt::format("Content-Type: application/json\r\nContent-Length: {}\r\n",
                           exchange.body.size());
  }
  OSCAR_RETURN_IF_ERROR(connection.SendAll(request + "\r\n" + exchange.body));

  std::string text;  // of the head, and what came with it
  Head head;
  while (head.status < 200) {  // 1xx: another follows
    size_t end = text.find("\r\n\r\n");
    for (; end == std::string::npos; end = text.find("\r\n\r\n")) {
      if (text.size() > kMaxHead) {
        return Unexpected(
            DataLoss(fmt::format("{}: the response's head is too long", connection.name())));
      }
      OSCAR_ASSIGN_OR_RETURN(const std::string_view piece, connection.Receive());
      if (piece.empty()) {
        return Unexpected(Unavailable(
            fmt::format("{}: closed the connection without an answer", connection.name())));
      }
      OSCAR_RETURN_IF_ERROR(connection.CheckTime());
      text += piece;
    }
    OSCAR_ASSIGN_OR_RETURN(head, ParseHead(std::string_view(text).substr(0, end)));
    text.erase(0, end + 4);
  }
  const int status = head.status;
  uint64_t received = 0;
  Dechunker dechunker;
  const auto on_data = [&](std::string_view data) -> Result<bool> {
    received += data.size();
    if (received > kMaxBody) return Unexpected(DataLoss("the response is too long"));
    return on_piece(status, data);
  };
  if (head.length == 0 && !head.chunked) return status;
  std::string_view piece = text;
  while (true) {
    if (!piece.empty()) {
      if (head.chunked) {
        OSCAR_ASSIGN_OR_RETURN(const bool ended, dechunker.Feed(piece, on_data));
        if (ended) return status;
      } else {
        if (head.length != kUntilClose) {
          piece = piece.substr(
              0, static_cast<size_t>(std::min<uint64_t>(piece.size(), head.length - received)));
        }
        OSCAR_ASSIGN_OR_RETURN(const bool enough, on_data(piece));
        if (enough || received == head.length) return status;
      }
    }
    OSCAR_ASSIGN_OR_RETURN(piece, connection.Receive());
    OSCAR_RETURN_IF_ERROR(connection.CheckTime());
    if (!piece.empty()) continue;
    if (!head.chunked && head.length == kUntilClose) return status;
    return Unexpected(
        Unavailable(fmt::format("{}: closed the connection within its answer", connection.name())));
  }
}

}  // namespace oscar
