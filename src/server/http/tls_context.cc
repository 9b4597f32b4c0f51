#include "http/tls_context.h"

#include <fmt/core.h>
#include <openssl/ssl.h>

#include <cstring>

#include "base/file.h"

namespace oscar::server {
namespace {

using Context = boost::asio::ssl::context;

constexpr uint64_t kMaxPemBytes = 1 << 20;

// Of what a client offers, http/1.1 or nothing.
int SelectProtocol(SSL*, const unsigned char** out, unsigned char* out_size,
                   const unsigned char* offered, unsigned int offered_size, void*) {
  constexpr std::string_view kHttp11 = "http/1.1";
  for (unsigned int at = 0; at < offered_size;) {
    const unsigned int size = offered[at];
    if (at + 1 + size > offered_size) break;
    if (size == kHttp11.size() && std::memcmp(offered + at + 1, kHttp11.data(), size) == 0) {
      *out = offered + at + 1;
      *out_size = static_cast<unsigned char>(size);
      return SSL_TLSEXT_ERR_OK;
    }
    at += 1 + size;
  }
  return SSL_TLSEXT_ERR_NOACK;
}

}  // namespace

Result<std::unique_ptr<Context>> LoadTlsContext(const std::string& certificate,
                                                const std::string& key) {
  const auto read = [](const char* option, const std::string& path) -> Result<std::string> {
    auto text = ReadFile(path, kMaxPemBytes);
    if (text.has_value()) return text;
    // Whatever is wrong with it, the option is the user's.
    return Unexpected(InvalidArgument(fmt::format("{}: {}", option, text.error().message())));
  };
  OSCAR_ASSIGN_OR_RETURN(const std::string chain, read("--tls-cert", certificate));
  OSCAR_ASSIGN_OR_RETURN(const std::string secret, read("--tls-key", key));
  auto context = std::make_unique<Context>(Context::tls_server);
  SSL_CTX* const native = context->native_handle();
  SSL_CTX_set_min_proto_version(native, TLS1_2_VERSION);
  SSL_CTX_set_options(native, SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION);
  // A waiting connection gives its record buffers back.
  SSL_CTX_set_mode(native, SSL_MODE_RELEASE_BUFFERS);
  SSL_CTX_set_alpn_select_cb(native, SelectProtocol, nullptr);
  boost::system::error_code error;
  // A key that needs a password would ask for it on the terminal.
  context->set_password_callback([](size_t, Context::password_purpose) { return std::string(); },
                                 error);
  context->use_certificate_chain(boost::asio::buffer(chain), error);
  if (error) {
    return Unexpected(InvalidArgument(
        fmt::format("--tls-cert {}: not a PEM certificate ({}); give the file that begins with "
                    "-----BEGIN CERTIFICATE-----",
                    certificate, error.message())));
  }
  context->use_private_key(boost::asio::buffer(secret), Context::pem, error);
  // The library checks at once that the key is the certificate's.
  if (error || SSL_CTX_check_private_key(native) != 1) {
    return Unexpected(InvalidArgument(fmt::format(
        "--tls-key {}: not the private key of {} ({}); give its PEM key without a password", key,
        certificate, error ? error.message() : "key values mismatch")));
  }
  return context;
}

}  // namespace oscar::server
