#include "hub/url.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "base/error_text.h"

namespace oscar::hub {
namespace {

constexpr size_t kMaxUrlBytes = 8000;  // what the HTTP library reads of a header line

std::string Lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string EitherCase(const char* small, const char* large) {
  std::string value = Variable(small);
  return value.empty() ? Variable(large) : value;
}

// Whether no_proxy names the host: "*", the host, or a domain that it lies in.
bool IsExempt(const std::string& host, const std::string& list) {
  for (size_t at = 0; at <= list.size();) {
    const size_t end = std::min(list.find(',', at), list.size());
    std::string part = Lower(list.substr(at, end - at));
    at = end + 1;
    part.erase(0, std::min(part.find_first_not_of(" \t"), part.size()));
    part.erase(part.find_last_not_of(" \t") + 1);
    if (const size_t colon = part.rfind(':'); colon != std::string::npos &&
                                              part.find(']', colon) == std::string::npos &&
                                              part.find(':') == colon) {
      part.resize(colon);
    }
    if (part == "*") return true;
    part.erase(0, std::min(part.find_first_not_of('.'), part.size()));
    if (part.empty()) continue;
    if (host == part || host.ends_with("." + part)) return true;
  }
  return false;
}

}  // namespace

std::string Url::Origin() const { return fmt::format("{}://{}:{}", scheme, host, port); }

std::string Url::ForMessages() const {
  const bool is_usual = port == (scheme == "https" ? 443 : 80);
  return fmt::format("{}://{}{}{}", scheme, host, is_usual ? "" : fmt::format(":{}", port),
                     Printable(target.substr(0, target.find('?'))));
}

Result<Url> ParseUrl(std::string_view text) {
  const auto refuse = [&](const char* why) {
    return Unexpected(
        InvalidArgument(fmt::format("{}: {}; give http://HOST or https://HOST", Quote(text), why)));
  };
  if (text.size() > kMaxUrlBytes) return refuse("an address too long");
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte <= 0x20 || byte >= 0x7f) return refuse("bytes that no address has");
  }
  Url url;
  const size_t end = text.find("://");
  url.scheme = Lower(text.substr(0, std::min(end, text.size())));
  if (end == std::string_view::npos || (url.scheme != "http" && url.scheme != "https")) {
    return refuse("not an address");
  }
  text.remove_prefix(end + 3);
  text = text.substr(0, text.find('#'));
  const size_t slash = std::min(text.find_first_of("/?"), text.size());
  std::string_view place = text.substr(0, slash);
  if (slash < text.size()) {
    url.target = text[slash] == '/' ? std::string(text.substr(slash))
                                    : "/" + std::string(text.substr(slash));
  }
  if (place.find('@') != std::string_view::npos) return refuse("an address with a user name");
  url.port = url.scheme == "https" ? 443 : 80;
  const size_t bracket = place.rfind(']');
  const size_t colon = place.rfind(':');
  if (colon != std::string_view::npos && (bracket == std::string_view::npos || colon > bracket)) {
    const std::string_view digits = place.substr(colon + 1);
    const auto [stop, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), url.port);
    if (error != std::errc() || stop != digits.data() + digits.size() || url.port < 1 ||
        url.port > 65535) {
      return refuse("no port");
    }
    place = place.substr(0, colon);
  }
  url.host = Lower(place);
  const bool is_six = url.host.starts_with('[') && url.host.ends_with(']');
  const std::string allowed = "abcdefghijklmnopqrstuvwxyz0123456789-._";
  if (url.host.empty() || (!is_six && url.host.find_first_not_of(allowed) != std::string::npos) ||
      (is_six && url.host.substr(1, url.host.size() - 2).find_first_not_of("0123456789abcdef:.") !=
                     std::string::npos)) {
    return refuse("no host");
  }
  return url;
}

Result<Url> ResolveUrl(const Url& base, std::string_view location) {
  if (location.find("://") != std::string_view::npos &&
      location.find("://") < location.find_first_of("/?#")) {
    return ParseUrl(location);
  }
  if (location.starts_with("//")) return ParseUrl(base.scheme + ":" + std::string(location));
  if (location.starts_with('/')) return ParseUrl(base.Origin() + std::string(location));
  const std::string path = base.target.substr(0, base.target.find('?'));
  return ParseUrl(base.Origin() + path.substr(0, path.rfind('/') + 1) + std::string(location));
}

std::string Escape(std::string_view text, std::string_view keep) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    const bool is_plain = (byte < 0x80 && std::isalnum(byte) != 0) ||
                          std::string_view("-._~").find(c) != std::string_view::npos ||
                          keep.find(c) != std::string_view::npos;
    out += is_plain ? std::string(1, c) : fmt::format("%{:02X}", byte);
  }
  return out;
}

std::string ProxyFor(const Url& url) {
  if (IsExempt(url.host, EitherCase("no_proxy", "NO_PROXY"))) return "";
  const std::string proxy =
      url.scheme == "https" ? EitherCase("https_proxy", "HTTPS_PROXY") : Variable("http_proxy");
  return proxy.empty() ? EitherCase("all_proxy", "ALL_PROXY") : proxy;
}

}  // namespace oscar::hub
