// SocketChannel: one accepted TCP connection with budgets. Reads are bounded in bytes and in time
// for the whole of a request's head and for the whole of its body, so that a client that trickles
// cannot hold a thread for long; writes are bounded in time without progress. Owns the descriptor.
// Used by the connection's thread alone.
#pragma once

#include <sys/types.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

namespace oscar::server {

class SocketChannel {
 public:
  using Clock = std::chrono::steady_clock;

  enum class Failure : uint8_t { kNone, kTooLarge, kTimeout, kClosed };
  enum class Wait : uint8_t { kReadable, kTimeout, kClosed, kWoken };

  // `wake_fd` becomes readable when the server stops; it interrupts waiting between requests, never
  // a request.
  SocketChannel(int fd, int wake_fd, std::chrono::milliseconds write_timeout);
  ~SocketChannel();
  SocketChannel(const SocketChannel&) = delete;
  SocketChannel& operator=(const SocketChannel&) = delete;

  // Waits for the first byte of the next request.
  Wait WaitForRequest(std::chrono::milliseconds timeout);
  // Starts a budget: at most `bytes` more, all of them before `timeout` has passed.
  void SetReadBudget(uint64_t bytes, std::chrono::milliseconds timeout);

  // As read(2): 0 at the end, -1 on error or when the budget is spent; failure() says which.
  ssize_t Read(char* out, size_t size);
  // Writes everything or returns -1.
  ssize_t Write(const char* data, size_t size);
  Failure failure() const { return failure_; }
  bool write_failed() const { return write_failed_; }

  bool HasBufferedInput() const { return begin_ < end_; }
  // The peer has closed or reset the connection. A client that only shuts down its sending side
  // counts as gone: no HTTP client in use does that while it waits for an answer.
  bool PeerGone() const;

  // Ends our side and discards what the client is still sending (bounded), so that the last
  // response is read and not lost to a reset.
  void LingerAndClose(uint64_t max_bytes, std::chrono::milliseconds timeout);

  int fd() const { return fd_; }
  std::string PeerAddress() const;

 private:
  int fd_;
  int wake_fd_;
  std::chrono::milliseconds write_timeout_;
  std::array<char, 16384> buffer_;
  size_t begin_ = 0, end_ = 0;
  uint64_t budget_bytes_ = 0;
  Clock::time_point deadline_;
  Failure failure_ = Failure::kNone;
  bool write_failed_ = false;
};

}  // namespace oscar::server
