#include "tasks/benchmarks.h"

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "sandbox/sandbox.h"
#include "scoring/scoring.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

class BenchmarksTest : public testing::Test {
 protected:
  void SetUp() override {
    directory_ = fs::temp_directory_path() / ("oscar_benchmarks_test_" + std::to_string(getpid()));
    fs::create_directories(directory_);
  }
  void TearDown() override { fs::remove_all(directory_); }
  fs::path Write(const std::string& name, const std::string& text) const {
    std::ofstream(directory_ / name, std::ios::binary) << text;
    return directory_ / name;
  }
  fs::path directory_;
};

TEST_F(BenchmarksTest, Gsm8kKeepsTheNumberAfterTheMark) {
  const auto suite = ReadBenchmark("gsm8k", OSCAR_TEST_DATA "/eval/gsm8k_sample.jsonl", {});
  ASSERT_TRUE(suite.has_value()) << suite.error().ToString();
  const EvalTask& task = suite->tasks[0];
  ASSERT_EQ(task.items.size(), 12u);
  EXPECT_FALSE(task.sampling.has_value());
  EXPECT_EQ(task.items[0].answer, "18");
  EXPECT_NE(task.items[0].prompt.find("\\boxed{}"), std::string::npos);
  EXPECT_EQ(*ScoreOutput(task.scorer, task.items[0], "She earns \\boxed{$18}"), 1);
}

TEST_F(BenchmarksTest, MathHasPublishedSettings) {
  const auto suite =
      ReadBenchmark("math500", OSCAR_TEST_DATA "/eval/math500_sample.jsonl", {5, {}});
  ASSERT_TRUE(suite.has_value()) << suite.error().ToString();
  const EvalTask& task = suite->tasks[0];
  ASSERT_EQ(task.items.size(), 5u);
  EXPECT_EQ(task.repeats, 5);
  EXPECT_EQ(task.sampling->top_k, 40);
  EXPECT_EQ(task.items[0].max_tokens, 32768);
}

TEST_F(BenchmarksTest, AimeTakesEitherNameOfTheProblem) {
  const fs::path file = Write("aime.jsonl",
                              "{\"problem\": \"1+1?\", \"answer\": \"2\"}\n"
                              "broken\n"
                              "{\"question\": \"2+2?\", \"answer\": 4}\n");
  const auto suite = ReadBenchmark("aime25", file, {});
  ASSERT_TRUE(suite.has_value());
  ASSERT_EQ(suite->tasks[0].items.size(), 2u);
  EXPECT_EQ(suite->tasks[0].items[1].answer, "4");
  ASSERT_EQ(suite->warnings.size(), 1u);
  EXPECT_NE(suite->warnings[0].find("aime.jsonl:2:"), std::string::npos) << suite->warnings[0];
}

// The order of the choices is that of random.Random(0).sample(range(4), 4), row by row.
TEST_F(BenchmarksTest, GpqaPermutesAsPublished) {
  std::string csv =
      "\xEF\xBB\xBF"
      "Id,Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,"
      "Incorrect Answer 3\n";
  csv += "1,\"What, \"\"now\"\"?\nSay.\",right,w1,w2,w3\n2,Q2,right,w1,w2,w3\n";
  const auto suite = ReadBenchmark("gpqa", Write("gpqa.csv", csv), {});
  ASSERT_TRUE(suite.has_value()) << suite.error().ToString();
  const EvalTask& task = suite->tasks[0];
  ASSERT_EQ(task.items.size(), 2u);
  EXPECT_NE(task.items[0].prompt.find("What, \"now\"?\nSay.\n\nA) w3\nB) w1\nC) right\nD) w2"),
            std::string::npos)
      << task.items[0].prompt;
  EXPECT_EQ(task.items[0].answer, "C");
  EXPECT_EQ(task.items[1].answer, "D");
  EXPECT_EQ(task.items[0].system, "You are a helpful assistant.");
  EXPECT_FALSE(ReadBenchmark("gpqa", Write("other.csv", "a,b\n1,2\n"), {}).has_value());
}

TEST_F(BenchmarksTest, LongBenchFillsPromptsAndBuckets) {
  const std::string record =
      R"({"input": "Who?", "context": "Text {input} here.", "answers": ["Ann", "Bo"], "length": 5000,
          "all_classes": null})";
  std::string line = record;
  line.erase(std::remove(line.begin(), line.end(), '\n'), line.end());
  Write("qasper_e.jsonl", line + "\n");
  const auto suite = ReadBenchmark("longbench-e", directory_, {});
  ASSERT_TRUE(suite.has_value()) << suite.error().ToString();
  ASSERT_EQ(suite->tasks.size(), 1u);
  EXPECT_EQ(suite->warnings.size(), 12u);  // the sets that are not there
  const EvalItem& item = suite->tasks[0].items.at(0);
  EXPECT_NE(item.prompt.find("Article: Text {input} here.\n"), std::string::npos);
  EXPECT_NE(item.prompt.find("Question: Who?\n\nAnswer:"), std::string::npos);
  EXPECT_EQ(item.bucket, "4-8k");
  EXPECT_EQ(*ScoreOutput(suite->tasks[0].scorer, item, "the Bo"), 1);
  EXPECT_FALSE(ReadBenchmark("longbench-e", directory_ / "none", {}).has_value());
}

TEST_F(BenchmarksTest, LiveCodeReadsPublishedRecords) {
  const fs::path file = Write(
      "test6.jsonl",
      R"({"question_id": "abc1", "question_content": "Add.", "starter_code": "", "public_test_cases": "[]", "private_test_cases": "[{\"input\": \"1\", \"output\": \"1\"}]", "metadata": "{\"func_name\": \"add\"}"})"
      "\n");
  const auto suite = ReadBenchmark("livecodebench", file, {});
  ASSERT_TRUE(suite.has_value()) << suite.error().ToString();
  const EvalItem& item = suite->tasks[0].items.at(0);
  EXPECT_EQ(item.id, "abc1");
  EXPECT_NE(item.tests.find("\"function\":\"add\""), std::string::npos);
  EXPECT_NE(item.prompt.find("STDOUT"), std::string::npos);
  const bool confined =
      RunPython({{"trial.py", "pass"}}, {}).has_value() && SandboxWarning().empty();
  EXPECT_EQ(suite->warnings.size(), confined ? 0u : 1u);
}

// No output could be right.
TEST_F(BenchmarksTest, RecordsWithoutAnAnswerAreLeftOut) {
  const auto why = [&](const char* name, const fs::path& path) {
    const auto suite = ReadBenchmark(name, path, {});
    if (!suite.has_value()) return std::string(suite.error().message());
    return suite->warnings.empty() ? std::string() : suite->warnings[0];
  };
  EXPECT_NE(why("gsm8k", Write("g.jsonl", "{\"question\": \"q\", \"answer\": \"2 #### \"}\n"))
                .find("g.jsonl:1: left out: nothing follows ####"),
            std::string::npos);
  EXPECT_NE(why("math500", Write("m.jsonl", "{\"problem\": \"q\", \"answer\": \" \"}\n"))
                .find("m.jsonl:1: left out: \"answer\" is empty"),
            std::string::npos);
  for (const char* answers : {"[]", "null"}) {
    Write("qasper_e.jsonl",
          fmt::format("{{\"input\": \"\", \"context\": \"\", \"length\": 5, \"answers\": {}}}\n",
                      answers));
    EXPECT_NE(why("longbench-e", directory_).find("\"answers\" holds none"), std::string::npos);
  }
  const std::string code =
      "{\"task_id\": \"a\", \"prompt\": \"\", \"test\": \"\", \"entry_point\": \"f\"}\n";
  const auto twice = ReadBenchmark("humaneval", Write("h.jsonl", code + code), {});
  ASSERT_TRUE(twice.has_value());
  EXPECT_EQ(twice->tasks[0].items.size(), 1u);
  EXPECT_NE(twice->warnings.back().find("h.jsonl:2: left out: id \"a\" is there twice"),
            std::string::npos);
}

TEST_F(BenchmarksTest, ReadsMmluInItsThreeForms) {
  const std::string prompt =
      "Answer the following multiple choice question. The last line of your response should be of "
      "the following format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think "
      "step by step before answering.\n\nWhich, of these?\n\nA) one\nB) two\nC) three\nD) four";
  const fs::path lines = Write(
      "m.jsonl",
      "{\"question\": \"Which, of these?\", \"choices\": [\"one\", \"two\", \"three\", "
      "\"four\"], \"answer\": 2}\n{\"question\": \"q\", \"choices\": [\"one\"], \"answer\": 0}\n"
      "{\"question\": \"q\", \"choices\": [\"1\", \"2\", \"3\", \"4\"], \"answer\": 4}\n");
  fs::create_directories(directory_ / "test");
  const std::string row = "\"Which, of these?\",one,two,three,four,C\n";
  const fs::path csv = Write("test/b_test.csv", row + "q,1,2,3,4,E\nq,1,2\n");
  Write("test/a_test.csv", row);
  for (const fs::path& path : {lines, csv, directory_ / "test"}) {
    const auto suite = ReadBenchmark("mmlu", path, {});
    ASSERT_TRUE(suite.has_value()) << suite.error().ToString();
    const EvalTask& task = suite->tasks[0];
    EXPECT_EQ(task.scorer, Scorer::kChoice);
    EXPECT_EQ(task.items.size(), fs::is_directory(path) ? 2u : 1u);
    EXPECT_EQ(task.items[0].prompt, prompt);
    EXPECT_EQ(task.items[0].answer, "C");
    EXPECT_EQ(suite->warnings.size(), 2u) << path;
  }
  const auto by_subject = ReadBenchmark("mmlu", directory_ / "test", {});
  EXPECT_EQ(by_subject->tasks[0].items[0].id, "a_test/0");
  EXPECT_NE(by_subject->warnings[0].find("b_test.csv: record 2: left out"), std::string::npos);
  fs::create_directories(directory_ / "none");
  EXPECT_FALSE(ReadBenchmark("mmlu", directory_ / "none", {}).has_value());
}

TEST_F(BenchmarksTest, EmptyOrBrokenFilesSayWhy) {
  const auto broken = ReadBenchmark("gsm8k", Write("x.jsonl", "{\"question\": \"q\"}\n"), {});
  ASSERT_FALSE(broken.has_value());
  EXPECT_NE(broken.error().message().find("x.jsonl:1:"), std::string::npos);
  EXPECT_FALSE(ReadBenchmark("gsm8k", Write("y.gz", "\x1f\x8b nonsense"), {}).has_value());
  EXPECT_FALSE(ReadBenchmark("gsm8k", directory_ / "missing", {}).has_value());
}

}  // namespace
}  // namespace oscar
