#include "http/response_head.h"

#include <fmt/core.h>
#include <strings.h>

#include <ctime>

namespace oscar::server {
namespace {

std::string_view ReasonOf(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 204:
      return "No Content";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 411:
      return "Length Required";
    case 413:
      return "Content Too Large";
    case 414:
      return "URI Too Long";
    case 415:
      return "Unsupported Media Type";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 500:
      return "Internal Server Error";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    default:
      return "Status";
  }
}

std::string Date() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  char text[64];
  return {text, std::strftime(text, sizeof(text), "%a, %d %b %Y %H:%M:%S GMT", &utc)};
}

}  // namespace

const std::string* FindHeader(const HttpHeaders& headers, std::string_view name) {
  for (const auto& [key, value] : headers) {
    if (key.size() == name.size() && ::strncasecmp(key.data(), name.data(), name.size()) == 0) {
      return &value;
    }
  }
  return nullptr;
}

std::string ResponseHeadText(const HttpResponse& response, const ResponseHeadOptions& options) {
  std::string text = fmt::format("HTTP/1.1 {} {}\r\nDate: {}\r\n", response.status,
                                 ReasonOf(response.status), Date());
  if (response.status != 204) text += fmt::format("Content-Type: {}\r\n", response.content_type);
  for (const auto& [key, value] : response.headers) text += fmt::format("{}: {}\r\n", key, value);
  if (options.content_length.has_value()) {
    text += fmt::format("Content-Length: {}\r\n", *options.content_length);
  }
  if (options.chunked) text += "Transfer-Encoding: chunked\r\n";
  if (options.close) text += "Connection: close\r\n";
  return text + "\r\n";
}

}  // namespace oscar::server
