// RequestReader: bytes of one connection in, HTTP requests out. Beast's parser reads the grammar;
// what RFC 9112 lets two parties read in two ways (folded lines, several lengths, other codings,
// odd chunk extensions) is refused on top of it. No sockets, no clock: feed it, in pieces of any
// size. After an error the connection must be closed. One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "http/http.h"

namespace oscar::server {

struct ReaderLimits {
  uint64_t max_body_bytes = uint64_t{16} << 20;
  uint64_t max_header_bytes = uint64_t{64} << 10;
  int max_headers = 128;
};

class RequestReader {
 public:
  enum class State : uint8_t {
    kHead,      // wants more bytes of a head
    kHeadDone,  // request() has all but the body; ReadBody() goes on, Reset() drops it
    kBody,      // wants more bytes of a body
    kDone,      // request() is complete; Reset() goes on to the next one
    kFailed,    // status() and message() say why
  };

  explicit RequestReader(const ReaderLimits& limits);
  ~RequestReader();

  // Takes over bytes from the wire; what belongs to later requests is kept for them.
  State Feed(std::string_view bytes);
  // After kHeadDone: whether there is a body, and how the client frames it.
  bool has_body() const { return chunked_ || length_ > 0; }
  bool expects_continue() const { return expects_continue_; }
  State ReadBody();
  // Starts the next request with what is buffered.
  State Reset();

  State state() const { return state_; }
  HttpRequest& request() { return request_; }
  bool http_1_0() const { return http_1_0_; }
  bool wants_close() const { return wants_close_; }
  // Bytes that arrived and were not yet part of a request.
  size_t buffered() const { return buffer_.size() - begin_; }
  // Some of the next head has arrived.
  bool head_begun() const { return buffered() > 0; }

  int status() const { return status_; }
  const std::string& message() const { return message_; }

 private:
  class Parser;
  State Fail(int status, std::string message);
  State ParseHead();
  State Advance();
  State AdvanceChunks();
  bool CheckTarget(std::string_view target);
  bool CheckFields();
  size_t AppendBody(std::string_view bytes);
  void Compact();

  const ReaderLimits limits_;
  std::string buffer_;
  size_t begin_ = 0;    // of what is not yet used
  size_t scanned_ = 0;  // of the head, searched for its end
  State state_ = State::kHead;
  HttpRequest request_;
  std::unique_ptr<Parser> parser_;  // of a chunked body, between head and end
  uint64_t length_ = 0;
  bool chunked_ = false, expects_continue_ = false, http_1_0_ = false, wants_close_ = false;
  int status_ = 0;
  std::string message_;
};

}  // namespace oscar::server
