#include "engine/page_file.h"

#include <fmt/core.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <iterator>

namespace oscar {

uint64_t PageFileBytes(size_t payload_bytes) {
  return sizeof(PageFileHeader) + payload_bytes + sizeof(uint64_t);
}

std::string FormatPageFile(const PageRecord& record, uint64_t key) {
  PageFileHeader header{};
  std::memcpy(header.magic, kPageFileMagic, sizeof(kPageFileMagic));
  header.key = key;
  header.parent = record.parent;
  header.hash = record.hash;
  header.payload_bytes = record.payload.size();
  header.index = static_cast<uint32_t>(record.index);
  header.sealed = record.in_window ? 2 : record.sealed ? 1 : 0;
  std::copy_n(record.tokens.begin(), kPageTokens, header.tokens);
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  bytes.append(reinterpret_cast<const char*>(record.payload.data()), record.payload.size());
  const uint64_t checksum = XXH3_64bits(bytes.data(), bytes.size());
  return bytes.append(reinterpret_cast<const char*>(&checksum), sizeof(checksum));
}

Result<PageRecord> ParsePageFile(std::string_view bytes, uint64_t hash,
                                 const PageFileFormat& format) {
  PageFileHeader header;
  uint64_t checksum = 0;
  if (bytes.size() < sizeof(header) + sizeof(checksum)) {
    return Unexpected(DataLoss("shorter than its header"));
  }
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (std::memcmp(header.magic, kPageFileMagic, sizeof(kPageFileMagic)) != 0 ||
      header.key != format.key) {
    return Unexpected(DataLoss("not a page of this model and format"));
  }
  const size_t expected = header.sealed == 1 ? format.sealed_bytes : format.open_bytes;
  if (header.payload_bytes != expected || bytes.size() != PageFileBytes(expected)) {
    return Unexpected(
        DataLoss(fmt::format("has {} bytes, a page of {} was expected", bytes.size(), expected)));
  }
  const size_t body = sizeof(header) + expected;
  std::memcpy(&checksum, bytes.data() + body, sizeof(checksum));
  if (checksum != XXH3_64bits(bytes.data(), body)) return Unexpected(DataLoss("checksum differs"));
  const uint64_t computed =
      XXH3_64bits_withSeed(header.tokens, sizeof(header.tokens), header.parent) ^
      (header.sealed == 2 ? kWindowPage : 0);
  if (header.hash != computed || computed != hash || header.index > kMaxPageIndex ||
      header.sealed > 2) {
    return Unexpected(DataLoss("its name and its tokens disagree"));
  }
  PageRecord record;
  record.parent = header.parent;
  record.hash = hash;
  record.index = header.index;
  record.sealed = header.sealed == 1;
  record.in_window = header.sealed == 2;
  record.tokens.assign(std::begin(header.tokens), std::end(header.tokens));
  const auto* payload = reinterpret_cast<const std::byte*>(bytes.data()) + sizeof(header);
  record.payload.assign(payload, payload + expected);
  return record;
}

}  // namespace oscar
