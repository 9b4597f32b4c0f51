// Transport: a TCP connection, plain or under TLS, as the connection's state machine uses it: one
// read and one write under way at most. A plain connection that waits has no buffer. For .cc files
// of this module; everything runs on the connection's strand.
#pragma once

#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/strand.hpp>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace oscar::server {

using Strand = boost::asio::strand<boost::asio::io_context::executor_type>;
using Socket = boost::asio::basic_stream_socket<boost::asio::ip::tcp, Strand>;
using ErrorCode = boost::system::error_code;

class Transport {
 public:
  // `tls` null: plain.
  Transport(Socket socket, boost::asio::ssl::context* tls);

  // Each calls `done` once, later; never from within the call.
  void Handshake(std::function<void(ErrorCode)> done);
  // At most `max` bytes, good until the function returns. An end of the stream is an error `eof`.
  void Read(size_t max, std::function<void(ErrorCode, std::string_view)> done);
  void Write(std::array<boost::asio::const_buffer, 2> buffers,
             std::function<void(ErrorCode, size_t)> done);
  // After the peer ended its side: called when the connection breaks for good. Plain only.
  void AwaitReset(std::function<void()> gone);
  // Says that nothing more will be sent.
  void ShutdownSend(std::function<void()> done);
  void Close();

  bool is_tls() const { return tls_ != nullptr; }
  // Bytes have arrived that nobody has read.
  bool HasInput();
  std::string PeerAddress() const;
  Strand strand() { return socket_.get_executor(); }

 private:
  Socket socket_;
  std::unique_ptr<boost::asio::ssl::stream<Socket&>> tls_;
  std::vector<char> tls_buffer_;
};

}  // namespace oscar::server
