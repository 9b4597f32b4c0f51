#include "http/body_budget.h"

#include <gtest/gtest.h>

namespace oscar::server {
namespace {

TEST(BodyBudget, BoundsAllButTheOldest) {
  BodyBudget budget(100);
  int resumed[3] = {};
  auto first = budget.Open([&] { ++resumed[0]; });
  auto second = budget.Open([&] { ++resumed[1]; });
  auto third = budget.Open([&] { ++resumed[2]; });
  EXPECT_TRUE(second->Raise(60));
  EXPECT_TRUE(third->Raise(40));
  EXPECT_TRUE(third->Raise(30));  // never less
  EXPECT_FALSE(third->Raise(41));
  EXPECT_FALSE(second->Raise(61));
  // The oldest goes on, whatever the others hold.
  EXPECT_TRUE(first->Raise(1000));
  EXPECT_EQ(budget.used(), 1100u);
  EXPECT_EQ(resumed[1] + resumed[2], 0);
  first.reset();
  EXPECT_EQ(resumed[1], 1);  // is the oldest now
  EXPECT_EQ(resumed[2], 0);  // nothing is free
  EXPECT_TRUE(second->Raise(61));
  second.reset();
  EXPECT_EQ(resumed[2], 1);
  EXPECT_TRUE(third->Raise(41));
  third.reset();
  EXPECT_EQ(budget.used(), 0u);
}

}  // namespace
}  // namespace oscar::server
