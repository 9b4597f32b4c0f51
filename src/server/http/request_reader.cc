#include "http/request_reader.h"

#include <fmt/core.h>
#include <strings.h>

#include <algorithm>
#include <array>
#include <boost/beast/http/basic_parser.hpp>
#include <boost/beast/http/error.hpp>
#include <cctype>
#include <limits>
#include <utility>

namespace oscar::server {
namespace {

namespace http = boost::beast::http;
using boost::beast::error_code;

constexpr size_t kMaxTarget = 8192;
// A chunk's line, or the trailer: clients that send long ones have nothing to say with them.
constexpr size_t kMaxChunkLine = 8192;
constexpr size_t kMaxChunkExtension = 256;
constexpr size_t kFirstBytes = size_t{64} << 10;
constexpr std::array<std::string_view, 8> kMethods = {"GET",     "HEAD",  "POST",  "PUT",
                                                      "OPTIONS", "PATCH", "TRACE", "DELETE"};

bool EqualsIgnoringCase(std::string_view a, std::string_view b) {
  return a.size() == b.size() && ::strncasecmp(a.data(), b.data(), a.size()) == 0;
}

std::string_view Trim(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

// Whether a list such as "foo, close" names `token`.
bool ListNames(std::string_view list, std::string_view token) {
  while (true) {
    const size_t comma = std::min(list.find(','), list.size());
    if (EqualsIgnoringCase(Trim(list.substr(0, comma)), token)) return true;
    if (comma == list.size()) return false;
    list.remove_prefix(comma + 1);
  }
}

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// "%41" becomes "A"; what is no escape stays.
std::string DecodePath(std::string_view path) {
  std::string out;
  for (size_t i = 0; i < path.size(); ++i) {
    const int high = path[i] == '%' && i + 2 < path.size() ? HexDigit(path[i + 1]) : -1;
    const int low = high >= 0 ? HexDigit(path[i + 2]) : -1;
    if (low < 0) {
      out += path[i];
      continue;
    }
    out += static_cast<char>(high * 16 + low);
    i += 2;
  }
  return out;
}

bool IsTokenCharacter(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return std::isalnum(byte) != 0 ||
         std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos;
}

bool HasControl(std::string_view text) {
  return std::any_of(text.begin(), text.end(),
                     [](unsigned char c) { return c < 0x20 || c == 0x7f; });
}

}  // namespace

// What Beast finds in a head, put into a request. It never sees a body.
class RequestReader::Parser final : public http::basic_parser<true> {
 public:
  Parser(HttpRequest& request, uint64_t max_body) : request_(request) {
    eager(true);
    header_limit(std::numeric_limits<uint32_t>::max());  // the reader has bounded it
    body_limit(max_body);
  }
  const std::string& target() const { return target_; }
  int version() const { return version_; }

 private:
  using View = boost::beast::string_view;

  void on_request_impl(http::verb, View method, View target, int version, error_code&) override {
    request_.method.assign(method.data(), method.size());
    target_.assign(target.data(), target.size());
    version_ = version;
  }
  void on_field_impl(http::field, View name, View value, error_code&) override {
    request_.headers.emplace_back(std::string(name.data(), name.size()),
                                  std::string(value.data(), value.size()));
  }
  void on_header_impl(error_code&) override {}
  void on_body_init_impl(const boost::optional<uint64_t>&, error_code&) override {}
  size_t on_body_impl(View, error_code&) override { return 0; }
  void on_chunk_header_impl(uint64_t, View, error_code&) override {}
  size_t on_chunk_body_impl(uint64_t, View, error_code&) override { return 0; }
  void on_finish_impl(error_code&) override {}
  void on_response_impl(int, View, int, error_code&) override {}

  HttpRequest& request_;
  std::string target_;
  int version_ = 0;
};

RequestReader::State RequestReader::Fail(int status, std::string message) {
  status_ = status;
  message_ = std::move(message);
  return state_ = State::kFailed;
}

RequestReader::State RequestReader::Feed(std::string_view bytes) {
  if (state_ == State::kBody && !chunked_ && buffered() == 0) {
    // The usual large case, without a detour through the buffer.
    bytes.remove_prefix(AppendBody(bytes));
  }
  Compact();
  buffer_.append(bytes);
  return Advance();
}

// Takes what belongs to a body of known length. Space for all of it is taken once some has arrived,
// so that a large body does not move as it grows and a mere claim costs nothing.
size_t RequestReader::AppendBody(std::string_view bytes) {
  std::string& body = request_.body;
  const size_t take = static_cast<size_t>(std::min<uint64_t>(bytes.size(), length_ - body.size()));
  if (body.size() + take > kFirstBytes) body.reserve(static_cast<size_t>(length_));
  body.append(bytes.substr(0, take));
  return take;
}

// Gives the used part of the buffer back, and all of it where a large one is no longer needed.
void RequestReader::Compact() {
  buffer_.erase(0, begin_);
  scanned_ -= std::min(scanned_, begin_);
  begin_ = 0;
  if (buffer_.empty() && buffer_.capacity() > 4096) std::string().swap(buffer_);
}

RequestReader::State RequestReader::Advance() {
  switch (state_) {
    case State::kHead:
      return ParseHead();
    case State::kBody:
      break;
    default:
      return state_;
  }
  if (chunked_) return AdvanceChunks();
  begin_ += AppendBody(std::string_view(buffer_).substr(begin_));
  if (request_.body.size() == length_) state_ = State::kDone;
  return state_;
}

RequestReader::State RequestReader::ParseHead() {
  // A line end or two before a request is what some clients leave behind (RFC 9112, 2.2).
  while (buffered() >= 2 && buffer_.compare(begin_, 2, "\r\n") == 0) begin_ += 2;
  const size_t from = std::max(begin_, scanned_ < begin_ + 3 ? begin_ : scanned_ - 3);
  const size_t end = buffer_.find("\r\n\r\n", from);
  const size_t size = end == std::string::npos ? buffered() : end + 4 - begin_;
  if (size > limits_.max_header_bytes) return Fail(431, "the headers are too large");
  if (end == std::string::npos) {
    scanned_ = buffer_.size();
    return state_;
  }
  const std::string_view head = std::string_view(buffer_).substr(begin_, size);
  for (size_t at = head.find("\r\n"); at + 2 < head.size(); at = head.find("\r\n", at + 2)) {
    if (head[at + 2] == ' ' || head[at + 2] == '\t') {
      return Fail(400, "malformed HTTP request: a folded header line");
    }
  }
  Parser parser(request_, limits_.max_body_bytes);
  error_code error;
  parser.put(boost::asio::const_buffer(head.data(), head.size()), error);
  if (error == http::error::multiple_content_length || error == http::error::bad_content_length ||
      error == http::error::bad_transfer_encoding) {
    return Fail(400, fmt::format("malformed HTTP request: {}", error.message()));
  }
  if (error == http::error::body_limit) {
    if (!CheckTarget(parser.target())) return state_;
    const std::string* length = FindHeader(request_.headers, "Content-Length");
    return Fail(413, fmt::format("the body has {} bytes; the limit is {}",
                                 length == nullptr ? "more" : *length, limits_.max_body_bytes));
  }
  if (error) return Fail(400, fmt::format("malformed HTTP request: {}", error.message()));
  if (!parser.is_header_done()) return Fail(400, "malformed HTTP request");
  begin_ += size;
  scanned_ = begin_;
  http_1_0_ = parser.version() == 10;
  if (!CheckTarget(parser.target()) || !CheckFields()) return state_;
  return state_ = State::kHeadDone;
}

bool RequestReader::CheckTarget(std::string_view target) {
  if (std::find(kMethods.begin(), kMethods.end(), request_.method) == kMethods.end()) {
    Fail(400, "malformed HTTP request: unknown method");
    return false;
  }
  if (target.size() > kMaxTarget) {
    Fail(414, "the request target is too long");
    return false;
  }
  // The absolute form names the host once more (RFC 9112, 3.2.2).
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (target.size() <= scheme.size() ||
        !EqualsIgnoringCase(target.substr(0, scheme.size()), scheme)) {
      continue;
    }
    const size_t slash = target.find_first_of("/?", scheme.size());
    target = slash == std::string_view::npos ? "/" : target.substr(slash);
    break;
  }
  const size_t question = target.find('?');
  if (question != std::string_view::npos) request_.query = target.substr(question + 1);
  request_.path = DecodePath(target.substr(0, question));
  if (request_.path.empty()) request_.path = "/";
  const bool asterisk = request_.path == "*" && request_.method == "OPTIONS";
  if ((request_.path.front() != '/' && !asterisk) || HasControl(request_.path)) {
    Fail(400, "malformed HTTP request: the target is not a path");
    return false;
  }
  return true;
}

bool RequestReader::CheckFields() {
  const auto refuse = [this](int status, std::string message) {
    Fail(status, std::move(message));
    return false;
  };
  const HttpHeaders& headers = request_.headers;
  if (static_cast<int>(headers.size()) > limits_.max_headers) {
    return refuse(431, fmt::format("more than {} header fields", limits_.max_headers));
  }
  const auto count = [&](std::string_view name) {
    return std::count_if(headers.begin(), headers.end(), [&](const auto& header) {
      return EqualsIgnoringCase(header.first, name);
    });
  };
  const auto hosts = count("Host");
  if (hosts > 1 || (hosts == 0 && !http_1_0_)) {
    return refuse(400, "malformed HTTP request: one Host header is required");
  }
  const auto lengths = count("Content-Length"), encodings = count("Transfer-Encoding");
  if (lengths + encodings > 1) {
    return refuse(400, "conflicting Content-Length or Transfer-Encoding headers");
  }
  if (encodings == 1 &&
      (http_1_0_ || !EqualsIgnoringCase(*FindHeader(headers, "Transfer-Encoding"), "chunked"))) {
    return refuse(400, "Transfer-Encoding must be chunked");
  }
  chunked_ = encodings == 1;
  length_ = 0;
  if (lengths == 1) {
    const std::string& text = *FindHeader(headers, "Content-Length");
    if (text.empty() || text.size() > 18 ||
        text.find_first_not_of("0123456789") != std::string::npos) {
      return refuse(400, "Content-Length is not a number of bytes");
    }
    length_ = std::stoull(text);
    if (length_ > limits_.max_body_bytes) {
      return refuse(413, fmt::format("the body has {} bytes; the limit is {}", length_,
                                     limits_.max_body_bytes));
    }
  }
  const std::string& method = request_.method;
  if (lengths + encodings == 0 && (method == "POST" || method == "PUT" || method == "PATCH")) {
    return refuse(411, "a Content-Length is required");
  }
  const std::string* expect = FindHeader(headers, "Expect");
  expects_continue_ =
      expect != nullptr && EqualsIgnoringCase(*expect, "100-continue") && !http_1_0_;
  wants_close_ = http_1_0_;
  for (const auto& [name, value] : headers) {
    if (EqualsIgnoringCase(name, "Connection") && ListNames(value, "close")) wants_close_ = true;
  }
  return true;
}

RequestReader::State RequestReader::ReadBody() {
  if (state_ != State::kHeadDone) return state_;
  state_ = has_body() ? State::kBody : State::kDone;
  return Advance();
}

RequestReader::State RequestReader::AdvanceChunks() {
  while (state_ == State::kBody && buffered() > 0) {
    switch (chunk_) {
      case Chunk::kSize:
      case Chunk::kTrailer:
        if (buffer_.find("\r\n", begin_) == std::string::npos) {
          if (buffered() > kMaxChunkLine) return FailChunk("a line without an end");
          return state_;
        }
        TakeChunkLine();
        break;
      case Chunk::kData: {
        const size_t take = static_cast<size_t>(std::min<uint64_t>(buffered(), length_));
        request_.body.append(buffer_, begin_, take);
        begin_ += take;
        length_ -= take;
        if (length_ == 0) chunk_ = Chunk::kDataEnd;
        break;
      }
      case Chunk::kDataEnd:
        if (buffer_[begin_] != '\r' || (buffered() > 1 && buffer_[begin_ + 1] != '\n')) {
          return FailChunk("data longer than its size");
        }
        if (buffered() < 2) return state_;
        begin_ += 2;
        chunk_ = Chunk::kSize;
        break;
    }
  }
  return state_;
}

RequestReader::State RequestReader::FailChunk(std::string_view what) {
  return Fail(400, fmt::format("malformed HTTP request: chunked body: {}", what));
}

// A size, or a field of the trailer. Trailers say nothing that anybody here wants to know; they are
// checked and dropped.
RequestReader::State RequestReader::TakeChunkLine() {
  const size_t end = buffer_.find("\r\n", begin_);
  const std::string_view line = std::string_view(buffer_).substr(begin_, end - begin_);
  begin_ = end + 2;
  if (line.size() > kMaxChunkLine) return FailChunk("a line without an end");
  if (HasControl(line)) return FailChunk("a control character");
  if (chunk_ == Chunk::kSize) return ReadChunkSize(line);
  if (line.empty()) return state_ = State::kDone;
  trailer_bytes_ += line.size();
  const size_t name = std::find_if_not(line.begin(), line.end(), IsTokenCharacter) - line.begin();
  if (name == 0 || name == line.size() || line[name] != ':' || trailer_bytes_ > kMaxChunkLine) {
    return FailChunk("a malformed trailer");
  }
  return state_;
}

RequestReader::State RequestReader::ReadChunkSize(std::string_view line) {
  constexpr size_t kMaxDigits = 16;
  const size_t digits =
      std::find_if(line.begin(), line.end(), [](char c) { return HexDigit(c) < 0; }) - line.begin();
  if (digits == 0 || digits > kMaxDigits) return FailChunk("a size that is no number");
  uint64_t size = 0;
  for (const char c : line.substr(0, digits)) size = size * 16 + static_cast<uint64_t>(HexDigit(c));
  // Extensions are for others (RFC 9112, 7.1.1): ";name", and what may follow.
  const std::string_view extension = line.substr(digits);
  if (!extension.empty() && (extension.size() < 2 || extension.size() > kMaxChunkExtension ||
                             extension[0] != ';' || !IsTokenCharacter(extension[1]))) {
    return FailChunk("a malformed size or extension");
  }
  if (size > limits_.max_body_bytes - request_.body.size()) {
    return Fail(413, "the body is over the limit");
  }
  length_ = size;
  chunk_ = size == 0 ? Chunk::kTrailer : Chunk::kData;
  return state_;
}

RequestReader::State RequestReader::Reset() {
  request_ = {};
  chunked_ = expects_continue_ = http_1_0_ = wants_close_ = false;
  length_ = trailer_bytes_ = 0;
  chunk_ = Chunk::kSize;
  state_ = State::kHead;
  scanned_ = begin_;
  Compact();
  return Advance();
}

}  // namespace oscar::server
