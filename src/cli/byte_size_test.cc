#include "cli/byte_size.h"

#include <gtest/gtest.h>

namespace oscar::cli {
namespace {

TEST(ByteSize, NumbersAndUnits) {
  const std::pair<const char*, uint64_t> cases[] = {
      {"0", 0},
      {"1", 1},
      {"18446744073709551615", UINT64_MAX},
      {"9007199254740993", 9007199254740993},  // no double holds it
      {"12 B", 12},
      {"1k", 1024},
      {"3KB", 3 * 1024},
      {"512KiB", 512 * 1024},
      {"64MiB", uint64_t{64} << 20},
      {"1.5GiB", uint64_t{3} << 29},
      {".5g", uint64_t{1} << 29},
      {"0.25 TiB", uint64_t{1} << 38},
      {"1.0000001", 1},
  };
  for (const auto& [text, bytes] : cases) {
    const auto parsed = ParseByteSize(text);
    ASSERT_TRUE(parsed.has_value()) << text;
    EXPECT_EQ(*parsed, bytes) << text;
  }
}

TEST(ByteSize, NonsenseIsRefused) {
  for (const char* text : {"", "-5", "-1GiB", "GiB", "1.5.5G", "1,5GiB", "8GiBs", "0x10", "inf",
                           "nan", "1e", ".", "18446744073709551616", "16777216TiB", "1e30", "+1"}) {
    const auto parsed = ParseByteSize(text);
    ASSERT_FALSE(parsed.has_value()) << text << " is " << *parsed;
    EXPECT_EQ(parsed.error().message().find('\n'), std::string::npos);
  }
}

}  // namespace
}  // namespace oscar::cli
