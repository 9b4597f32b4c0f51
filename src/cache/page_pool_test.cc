#include "cache/page_pool.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>
#include <memory>
#include <vector>

namespace oscar {
namespace {

PageLayout ShapeOf(int layers) {
  return PageLayout(std::vector(static_cast<size_t>(layers),
                                BlockLayout(BlockKind::kBf16, CodeOrder::kCpu, 64, 64)),
                    1);
}

TEST(PagePool, AskingForMoreThanThereCanBeIsRefused) {
  const PageLayout shape = ShapeOf(1);
  PagePool pool(4 * shape.bytes());
  const auto page = pool.Allocate(shape);
  ASSERT_TRUE(page.has_value());
  EXPECT_TRUE(pool.CanAllocate(3 * shape.bytes()));
  EXPECT_FALSE(pool.CanAllocate(3 * shape.bytes() + 1));
  EXPECT_FALSE(pool.CanAllocate(std::numeric_limits<uint64_t>::max()));
}

TEST(PagePool, BudgetIsNeverExceeded) {
  const PageLayout small = ShapeOf(1), large = ShapeOf(3);
  PagePool pool(7 * small.bytes());
  std::vector<PageRef> pages;
  for (int i = 0; i < 7; ++i) pages.push_back(std::move(*pool.Allocate(small)));
  EXPECT_EQ(pool.Allocate(small).error().code(), StatusCode::kResourceExhausted);
  pages.resize(5);
  EXPECT_EQ(pool.Allocate(large).error().code(), StatusCode::kResourceExhausted);
  pages.resize(4);
  const auto page = pool.Allocate(large);
  ASSERT_TRUE(page.has_value());
  EXPECT_EQ(pool.bytes_in_use(), pool.budget());
  EXPECT_EQ(pool.pages_in_use(), 5);
}

TEST(PagePool, ReferencesAreCounted) {
  const PageLayout shape = ShapeOf(1);
  PagePool pool(shape.bytes());
  PageRef page = std::move(*pool.Allocate(shape));
  EXPECT_FALSE(page.shared());
  PageRef second = page.Share();
  EXPECT_TRUE(page.shared());
  page = std::move(second);  // gives up one of the two
  EXPECT_FALSE(second);      // NOLINT(bugprone-use-after-move): what was moved from is empty
  EXPECT_FALSE(page.shared());
  EXPECT_EQ(pool.pages_in_use(), 1);
  page.Reset();
  EXPECT_EQ(pool.bytes_in_use(), 0u);
}

// Pages of another kind that went before must not keep the place of those that come and go.
TEST(PagePool, ThePageFreedLastIsTakenAgain) {
  const PageLayout small = ShapeOf(1), large = ShapeOf(3);
  PagePool pool(uint64_t{1} << 20);
  {
    std::vector<PageRef> pages;
    for (int i = 0; i < 8; ++i) pages.push_back(std::move(*pool.Allocate(small)));
  }
  PageRef page = std::move(*pool.Allocate(large));
  const std::byte* const place = page.data();
  page.Reset();
  // Had it gone back to the system, this would be likely to get it.
  const std::unique_ptr<void, decltype(&std::free)> other(std::aligned_alloc(4096, large.bytes()),
                                                          &std::free);
  page = std::move(*pool.Allocate(large));
  EXPECT_EQ(page.data(), place);
}

}  // namespace
}  // namespace oscar
