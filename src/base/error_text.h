// Text from hostile files inside one-line error messages.
#pragma once

#include <fmt/core.h>

#include <string>
#include <string_view>

namespace oscar {

// Control and non-ASCII bytes as \xNN, cut after `max_bytes`, so that a file cannot break the line,
// drive a terminal, or flood a log.
inline std::string Printable(std::string_view text, size_t max_bytes = 200) {
  std::string out;
  for (const char c : text.substr(0, max_bytes)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  if (text.size() > max_bytes) out += "...";
  return out;
}

inline std::string Quote(std::string_view text) {
  return fmt::format("'{}'", Printable(text, 120));
}

}  // namespace oscar
