#include "http/socket_channel.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace oscar::server {
namespace {

using std::chrono::milliseconds;

int PollTimeout(SocketChannel::Clock::time_point deadline) {
  const auto left = std::chrono::ceil<milliseconds>(deadline - SocketChannel::Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

}  // namespace

SocketChannel::SocketChannel(int fd, int wake_fd, milliseconds write_timeout)
    : fd_(fd), wake_fd_(wake_fd), write_timeout_(write_timeout) {}

SocketChannel::~SocketChannel() { ::close(fd_); }

SocketChannel::Wait SocketChannel::WaitForRequest(milliseconds timeout) {
  if (HasBufferedInput()) return Wait::kReadable;
  const auto deadline = Clock::now() + timeout;
  while (true) {
    pollfd fds[2] = {{fd_, POLLIN, 0}, {wake_fd_, POLLIN, 0}};
    const int ready = ::poll(fds, 2, PollTimeout(deadline));
    if (ready < 0 && errno == EINTR) continue;
    if (ready < 0) return Wait::kClosed;
    if (ready == 0) return Wait::kTimeout;
    if ((fds[0].revents & POLLIN) != 0) {
      char byte;
      const ssize_t peeked = ::recv(fd_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
      if (peeked > 0) return Wait::kReadable;
      if (peeked < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      return Wait::kClosed;
    }
    if (fds[0].revents != 0) return Wait::kClosed;
    if (fds[1].revents != 0) return Wait::kWoken;
  }
}

void SocketChannel::SetReadBudget(uint64_t bytes, milliseconds timeout) {
  budget_bytes_ = bytes;
  deadline_ = Clock::now() + timeout;
}

ssize_t SocketChannel::Read(char* out, size_t size) {
  if (failure_ != Failure::kNone) return -1;
  if (size == 0) return 0;
  if (budget_bytes_ == 0) {
    failure_ = Failure::kTooLarge;
    return -1;
  }
  while (begin_ == end_) {
    pollfd entry = {fd_, POLLIN, 0};
    const int ready = ::poll(&entry, 1, PollTimeout(deadline_));
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0) {
      failure_ = Failure::kTimeout;
      return -1;
    }
    const ssize_t got = ready < 0 ? -1 : ::recv(fd_, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (got <= 0) {
      failure_ = Failure::kClosed;
      return got;
    }
    begin_ = 0;
    end_ = static_cast<size_t>(got);
  }
  const size_t count =
      static_cast<size_t>(std::min<uint64_t>({size, end_ - begin_, budget_bytes_}));
  std::memcpy(out, buffer_.data() + begin_, count);
  begin_ += count;
  budget_bytes_ -= count;
  return static_cast<ssize_t>(count);
}

ssize_t SocketChannel::Write(const char* data, size_t size) {
  if (write_failed_) return -1;
  size_t done = 0;
  while (done < size) {
    const ssize_t sent = ::send(fd_, data + done, size - done, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      done += static_cast<size_t>(sent);
      continue;
    }
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) {
      pollfd entry = {fd_, POLLOUT, 0};
      const int ready = ::poll(&entry, 1, static_cast<int>(write_timeout_.count()));
      if (ready < 0 && errno == EINTR) continue;
      if (ready > 0 && (entry.revents & (POLLERR | POLLHUP | POLLNVAL)) == 0) continue;
    }
    write_failed_ = true;
    return -1;
  }
  return static_cast<ssize_t>(size);
}

bool SocketChannel::PeerGone() const {
  if (write_failed_) return true;
  pollfd entry = {fd_, POLLRDHUP, 0};
  if (::poll(&entry, 1, 0) <= 0) return false;
  return (entry.revents & (POLLRDHUP | POLLERR | POLLHUP | POLLNVAL)) != 0;
}

void SocketChannel::LingerAndClose(uint64_t max_bytes, milliseconds timeout) {
  ::shutdown(fd_, SHUT_WR);
  const auto deadline = Clock::now() + timeout;
  uint64_t discarded = 0;
  while (discarded < max_bytes) {
    pollfd entry = {fd_, POLLIN, 0};
    const int ready = ::poll(&entry, 1, PollTimeout(deadline));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return;
    const ssize_t got = ::recv(fd_, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (got <= 0) return;
    discarded += static_cast<uint64_t>(got);
  }
}

std::string SocketChannel::PeerAddress() const {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  char host[NI_MAXHOST];
  if (::getpeername(fd_, reinterpret_cast<sockaddr*>(&address), &length) != 0 ||
      ::getnameinfo(reinterpret_cast<sockaddr*>(&address), length, host, sizeof(host), nullptr, 0,
                    NI_NUMERICHOST) != 0) {
    return "?";
  }
  return host;
}

}  // namespace oscar::server
