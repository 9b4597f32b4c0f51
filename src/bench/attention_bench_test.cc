#include "bench/attention_bench.h"

#include <gtest/gtest.h>

namespace oscar {
namespace {

AttentionBenchOptions Short(const std::string& bits) {
  AttentionBenchOptions options;
  options.contexts = {256};  // four pages
  options.kinds = {BlockKind::kInt2};
  options.seconds_per_row = 0.0;
  options.footprint_bytes = uint64_t{8} << 20;
  options.bits = bits;
  return options;
}

TEST(AttentionBench, HeadsHaveTheBitsThatAreNamed) {
  ThreadPool pool(1);
  constexpr uint64_t kInt2 = 64 * 128 * 4 / 8 + 512, kBit = 64 * 128 / 8;  // bytes of one block
  const auto report = RunAttentionBench(pool, Short("4/2,3/3"));
  ASSERT_TRUE(report.has_value()) << report.error().ToString();
  ASSERT_EQ(report->rows.size(), 2u);
  EXPECT_EQ(report->rows[0].bytes, 4 * 8 * kInt2);
  EXPECT_EQ(report->rows[1].name, "4/2,3/3");
  EXPECT_EQ(report->rows[1].bytes, 4 * (8 * kInt2 + 4 * kBit));
}

TEST(AttentionBench, OtherBitsAreRefused) {
  ThreadPool pool(1);
  for (const char* bits : {"4", "4/", "4/5", "1/2", "4/2,", ",4/2", "4/2 3/3", "4/2,3",
                           "2/2,2/2,2/2,2/2,2/2,2/2,2/2,2/2,2/2"}) {
    const auto report = RunAttentionBench(pool, Short(bits));
    ASSERT_FALSE(report.has_value()) << bits;
    EXPECT_EQ(report.error().code(), StatusCode::kInvalidArgument) << bits;
  }
}

}  // namespace
}  // namespace oscar
