#include "base/rng.h"

#include <gtest/gtest.h>

namespace oscar {
namespace {

TEST(Philox, MatchesPublishedVectors) {
  // Known-answer vectors of Random123 for philox4x32-10.
  EXPECT_EQ(Philox(0, 0).Block(0),
            (std::array<uint32_t, 4>{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  EXPECT_EQ(Philox(~0ull, ~0ull).Block(~0ull),
            (std::array<uint32_t, 4>{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
}

TEST(Philox, NormalHasUnitMoments) {
  const Philox rng(1, 2);
  double sum = 0, squares = 0, fourth = 0;
  constexpr int kCount = 200000;
  for (int i = 0; i < kCount; ++i) {
    const double x = rng.Normal(static_cast<uint64_t>(i));
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
  }
  EXPECT_NEAR(sum / kCount, 0.0, 0.01);      // 4.5 sigma
  EXPECT_NEAR(squares / kCount, 1.0, 0.02);  // 6 sigma
  EXPECT_NEAR(fourth / kCount, 3.0, 0.15);
}

TEST(Philox, BelowCoversItsRange) {
  const Philox rng(3, 0);
  std::array<int, 7> seen{};
  for (uint64_t i = 0; i < 7000; ++i) ++seen.at(rng.Below(i, 7));
  for (int count : seen) EXPECT_NEAR(count, 1000, 150);
}

}  // namespace
}  // namespace oscar
