// Shared by the fuzz targets. Properties are stated with OSCAR_CHECK, which aborts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/check.h"
#include "oscar/status.h"

namespace oscar {

inline std::span<const std::byte> FuzzBytes(const uint8_t* data, size_t size) {
  return std::as_bytes(std::span(data, size));
}

inline std::string_view FuzzText(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

// An error is one line of bounded length that starts with what was parsed; it never says that we
// are at fault.
inline void CheckError(const Status& status, std::string_view what) {
  OSCAR_CHECK(!status.ok() && status.code() != StatusCode::kInternal, "{}", status.ToString());
  OSCAR_CHECK(status.message().rfind(what, 0) == 0, "{}", status.message());
  OSCAR_CHECK(status.message().size() < 2000, "{}", status.message());
  for (const char c : status.message()) {
    OSCAR_CHECK(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f, "control character in: {}",
                status.message());
  }
}

}  // namespace oscar
