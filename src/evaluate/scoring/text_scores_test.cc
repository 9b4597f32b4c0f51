#include "scoring/text_scores.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "scoring/scoring.h"

namespace oscar {
namespace {

// Pairs that Python's str.lower makes equal.
TEST(TextScores, CaseIsUnicodes) {
  EXPECT_EQ(TokenF1("École Normale", "école normale"), 1);
  EXPECT_EQ(TokenF1("ŁÓDŹ", "łódź"), 1);
  EXPECT_EQ(TokenF1("ΟΔΥΣΣΕΥΣ", "οδυσσευς"), 1);  // the last sigma is the final form,
  EXPECT_EQ(TokenF1("ΣΑΣ. Σ", "σας σ"), 1);       // one alone is not,
  EXPECT_EQ(TokenF1("İZMİR", "i̇zmi̇r"), 1);        // and the dot of İ stays
  EXPECT_EQ(TokenF1("straße", "STRASSE"), 0);     // lower case, not folding
  const std::vector<std::string> wanted = {"ÅNGSTRÖM"};
  EXPECT_EQ(ContainsAll("an ångström", wanted), 1);
}

TEST(TextScores, WordsAreDividedAsPythonDoes) {
  EXPECT_EQ(TokenF1("New\u00a0York", "new york"), 1);
  EXPECT_EQ(TokenF1("東京\u3000大阪", "東京 大阪"), 1);
  EXPECT_EQ(TokenF1("U.S.", "us"), 1);        // ASCII punctuation goes without a gap,
  EXPECT_EQ(TokenF1("“Paris”", "paris"), 0);  // other punctuation stays,
  EXPECT_EQ(TokenF1("x – the – y", "x – – y"), 1);
  EXPECT_EQ(TokenF1("x–a–y", "x– –y"), 1);  // and divides articles from words
  EXPECT_EQ(TokenF1("Athens", "thens"), 0);
}

// The published score of code takes the line as it stands.
TEST(TextScores, IndentationOfCodeCounts) {
  EvalItem item;
  item.answers = {"        return foo(bar)"};
  const auto score = [&](const std::string& output) {
    return ScoreOutput(Scorer::kCodeSimilarity, item, output).value();
  };
  EXPECT_EQ(score("        return foo(bar)"), 1);
  EXPECT_EQ(score("\n\n        return foo(bar)\n    x = 1\n"), 1);
  EXPECT_EQ(score("<think>\nhm\n</think>\n\n        return foo(bar)\n"), 1);
  EXPECT_EQ(score("```python\n        return foo(bar)\n```"), 1);
  EXPECT_EQ(score("return foo(bar)"), 0.79);              // 2 * 15 / 38
  EXPECT_EQ(score("  \n        return foo(bar)"), 0.16);  // a line of blanks is the first line
}

TEST(TextScores, CodeIsComparedByCodePointsAndRoundedToEven) {
  EXPECT_EQ(CodeSimilarity("é", "è"), 0);  // whose first bytes are the same
  EXPECT_EQ(CodeSimilarity("# note\n// more\nx", "x"), 1);
  EXPECT_EQ(CodeSimilarity("aaaabbbbbbb", "acccc"), 0.12);  // 2 of 16: 12.5
}

// A model that is stuck on full stops: every sentence is compared with every other.
TEST(TextScores, EmptySentencesCostNothing) {
  std::string stops, reference;
  for (int i = 0; i < 400000; ++i) stops += ". ";
  for (int i = 0; i < 200; ++i) reference += "one two three four five. ";
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(RougeL(stops, reference), 0);
  EXPECT_GT(RougeL(stops + "one two", reference), 0.5);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(4));
}

}  // namespace
}  // namespace oscar
