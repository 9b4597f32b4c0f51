// Addresses of a hub and where it sends on to. Values; safe from any thread.
#pragma once

#include <string>
#include <string_view>

#include "oscar/status.h"

namespace oscar::hub {

struct Url {
  std::string scheme;  // "http" or "https"
  std::string host;    // lower case; an IPv6 address in brackets
  int port = 0;
  std::string target = "/";  // path and query, escaped
  // "https://host:port": what a token belongs to.
  std::string Origin() const;
  // Without the query, which may hold a signature.
  std::string ForMessages() const;
};

// Refuses other schemes, names and passwords in the address, and bytes that do not belong there.
Result<Url> ParseUrl(std::string_view text);
// Where `location`, the value of a redirect, leads from `base`.
Result<Url> ResolveUrl(const Url& base, std::string_view location);

// Everything but letters, digits and -._~ as %XX; `keep` stays as well.
std::string Escape(std::string_view text, std::string_view keep = "");

// The proxy for an address, from https_proxy, http_proxy, all_proxy and no_proxy (either case;
// of http_proxy the small form alone, since a web server's client sets the other). Empty: none.
std::string ProxyFor(const Url& url);

}  // namespace oscar::hub
