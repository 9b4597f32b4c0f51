// The file of one prefix page: a header, the page's bytes, and an XXH3 of both. Little-endian,
// without padding. Files are hostile: what is read is checked to the last byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cache/block_layout.h"
#include "oscar/status.h"

namespace oscar {

struct PageRecord {
  uint64_t parent = 0;  // chain hashes; see prefix_index.h
  uint64_t hash = 0;
  int64_t index = 0;  // of the page in its sequence
  bool sealed = false;
  // An open page that layers with a window see from where a text ends or diverges from others. Its
  // hash is that of the tokens, xor kWindowPage: the sealed page of the same tokens is another
  // file.
  bool in_window = false;
  std::vector<int32_t> tokens;     // [64]
  std::vector<std::byte> payload;  // the page's bytes
};

// What the files of a folder agree on.
struct PageFileFormat {
  uint64_t key = 0;
  size_t open_bytes = 0, sealed_bytes = 0;  // of a page's payload
};

inline constexpr char kPageFileMagic[8] = {'O', 'S', 'C', 'P', 'A', 'G', 'E', '1'};
inline constexpr uint64_t kWindowPage = 0x9e3779b97f4a7c15;
inline constexpr uint32_t kMaxPageIndex = 1u << 24;

struct PageFileHeader {
  char magic[8];
  uint64_t key;
  uint64_t parent;
  uint64_t hash;
  uint64_t payload_bytes;
  uint32_t index;
  uint32_t sealed;  // 1; 2: in_window
  int32_t tokens[kPageTokens];
};
static_assert(sizeof(PageFileHeader) == 48 + 4 * kPageTokens);
static_assert(std::is_trivially_copyable_v<PageFileHeader>);

// Of a whole file.
uint64_t PageFileBytes(size_t payload_bytes);
std::string FormatPageFile(const PageRecord& record, uint64_t key);
// A file whose name says `hash`. Errors do not name the file.
Result<PageRecord> ParsePageFile(std::string_view bytes, uint64_t hash,
                                 const PageFileFormat& format);

}  // namespace oscar
