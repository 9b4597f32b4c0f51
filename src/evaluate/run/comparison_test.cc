#include "run/comparison.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "run/item_log.h"

namespace oscar {
namespace {

ItemRecord Item(const std::string& method, const std::string& id, int64_t first_wrong,
                std::vector<TokenMargin> margins) {
  ItemRecord r;
  r.method = method;
  r.task = "hop";
  r.id = id;
  r.strict = first_wrong < 0;
  r.first_wrong = first_wrong;
  r.margins = std::move(margins);
  return r;
}

TEST(Comparison, FindsWhereRunsParted) {
  const std::vector<ItemRecord> a = {
      Item("oscar+", "same", -1, {{3, 0.5}}), Item("oscar+", "lost", -1, {{7, 0.02}, {2, 0.9}}),
      Item("oscar+", "later", 9, {{9, -0.1}, {4, 0.01}}), Item("bf16", "alone", -1, {})};
  const std::vector<ItemRecord> b = {Item("oscar+", "same", -1, {{3, 0.4}}),
                                     Item("oscar+", "lost", 7, {{7, -0.05}}),
                                     Item("oscar+", "later", 4, {{4, -0.02}})};
  const Comparison c = CompareRuns(a, b);
  ASSERT_EQ(c.tasks.size(), 1u);
  EXPECT_EQ(c.tasks[0].items, 3);
  EXPECT_EQ(c.tasks[0].strict[0], 2);
  EXPECT_EQ(c.tasks[0].strict[1], 1);
  EXPECT_EQ(c.tasks[0].diverged, 2);
  EXPECT_EQ(c.unmatched, 1);
  ASSERT_EQ(c.partings.size(), 2u);
  EXPECT_EQ(c.partings[0].id, "later");  // both missed, at different tokens
  EXPECT_EQ(c.partings[0].token, 4);
  EXPECT_NEAR(*c.partings[0].Distance(), 0.03, 1e-12);
  EXPECT_EQ(c.partings[1].id, "lost");
  EXPECT_EQ(c.partings[1].token, 7);
  EXPECT_TRUE(c.partings[1].strict[0]);
  EXPECT_FALSE(c.partings[1].strict[1]);
  EXPECT_NEAR(*c.partings[1].Distance(), 0.07, 1e-12);
  const std::string table = ComparisonToTable(c);
  EXPECT_THAT(table, testing::HasSubstr("hit / miss"));
  EXPECT_THAT(table, testing::HasSubstr("2 of 3 items diverged (66.7 %; two correct programs may"));
  EXPECT_THAT(table, testing::HasSubstr("margins there at most 0.070 apart"));
  EXPECT_THAT(table, testing::HasSubstr("1 items are in one of the runs alone"));
}

TEST(Comparison, MarginThatWasNotKeptIsNone) {
  const Comparison c =
      CompareRuns({Item("oscar+", "x", -1, {{1, 0.1}})}, {Item("oscar+", "x", 5, {{5, -0.2}})});
  ASSERT_EQ(c.partings.size(), 1u);
  EXPECT_FALSE(c.partings[0].margin[0].has_value());
  EXPECT_FALSE(c.partings[0].Distance().has_value());
}

TEST(Comparison, ReadsTheFileAndCountsTheLastOfAnItem) {
  const auto path = std::filesystem::path(testing::TempDir()) / "items.jsonl";
  std::ofstream(path) << ToJsonLine(Item("bf16", "x", 3, {{3, -0.25}})) << "torn"
                      << "\n"
                      << ToJsonLine(Item("bf16", "x", -1, {{3, 0.25}}));
  const auto items = ReadItems(path);
  ASSERT_TRUE(items.has_value());
  ASSERT_EQ(items->size(), 2u);
  EXPECT_EQ((*items)[0].margins, (std::vector<TokenMargin>{{3, -0.25}}));
  EXPECT_EQ(CompareRuns(*items, *items).tasks[0].strict[0], 1);
  EXPECT_FALSE(ReadItems(path / "none").has_value());
}

}  // namespace
}  // namespace oscar
