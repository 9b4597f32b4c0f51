// UTF-8 decoding, the incremental detokenizer's stream and NFC. The first byte seeds the cuts.
#include "fuzz_util.h"
#include "text/detokenizer.h"
#include "text/unicode.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace oscar;
  if (size == 0) return 0;
  uint32_t state = data[0] + 1u;
  const std::string_view bytes = FuzzText(data + 1, size - 1);
  std::string replaced = ReplaceInvalidUtf8(bytes);
  OSCAR_CHECK(IsValidUtf8(replaced));
  OSCAR_CHECK(IsValidUtf8(bytes) == (replaced == bytes));
  Utf8Stream stream;
  std::string out;
  for (size_t at = 0; at < bytes.size();) {
    state = state * 1664525u + 1013904223u;
    const size_t count = 1 + (state >> 16) % 5;
    std::string piece;
    stream.Push(bytes.substr(at, count), &piece);
    OSCAR_CHECK(IsValidUtf8(piece));
    out += piece;
    at += count;
  }
  stream.Finish(&out);
  OSCAR_CHECK(out == replaced);

  std::vector<bool> marks(replaced.size());
  for (size_t i = 0; i < marks.size(); ++i) marks[i] = (state >> (i % 31)) & 1;
  std::string normal = replaced;
  const bool changed = NormalizeNfc(&normal, &marks);
  OSCAR_CHECK(changed == (normal != replaced));
  OSCAR_CHECK(marks.size() == normal.size() && IsValidUtf8(normal));
  std::string again = normal;
  OSCAR_CHECK(!NormalizeNfc(&again, nullptr));
  return 0;
}
