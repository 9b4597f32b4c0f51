#include "scoring/scoring.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "scoring/text_scores.h"
#include "tasks/benchmarks.h"
#include "tasks/python_random.h"

namespace oscar {
namespace {

double Score(Scorer scorer, const EvalItem& item, const std::string& output) {
  const auto score = ScoreOutput(scorer, item, output);
  EXPECT_TRUE(score.has_value()) << score.error().ToString();
  return score.value_or(-1);
}

bool HasPython() { return std::system("python3 -c pass") == 0; }

// Values computed by hand from the published definitions.
TEST(TextScores, KnownValues) {
  EXPECT_DOUBLE_EQ(TokenF1("The Cat sat.", "a cat"), 2 * 0.5 * 1 / 1.5);
  EXPECT_EQ(TokenF1("dog", "cat"), 0);
  EXPECT_EQ(TokenF1("", ""), 0);
  EXPECT_NEAR(RougeL("the cat sat on the mat", "the cat lay on the mat"), 0.8, 1e-6);
  EXPECT_NEAR(RougeL("a b. c d", "c d. a b"), 1, 1e-6);
  EXPECT_EQ(RougeL("", "x"), 0);
  const std::vector<std::string> classes = {"City", "Other city", "Person"};
  EXPECT_EQ(ClassScore("City", "City", classes), 1);
  EXPECT_EQ(ClassScore("City or Person", "City", classes), 0.5);
  EXPECT_EQ(ClassScore("Person", "City", classes), 0);
  EXPECT_EQ(NumberScore("Paragraph 7", "Paragraph 7"), 1);
  EXPECT_EQ(NumberScore("7 or 8", "Paragraph 7"), 0.5);
  EXPECT_EQ(NumberScore("none", "7"), 0);
  EXPECT_EQ(CodeSimilarity("```python\nx = 1\n```", "x = 1"), 1);
  EXPECT_NEAR(CodeSimilarity("abcd", "abed"), 0.75, 1e-9);
  const std::vector<std::string> needles = {"1234567", "Seven"};
  EXPECT_EQ(ContainsAll("it is 1234567 and SEVEN", needles), 1);
  EXPECT_EQ(ContainsAll("it is 1234567", needles), 0.5);
}

TEST(Scoring, ReadsAnswers) {
  EvalItem item;
  item.answer = "18";
  EXPECT_EQ(Score(Scorer::kNumber, item, "<think>20</think>She makes \\boxed{18}."), 1);
  EXPECT_EQ(Score(Scorer::kNumber, item, "... so $18.00 a day."), 1);
  EXPECT_EQ(Score(Scorer::kNumber, item, "\\boxed{19}"), 0);
  EXPECT_EQ(Score(Scorer::kNumber, item, "no number"), 0);
  EXPECT_EQ(Score(Scorer::kNumber, item, "spends $20, then $2, so 18 are left\n#### 18"), 1);
  EXPECT_EQ(Score(Scorer::kNumber, item, "The answer is \\(3 \\times 6\\), not 20."), 1);
  item.answer = "\\frac{1}{2}";
  EXPECT_EQ(Score(Scorer::kMath, item, "Thus \\boxed{0.5}"), 1);
  EXPECT_EQ(Score(Scorer::kMath, item, "Thus \\boxed{2}"), 0);
  item.answer = "C";
  EXPECT_EQ(Score(Scorer::kChoice, item, "blah\nAnswer: C"), 1);
  EXPECT_EQ(Score(Scorer::kChoice, item, "answer : c"), 1);
  EXPECT_EQ(Score(Scorer::kChoice, item, "Answer: B"), 0);
  EXPECT_EQ(Score(Scorer::kChoice, item, "<think>Answer: C</think>I do not know"), 0);
}

// The published solutions pass their own tests, and break when one character of them does.
TEST(Scoring, HumanEvalRunsItsTests) {
  if (!HasPython()) GTEST_SKIP() << "no python3";
  const auto suite =
      ReadBenchmark("humaneval", OSCAR_TEST_DATA "/eval/HumanEval_sample.jsonl", {2, {}});
  ASSERT_TRUE(suite.has_value()) << suite.error().ToString();
  ASSERT_EQ(suite->tasks[0].items.size(), 2u);
  const EvalItem& item = suite->tasks[0].items[0];
  const std::string body =
      "    for i, a in enumerate(numbers):\n        for j, b in enumerate(numbers):\n"
      "            if i != j and abs(a - b) < threshold:\n                return True\n"
      "    return False\n";
  EXPECT_EQ(Score(Scorer::kHumanEval, item, body), 1);
  const std::string whole =
      "def has_close_elements(numbers: List[float], threshold: float) -> bool:\n" + body;
  EXPECT_EQ(Score(Scorer::kHumanEval, item, "Sure:\n```python\n" + whole + "```\nDone."), 1);
  EXPECT_EQ(Score(Scorer::kHumanEval, item, "    return True\n"), 0);
  EXPECT_EQ(Score(Scorer::kHumanEval, item, "    import os; os._exit(0)\n"), 0);
  EXPECT_EQ(Score(Scorer::kHumanEval, item, "this is no code"), 0);
}

TEST(Scoring, LiveCodeRunsBothKindsOfTests) {
  if (!HasPython()) GTEST_SKIP() << "no python3";
  EvalItem item;
  item.num_tests = 3;
  const auto spec = [](const char* tests, const char* function) {
    return nlohmann::json{
        {"public", tests}, {"private", ""}, {"function", function}, {"seconds", 2}}
        .dump();
  };
  item.tests = spec(
      R"([{"input": "2 3\n", "output": "5\n", "testtype": "stdin"},
          {"input": "1 1\n", "output": "2.0", "testtype": "stdin"}])",
      "");
  const std::string sum = "```python\na, b = map(int, input().split())\nprint(a + b)\n```";
  EXPECT_EQ(Score(Scorer::kLiveCode, item, sum), 1);
  EXPECT_EQ(Score(Scorer::kLiveCode, item, "```python\nprint(5)\n```"), 0);
  EXPECT_EQ(Score(Scorer::kLiveCode, item, "```python\nwhile True: pass\n```"), 0);
  item.tests =
      spec(R"([{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}])", "total");
  const std::string call =
      "```python\nclass Solution:\n    def total(self, xs: List[int], y: int) -> int:\n        "
      "return sum(xs) + y\n```";
  EXPECT_EQ(Score(Scorer::kLiveCode, item, call), 1);
  EXPECT_EQ(Score(Scorer::kLiveCode, item, "```python\nclass Solution: pass\n```"), 0);
}

// From CPython 3.11: random.Random(0).sample(range(4), 4), and what follows.
TEST(PythonRandom, DrawsWhatPythonDraws) {
  PythonRandom random(0);
  using Order = std::vector<uint32_t>;
  EXPECT_EQ(random.Sample(4, 4), (Order{3, 1, 0, 2}));
  EXPECT_EQ(random.Sample(4, 4), (Order{3, 1, 2, 0}));
  EXPECT_EQ(random.Sample(4, 4), (Order{2, 3, 0, 1}));
  PythonRandom other(42);
  EXPECT_DOUBLE_EQ(other.Random(), 0.6394267984578837);
  Order list = {0, 1, 2, 3, 4, 5, 6, 7};
  PythonRandom(1).Shuffle(list);
  EXPECT_EQ(list, (Order{3, 6, 1, 5, 7, 0, 4, 2}));
  EXPECT_EQ(PythonRandom(7).Sample(1000, 5), (Order{331, 970, 154, 404, 666}));
}

}  // namespace
}  // namespace oscar
