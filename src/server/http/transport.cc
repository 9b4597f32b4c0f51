#include "http/transport.h"

#include <poll.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <utility>

namespace oscar::server {
namespace {

constexpr size_t kReadBytes = size_t{64} << 10;
constexpr size_t kTlsReadBytes = size_t{16} << 10;

}  // namespace

Transport::Transport(Socket socket, boost::asio::ssl::context* tls) : socket_(std::move(socket)) {
  ErrorCode ignored;
  socket_.non_blocking(true, ignored);
  if (tls != nullptr) tls_ = std::make_unique<boost::asio::ssl::stream<Socket&>>(socket_, *tls);
}

void Transport::Handshake(std::function<void(ErrorCode)> done) {
  tls_->async_handshake(boost::asio::ssl::stream_base::server, std::move(done));
}

void Transport::Read(size_t max, std::function<void(ErrorCode, std::string_view)> done) {
  if (tls_ != nullptr) {
    tls_buffer_.resize(kTlsReadBytes);
    tls_->async_read_some(
        boost::asio::buffer(tls_buffer_.data(), std::min(max, tls_buffer_.size())),
        [this, done = std::move(done)](ErrorCode error, size_t size) {
          done(error, {tls_buffer_.data(), size});
        });
    return;
  }
  socket_.async_wait(Socket::wait_read,
                     [this, max, done = std::move(done)](ErrorCode error) mutable {
                       // One buffer per thread: thousands of connections that wait hold none.
                       thread_local std::vector<char> buffer(kReadBytes);
                       size_t size = 0;
                       if (!error) {
                         size = socket_.read_some(
                             boost::asio::buffer(buffer.data(), std::min(max, kReadBytes)), error);
                       }
                       if (error == boost::asio::error::would_block)
                         return Read(max, std::move(done));
                       done(error, {buffer.data(), size});
                     });
}

void Transport::Write(std::array<boost::asio::const_buffer, 2> buffers,
                      std::function<void(ErrorCode, size_t)> done) {
  if (tls_ != nullptr) {
    tls_->async_write_some(buffers, std::move(done));
  } else {
    socket_.async_write_some(buffers, std::move(done));
  }
}

void Transport::AwaitReset(std::function<void()> gone) {
  socket_.async_wait(Socket::wait_error, [this, gone = std::move(gone)](ErrorCode error) {
    if (error) return;
    pollfd entry = {socket_.native_handle(), 0, 0};
    if (::poll(&entry, 1, 0) > 0 && (entry.revents & (POLLERR | POLLHUP)) != 0) gone();
  });
}

void Transport::ShutdownSend(std::function<void()> done) {
  if (tls_ != nullptr) {
    tls_->async_shutdown([done = std::move(done)](ErrorCode) { done(); });
    return;
  }
  ErrorCode ignored;
  socket_.shutdown(Socket::shutdown_send, ignored);
  boost::asio::post(socket_.get_executor(), std::move(done));
}

void Transport::Close() {
  ErrorCode ignored;
  socket_.close(ignored);
}

bool Transport::HasInput() {
  ErrorCode error;
  return socket_.available(error) > 0 && !error;
}

std::string Transport::PeerAddress() const {
  ErrorCode error;
  const auto endpoint = socket_.remote_endpoint(error);
  return error ? "?" : endpoint.address().to_string();
}

}  // namespace oscar::server
