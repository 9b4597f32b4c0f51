// RequestReader: bytes of one connection in, HTTP requests out. Beast's parser reads heads; what
// two parties may read in two ways (folded lines, several lengths, other codings) is refused on top
// of it. Chunks are decoded here: Beast takes a quoted chunk extension beyond the end of its line.
// No sockets, no clock: feed it, in pieces of any size. After an error the connection must be
// closed. One thread.
#pragma once

#include <cstddef>
#include <cstdint>
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
    kHeadDone,  // request() has all but the body; ReadBody() continues, Reset() drops it
    kBody,      // wants more bytes of a body
    kDone,      // request() is complete; Reset() prepares for the next one
    kFailed,    // status() and message() say why
  };

  explicit RequestReader(const ReaderLimits& limits) : limits_(limits) {}

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
  enum class Chunk : uint8_t { kSize, kData, kDataEnd, kTrailer };
  State Fail(int status, std::string message);
  State ParseHead();
  State Advance();
  State AdvanceChunks();
  State TakeChunkLine();
  State ReadChunkSize(std::string_view line);
  State FailChunk(std::string_view what);
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
  uint64_t length_ = 0;  // of the body, or of the rest of a chunk's data
  Chunk chunk_ = Chunk::kSize;
  size_t trailer_bytes_ = 0;
  bool chunked_ = false, expects_continue_ = false, http_1_0_ = false, wants_close_ = false;
  int status_ = 0;
  std::string message_;
};

}  // namespace oscar::server
