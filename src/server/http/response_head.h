// The status line and headers of a response as they go out.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "http/http.h"

namespace oscar::server {

struct ResponseHeadOptions {
  bool close = false;
  bool chunked = false;
  std::optional<size_t> content_length;
};

std::string ResponseHeadText(const HttpResponse& response, const ResponseHeadOptions& options);

}  // namespace oscar::server
