#include "emulator/fatbin.h"

#include <cstdint>
#include <cstring>

namespace oscar::emulator {

namespace {

constexpr uint32_t kMagic = 0xba55ed50;
constexpr uint16_t kKindPtx = 1;
constexpr uint64_t kFlagLz4 = 0x2000, kFlagZstd = 0x8000;

struct Header {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;
};
struct Entry {
  uint16_t kind, version;
  uint32_t header_bytes;
  uint64_t bytes;
  uint32_t compressed_bytes, options_offset;
  uint16_t minor, major;
  uint32_t architecture;
  uint32_t name_offset, name_bytes;
  uint64_t flags;
};

}  // namespace

std::vector<PtxText> PtxOf(const void* data, std::string* error) {
  std::vector<PtxText> texts;
  const char* at = static_cast<const char*>(data);
  Header header;
  std::memcpy(&header, at, sizeof(header));
  if (header.magic != kMagic) {
    *error = "the embedded device code is not a container this emulator knows";
    return texts;
  }
  at += header.header_bytes;
  const char* end = at + header.bytes;
  while (at < end) {
    Entry entry;
    std::memcpy(&entry, at, sizeof(entry));
    if (entry.kind == kKindPtx) {
      if ((entry.flags & (kFlagLz4 | kFlagZstd)) != 0) {
        *error = "the embedded PTX is compressed: compile with -no-compress";
      } else {
        std::string_view text(at + entry.header_bytes, entry.bytes);
        text = text.substr(0, text.find('\0'));
        texts.push_back({text, static_cast<int>(entry.architecture)});
      }
    }
    at += entry.header_bytes + entry.bytes;
  }
  if (texts.empty() && error->empty()) {
    *error = "no PTX is embedded: compile for a virtual architecture (code=compute_90a)";
  }
  return texts;
}

}  // namespace oscar::emulator
