// Files of the prefix store: what is accepted is exactly what would be written.
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "engine/page_file.h"
#include "fuzz_util.h"

namespace oscar {
namespace {

constexpr PageFileFormat kFormat = {77, 200, 100};

void Check(std::string_view bytes, uint64_t hash) {
  const auto record = ParsePageFile(bytes, hash, kFormat);
  if (!record) return CheckError(record.error(), "");
  OSCAR_CHECK(record->hash == hash && record->tokens.size() == kPageTokens);
  OSCAR_CHECK(record->payload.size() == (record->sealed ? 100u : 200u));
  OSCAR_CHECK(record->index >= 0 && record->index <= int64_t{kMaxPageIndex});
  OSCAR_CHECK(FormatPageFile(*record, kFormat.key) == bytes);
}

}  // namespace
}  // namespace oscar

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace oscar;
  Check(FuzzText(data, size), 0);
  // Chance finds no checksum: make what can be made right, so that the rest is reached.
  std::string bytes(FuzzText(data, size));
  PageFileHeader header;
  if (bytes.size() < sizeof(header) + sizeof(uint64_t)) return 0;
  std::memcpy(&header, bytes.data(), sizeof(header));
  const size_t body = bytes.size() - sizeof(uint64_t);
  const auto seal = [&] {
    std::memcpy(bytes.data(), &header, sizeof(header));
    const uint64_t checksum = XXH3_64bits(bytes.data(), body);
    std::memcpy(bytes.data() + body, &checksum, sizeof(checksum));
  };
  std::copy_n(kPageFileMagic, sizeof(kPageFileMagic), header.magic);
  header.key = kFormat.key;
  seal();
  Check(bytes, header.hash);
  header.hash = XXH3_64bits_withSeed(header.tokens, sizeof(header.tokens), header.parent);
  seal();
  Check(bytes, header.hash);
  return 0;
}
