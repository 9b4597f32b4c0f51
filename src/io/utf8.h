// UTF-8 validation for strings that enter or leave files.
#pragma once

#include <cstdint>
#include <string_view>

namespace oscar {

// True for well-formed UTF-8: no overlong forms, surrogates or values beyond U+10FFFF.
inline bool IsValidUtf8(std::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    const auto lead = static_cast<uint8_t>(text[i++]);
    if (lead < 0x80) continue;
    const size_t more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
    if (lead < 0xc2 || lead > 0xf4 || text.size() - i < more) return false;
    uint32_t code = lead & (0x3fu >> more);
    for (size_t j = 0; j < more; ++j) {
      const auto next = static_cast<uint8_t>(text[i++]);
      if ((next & 0xc0) != 0x80) return false;
      code = code << 6 | (next & 0x3fu);
    }
    constexpr uint32_t kSmallest[] = {0, 0x80, 0x800, 0x10000};
    if (code < kSmallest[more] || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) {
      return false;
    }
  }
  return true;
}

}  // namespace oscar
