#include "text/reasoning.h"

#include <gtest/gtest.h>

#include "base/rng.h"

namespace oscar {
namespace {

struct Split {
  std::string reasoning, content;
  bool operator==(const Split&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Split& split) {
  return out << "[" << split.reasoning << "][" << split.content << "]";
}

Split SplitInPieces(std::string_view text, bool starts_inside, uint64_t seed) {
  ReasoningSplitter splitter({}, starts_inside);
  const Philox rng(seed, 0);
  Split result;
  for (size_t at = 0; at < text.size();) {
    const size_t count = seed == 0 ? text.size() : 1 + rng.Below(at, 6);
    const auto piece = splitter.Push(text.substr(at, count));
    result.reasoning += piece.reasoning;
    result.content += piece.content;
    at += count;
  }
  const auto last = splitter.Finish();
  result.reasoning += last.reasoning;
  result.content += last.content;
  return result;
}

TEST(ReasoningTest, SplitsHoweverTheTextIsCut) {
  const struct {
    const char* text;
    bool inside;
    Split expected;
  } cases[] = {
      {"<think>\nhm, so\n</think>\n\nThe answer.", false, {"hm, so", "The answer."}},
      {"hm, so\n</think>\n\nThe answer.", true, {"hm, so", "The answer."}},
      {"<think>\nhm\n</think>\nA", true, {"hm", "A"}},
      {"\n<think>x</think>y", false, {"x", "y"}},
      {"No reasoning here.", false, {"", "No reasoning here."}},
      {"  indented", false, {"", "  indented"}},
      {"<thin air>", false, {"", "<thin air>"}},
      {"<think>\n\n</think>\n\nA", false, {"", "A"}},
      {"a <think> b </think> c", false, {"", "a <think> b </think> c"}},
      {"<think>cut off here", false, {"cut off here", ""}},
      {"<think>cut in a tag</thi", false, {"cut in a tag</thi", ""}},
      {"<think>a </think b</think>c</think>d", false, {"a </think b", "c</think>d"}},
      {"<think>a  b\n\nc </think> d  ", false, {"a  b\n\nc", "d  "}},
      {"<think>a</</think>b", false, {"a</", "b"}},
      {"", false, {"", ""}},
      {"<thi", false, {"", "<thi"}},
      {"only thoughts", true, {"only thoughts", ""}},
  };
  for (const auto& item : cases) {
    for (uint64_t seed = 0; seed < 40; ++seed) {
      EXPECT_EQ(SplitInPieces(item.text, item.inside, seed), item.expected)
          << item.text << " " << seed;
    }
  }
}

TEST(ReasoningTest, GivesTextOutAsSoonAsItIsCertain) {
  ReasoningSplitter splitter({}, false);
  EXPECT_EQ(splitter.Push("<think>").reasoning, "");
  EXPECT_TRUE(splitter.in_reasoning());
  EXPECT_EQ(splitter.Push("one ").reasoning, "one");
  EXPECT_EQ(splitter.Push("two</th").reasoning, " two");
  const auto rest = splitter.Push("ink>ok");
  EXPECT_EQ(rest.reasoning, "");
  EXPECT_EQ(rest.content, "ok");
  EXPECT_FALSE(splitter.in_reasoning());
  EXPECT_EQ(splitter.Push("<").content, "<");
}

}  // namespace
}  // namespace oscar
