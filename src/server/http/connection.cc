#include "http/connection.h"

#include <fmt/core.h>

#include <algorithm>
#include <boost/asio/bind_executor.hpp>
#include <boost/asio/post.hpp>
#include <exception>
#include <utility>

#include "base/log.h"
#include "http/response_head.h"

namespace oscar::server {
namespace {

using std::chrono::milliseconds;

// After a refusal, what the client is still sending is discarded up to here.
constexpr uint64_t kLingerBytes = uint64_t{64} << 20;
constexpr milliseconds kLingerTime{3000};
// When connections are scarce, idle ones make room quickly.
constexpr milliseconds kCrowdedKeepAlive{1000};
// Requests that a client sends ahead of their turn.
constexpr size_t kReadAhead = size_t{16} << 10;
constexpr size_t kReadBytes = size_t{64} << 10;
// Bodies of which only one at a time is parsed, and after which memory goes back to the system.
constexpr size_t kLargeBody = size_t{256} << 10;
// What every response begins with.
constexpr std::string_view kPrefix = "HTTP/1.1 ";

bool ReadsBody(const std::string& method) {
  return method == "POST" || method == "PUT" || method == "PATCH";
}

ReaderLimits LimitsOf(const HttpOptions& options) {
  return {options.max_body_bytes, options.max_header_bytes, options.max_headers};
}

}  // namespace

Connection::Connection(std::shared_ptr<ConnectionHost> host, Socket socket,
                       boost::asio::ssl::context* tls)
    : host_(std::move(host)),
      transport_(std::move(socket), tls),
      strand_(transport_.strand()),
      timer_(strand_),
      peer_address_(transport_.PeerAddress()),
      reader_(LimitsOf(host_->options)) {}

void Connection::Start() {
  boost::asio::post(strand_, [self = shared_from_this()] {
    if (!self->transport_.is_tls()) return self->AwaitRequest();
    self->phase_ = Phase::kHandshake;
    self->ArmTimer(Clock::now() + self->host_->options.header_timeout);
    self->transport_.Handshake([self](ErrorCode error) {
      if (self->phase_ == Phase::kClosed) return;
      if (error) {
        LogDebug("server: {}: TLS handshake: {}", self->peer_address_, error.message());
        return self->Close();
      }
      self->AwaitRequest();
    });
  });
}

void Connection::CloseIfIdle() {
  boost::asio::post(strand_, [self = shared_from_this()] {
    // A request that is already here is answered: it was sent before anybody could know.
    if (self->phase_ == Phase::kIdle && !self->transport_.HasInput()) self->Close();
  });
}

void Connection::CutOff() {
  boost::asio::post(strand_, [self = shared_from_this()] { self->Gone(); });
}

// ------------------------------------------------------------------------------------ reading

void Connection::AwaitRequest() {
  phase_ = Phase::kIdle;
  idle_since_ = Clock::now();
  ProcessInput();
}

void Connection::StartRead() {
  if (reading_ || half_closed_ || phase_ == Phase::kClosed) return;
  reading_ = true;
  const size_t max = phase_ == Phase::kHandling ? kReadAhead : kReadBytes;
  transport_.Read(max, [self = shared_from_this()](ErrorCode error, std::string_view bytes) {
    self->reading_ = false;
    self->OnRead(error, bytes);
  });
}

void Connection::OnRead(ErrorCode error, std::string_view bytes) {
  if (phase_ == Phase::kClosed) return;
  if (error) return OnEnd(error != boost::asio::error::eof);
  if (phase_ == Phase::kLinger) {
    lingered_ += bytes.size();
    if (lingered_ >= kLingerBytes) return Close();
    return StartRead();
  }
  try {
    reader_.Feed(bytes);
  } catch (const std::exception& failure) {
    LogError("server: reading a request: {}", failure.what());
    return Gone();
  }
  if (phase_ == Phase::kHandling || phase_ == Phase::kPaused) {
    if (reader_.buffered() < kReadAhead) StartRead();
    return;
  }
  ProcessInput();
}

// The client has ended its sending side, or the connection is broken.
void Connection::OnEnd(bool reset) {
  // Under TLS the end of one side is the end of both.
  if (reset || transport_.is_tls() || phase_ == Phase::kLinger) {
    if (phase_ == Phase::kHandling) return Gone();
    return Close();
  }
  half_closed_ = true;
  if (phase_ == Phase::kHandling) return Pump();
  if (phase_ != Phase::kPaused) ProcessInput();
}

void Connection::ProcessInput() {
  switch (reader_.state()) {
    case RequestReader::State::kHead:
      if (reader_.head_begun() && phase_ != Phase::kHead) {
        phase_ = Phase::kHead;
        deadline_ = Clock::now() + host_->options.header_timeout;
      }
      if (half_closed_) {
        if (phase_ == Phase::kHead) return Refuse(400, "the request ends in its head", false);
        return Close();
      }
      if (phase_ == Phase::kIdle && host_->stopping && !transport_.HasInput()) return Close();
      if (phase_ == Phase::kHead) {
        ArmTimer(deadline_);
      } else if (!CheckIdle()) {
        return;
      }
      return StartRead();
    case RequestReader::State::kHeadDone:
      return OnHead();
    case RequestReader::State::kBody:
      return ContinueBody();
    case RequestReader::State::kDone:
      return Dispatch(/*on_worker=*/true);
    case RequestReader::State::kFailed:
      return Refuse(reader_.status(), reader_.message(), /*linger=*/true);
  }
}

void Connection::OnHead() {
  HttpRequest& request = reader_.request();
  request.remote_address = peer_address_;
  first_request_ = false;
  is_http_1_0_ = reader_.http_1_0();
  is_head_ = request.method == "HEAD";
  close_after_ = reader_.wants_close();
  request_ = std::make_shared<HttpRequest>();
  request_->method = request.method;
  request_->path = request.path;
  std::optional<HttpResponse> refusal;
  HttpResponse failed = Guarded([&] {
    refusal = host_->handler->Admit(request);
    return HttpResponse();
  });
  if (failed.status != 200) refusal = std::move(failed);
  const bool unread = reader_.has_body() && (refusal.has_value() || !ReadsBody(request.method));
  if (unread) close_after_ = linger_after_ = true;
  if (refusal.has_value()) {
    if (ReadsBody(request.method)) close_after_ = linger_after_ = true;
    *request_ = std::move(request);
    return OnResponse(std::move(*refusal));
  }
  if (!ReadsBody(request.method)) return Dispatch(/*on_worker=*/false);
  phase_ = Phase::kBody;
  deadline_ = Clock::now() + host_->options.body_timeout;
  share_ = host_->budget.Open([weak = weak_from_this(), strand = strand_] {
    boost::asio::post(strand, [weak] {
      const auto self = weak.lock();
      if (self == nullptr || self->phase_ != Phase::kPaused) return;
      self->phase_ = Phase::kBody;
      self->deadline_ += Clock::now() - self->paused_at_;
      self->ProcessInput();
    });
  });
  const bool wait = reader_.expects_continue() && reader_.buffered() == 0;
  reader_.ReadBody();
  if (!wait) return ProcessInput();
  ArmTimer(Clock::now() + host_->options.write_timeout);
  Write("HTTP/1.1 100 Continue\r\n\r\n", "", [this] { ProcessInput(); });
}

void Connection::ContinueBody() {
  if (half_closed_) return Refuse(400, "the request ends in its body", false);
  const size_t size = reader_.request().body.size();
  if (!share_->Raise(size + reader_.buffered() + kReadBytes)) {
    phase_ = Phase::kPaused;
    paused_at_ = Clock::now();
    return ArmTimer(paused_at_ + host_->options.budget_timeout);
  }
  ArmTimer(deadline_);
  StartRead();
}

// ---------------------------------------------------------------------------------- answering

// Nothing that a handler throws (bad_alloc and its kin) may end the server.
template <typename Function>
HttpResponse Connection::Guarded(const Function& function) {
  try {
    return function();
  } catch (const std::exception& error) {
    LogError("server: {} {}: {}", request_->method, request_->path, error.what());
    return host_->handler->ProtocolError(500, "internal error; the log has the cause");
  }
}

void Connection::Dispatch(bool on_worker) {
  phase_ = Phase::kHandling;
  ++timer_number_;  // nothing is due while the handler works
  *request_ = std::move(reader_.request());
  request_->wake = [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (self == nullptr) return;
    if (self->wake_posted_.exchange(true)) return;
    boost::asio::post(self->strand_, [weak] {
      const auto still = weak.lock();
      if (still == nullptr) return;
      still->wake_posted_ = false;
      still->Pump();
    });
  };
  if (!on_worker) {
    OnResponse(Guarded([this] { return host_->handler->Handle(*request_); }));
    return;
  }
  const bool heavy = request_->body.size() > kLargeBody;
  host_->workers.Post(
      [self = shared_from_this(), heavy] {
        auto response = std::make_shared<HttpResponse>(
            self->Guarded([&] { return self->host_->handler->Handle(*self->request_); }));
        std::string().swap(self->request_->body);
        if (heavy) self->host_->MemoryFreed();
        boost::asio::post(self->strand_, [self, response] {
          self->share_.reset();
          self->OnResponse(std::move(*response));
        });
      },
      heavy);
  StartRead();  // to see whether the client is still there
}

void Connection::OnResponse(HttpResponse response) {
  phase_ = phase_ == Phase::kClosed ? Phase::kClosed : Phase::kHandling;
  if (response.source == nullptr) {
    if (phase_ != Phase::kClosed) SendWhole(std::move(response));
    return;
  }
  source_ = std::move(response.source);
  if (phase_ == Phase::kClosed) return Gone();
  StartRead();
  Pump();
}

// Asks the source, and sends what it has.
void Connection::Pump() {
  if (source_ == nullptr || writing_ || composing_ || phase_ != Phase::kHandling) return;
  AnswerSource::Peer peer = AnswerSource::Peer::kThere;
  if (half_closed_ && !probed_) {
    // A client that closed both sides answers the next bytes with a reset; one that only ended its
    // requests does not.
    probed_ = true;
    transport_.AwaitReset([self = shared_from_this()] { self->Gone(); });
    if (!stream_open_) {
      prefix_sent_ = true;
      return Write(Bytes(kPrefix), "", [this] { Pump(); });
    }
    peer = AnswerSource::Peer::kHalfClosed;
  }
  AnswerSource::Step step;
  HttpResponse failed = Guarded([&] {
    step = source_->Next(peer);
    return HttpResponse();
  });
  if (failed.status != 200) {
    if (stream_open_) return Gone();
    source_.reset();
    return SendWhole(std::move(failed));
  }
  if (step.compose) {
    composing_ = true;
    host_->workers.Post(
        [self = shared_from_this(), compose = std::move(step.compose)] {
          auto response = std::make_shared<HttpResponse>(self->Guarded(compose));
          boost::asio::post(self->strand_, [self, response] {
            self->composing_ = false;
            if (self->phase_ == Phase::kClosed) {
              self->source_.reset();
            } else {
              self->SendWhole(std::move(*response));
            }
          });
        },
        /*heavy=*/false);
    return;
  }
  if (step.head.has_value() && step.done && step.bytes.empty())
    return SendWhole(std::move(*step.head));
  Bytes out;
  if (step.head.has_value()) {
    out = HeadText(*step.head, /*stream=*/true);
    stream_open_ = true;
    if (is_head_) step.done = true;
  }
  if (!step.bytes.empty() && !is_head_) {
    out += is_http_1_0_ ? step.bytes : fmt::format("{:x}\r\n{}\r\n", step.bytes.size(), step.bytes);
  }
  if (step.done) {
    if (!is_http_1_0_ && !is_head_) out += "0\r\n\r\n";
    return Write(std::move(out), "", [this] { EndExchange(); });
  }
  if (!out.empty()) return Write(std::move(out), "", [this] { Pump(); });
  if (step.again != Clock::time_point::max()) {
    ArmTimer(step.again);
  } else {
    ++timer_number_;
  }
}

void Connection::Refuse(int status, std::string_view message, bool linger) {
  if (request_ == nullptr) {
    request_ = std::make_shared<HttpRequest>();
    request_->path = reader_.request().path;  // as far as it was read: errors differ between APIs
  }
  phase_ = Phase::kHandling;
  share_.reset();
  close_after_ = true;
  linger_after_ = linger;
  SendWhole(host_->handler->ProtocolError(status, message));
}

std::string Connection::HeadText(HttpResponse& response, bool stream) {
  Guarded([&] {
    host_->handler->Finish(*request_, response);
    return HttpResponse();
  });
  if (response.close || host_->stopping) close_after_ = true;
  ResponseHeadOptions options;
  options.close = close_after_;
  options.chunked = stream && !is_http_1_0_;
  if (!stream && response.status != 204) options.content_length = response.body.size();
  if (stream && is_http_1_0_) options.close = close_after_ = true;  // the end ends the body
  std::string text = ResponseHeadText(response, options);
  return prefix_sent_ ? text.substr(kPrefix.size()) : text;
}

void Connection::SendWhole(HttpResponse response) {
  std::string head = HeadText(response, /*stream=*/false);
  if (is_head_) response.body.clear();
  Write(std::move(head), std::move(response.body), [this] { EndExchange(); });
}

void Connection::EndExchange() {
  source_.reset();
  request_.reset();
  share_.reset();
  stream_open_ = prefix_sent_ = is_head_ = is_http_1_0_ = false;
  if (close_after_) {
    if (linger_after_ || transport_.is_tls()) return Linger();
    return Close();
  }
  reader_.Reset();
  AwaitRequest();
}

// ------------------------------------------------------------------------------------ writing

void Connection::Write(Bytes first, Bytes second, std::function<void()> then) {
  out_ = {std::move(first), std::move(second)};
  written_ = 0;
  writing_ = true;
  after_write_ = std::move(then);
  WriteMore();
}

void Connection::WriteMore() {
  ArmTimer(Clock::now() + host_->options.write_timeout);
  const size_t first = std::min(written_, out_[0].size());
  const size_t second = written_ - first;
  transport_.Write({boost::asio::buffer(out_[0].data() + first, out_[0].size() - first),
                    boost::asio::buffer(out_[1].data() + second, out_[1].size() - second)},
                   [self = shared_from_this()](ErrorCode error, size_t size) {
                     if (self->phase_ == Phase::kClosed) return;
                     if (error) return self->Gone();
                     self->written_ += size;
                     if (self->written_ < self->out_[0].size() + self->out_[1].size()) {
                       return self->WriteMore();
                     }
                     self->writing_ = false;
                     self->out_ = {};
                     ++self->timer_number_;
                     std::exchange(self->after_write_, nullptr)();
                   });
}

// ------------------------------------------------------------------------------ time and ends

void Connection::ArmTimer(Clock::time_point when) {
  timer_.expires_at(when);
  timer_.async_wait([self = shared_from_this(), number = ++timer_number_](ErrorCode error) {
    if (!error && number == self->timer_number_) self->OnTimer();
  });
}

// Closes a connection that has been idle for long, sooner when others need its place.
bool Connection::CheckIdle() {
  const HttpOptions& options = host_->options;
  milliseconds patience = first_request_ ? options.header_timeout : options.keep_alive_timeout;
  if (host_->Crowded()) patience = std::min(patience, kCrowdedKeepAlive);
  const auto now = Clock::now(), end = idle_since_ + patience;
  if (now >= end) {
    Close();
    return false;
  }
  ArmTimer(std::min(end, now + kCrowdedKeepAlive));
  return true;
}

void Connection::OnTimer() {
  if (phase_ == Phase::kClosed) return;
  if (writing_) return Gone();  // no progress
  switch (phase_) {
    case Phase::kIdle:
      CheckIdle();
      return;
    case Phase::kHead:
    case Phase::kBody:
      // A client that was too slow has nothing on the way.
      return Refuse(408, "the request did not arrive in time", /*linger=*/false);
    case Phase::kPaused:
      return Refuse(503, "too many bytes of requests are on the way; try again later", true);
    case Phase::kHandling:
      return Pump();
    case Phase::kHandshake:
    case Phase::kLinger:
    case Phase::kClosed:
      return Close();
  }
}

// Ends our side and discards what the client is still sending (bounded), so that the last response
// is read and not lost to a reset.
void Connection::Linger() {
  phase_ = Phase::kLinger;
  ArmTimer(Clock::now() + kLingerTime);
  transport_.ShutdownSend([self = shared_from_this()] {
    if (self->phase_ == Phase::kClosed) return;
    if (self->transport_.is_tls() || self->half_closed_) return self->Close();
    self->StartRead();
  });
}

void Connection::Gone() {
  if (source_ != nullptr && !composing_) {
    Guarded([&] {
      source_->Next(AnswerSource::Peer::kGone);
      return HttpResponse();
    });
    source_.reset();
  }
  Close();
}

void Connection::Close() {
  if (phase_ == Phase::kClosed) return;
  if (phase_ != Phase::kHandling) share_.reset();  // a worker may still read the body
  phase_ = Phase::kClosed;
  ++timer_number_;
  timer_.cancel();
  transport_.Close();
  if (!composing_) source_.reset();
  host_->Ended(*this);
}

}  // namespace oscar::server
