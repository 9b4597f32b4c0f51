// TlsContext: certificate and key as the server uses them. TLS 1.2 or later, HTTP/1.1 alone.
#pragma once

#include <boost/asio/ssl/context.hpp>
#include <memory>
#include <string>

#include "oscar/status.h"

namespace oscar::server {

// Both are PEM files; the first may hold a chain. Errors name the file and what to do.
Result<std::unique_ptr<boost::asio::ssl::context>> LoadTlsContext(const std::string& certificate,
                                                                  const std::string& key);

}  // namespace oscar::server
