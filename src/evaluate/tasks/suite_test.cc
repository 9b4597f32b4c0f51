#include "tasks/suite.h"

#include <gtest/gtest.h>

#include <fstream>

namespace oscar {
namespace {

namespace fs = std::filesystem;

class SuiteTest : public testing::Test {
 protected:
  void SetUp() override {
    directory_ =
        fs::temp_directory_path() / ("oscar_suite_test_" + std::to_string(::getpid()) + "_" +
                                     testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(directory_);
  }
  void TearDown() override { fs::remove_all(directory_); }
  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(directory_ / name) << text;
  }
  fs::path directory_;
};

TEST_F(SuiteTest, BuildsContextsByCodePoints) {
  // Two-, three- and four-byte characters before the slice shift every byte offset.
  Write("haystack.txt", "né€𝄞abcdefgh");
  Write(
      "t.jsonl",
      R"({"id":"a","task":"t","context":{"intro":"I","start":2,"chars":6,"inserts":[[1,"X."],[3,"Y."]]},)"
      R"("question":"Q?","answer":"7","reference":"7","max_tokens":5})"
      "\n");
  const auto suite = ReadSuite(directory_, {});
  ASSERT_TRUE(suite.has_value()) << suite.error().ToString();
  ASSERT_EQ(suite->tasks.size(), 1u);
  ASSERT_EQ(suite->tasks[0].items.size(), 1u);
  EXPECT_EQ(suite->tasks[0].items[0].prompt, "I\n€X. 𝄞aY. bcd\nQ?");
}

TEST_F(SuiteTest, BrokenLinesAreNamedAndSkipped) {
  const std::string good =
      R"("task":"t","prompt":"p","answer":"a","reference":"a","max_tokens":3})";
  Write("t.jsonl", "{\"id\":\"1\"," + good + "\n{\"id\":\n\n{\"id\":\"2\"," + good +
                       "\n{\"id\":\"1\"," + good + "\n{\"id\":\"3\",\"task\":\"other\"," +
                       R"("prompt":"p","answer":"a","max_tokens":3})" + "\n" +
                       R"({"id":"4","prompt":"p","answer":"a","max_tokens":0})" + "\n");
  const auto suite = ReadSuite(directory_, {});
  ASSERT_TRUE(suite.has_value());
  EXPECT_EQ(suite->tasks[0].items.size(), 2u);
  ASSERT_EQ(suite->warnings.size(), 4u);
  EXPECT_NE(suite->warnings[0].find("t.jsonl:2:"), std::string::npos) << suite->warnings[0];
  EXPECT_NE(suite->warnings[1].find("t.jsonl:5:"), std::string::npos) << suite->warnings[1];
  EXPECT_NE(suite->warnings[2].find("t.jsonl:6:"), std::string::npos) << suite->warnings[2];
  EXPECT_NE(suite->warnings[3].find("max_tokens"), std::string::npos) << suite->warnings[3];
}

TEST_F(SuiteTest, RefusesOffsetsOutsideTheHaystack) {
  Write("haystack.txt", "abc");
  const auto line = [](int start, int chars, int offset) {
    return R"({"id":")" + std::to_string(start) + "-" + std::to_string(chars) + "-" +
           std::to_string(offset) + R"(","context":{"intro":"I","start":)" + std::to_string(start) +
           R"(,"chars":)" + std::to_string(chars) + R"(,"inserts":[[)" + std::to_string(offset) +
           R"(,"x"]]},"question":"q","answer":"a","max_tokens":1})" + "\n";
  };
  Write("t.jsonl", line(0, 3, 3) + line(1, 3, 0) + line(4, 0, 0) + line(-1, 1, 0) + line(0, 2, 3));
  const auto suite = ReadSuite(directory_, {});
  ASSERT_TRUE(suite.has_value());
  EXPECT_EQ(suite->tasks[0].items.size(), 1u);
  EXPECT_EQ(suite->warnings.size(), 4u);
}

TEST_F(SuiteTest, LimitsAndChoosesTasks) {
  std::string lines;
  for (int i = 0; i < 5; ++i) {
    lines +=
        R"({"id":")" + std::to_string(i) + R"(","prompt":"p","answer":"a","max_tokens":1})" + "\n";
  }
  Write("a.jsonl", lines);
  Write("b.jsonl", lines);
  const auto some = ReadSuite(directory_, {2, {"b"}});
  ASSERT_TRUE(some.has_value());
  ASSERT_EQ(some->tasks.size(), 1u);
  EXPECT_EQ(some->tasks[0].name, "b");
  EXPECT_EQ(some->tasks[0].items.size(), 2u);
  EXPECT_EQ(some->names, (std::vector<std::string>{"a", "b"}));
  EXPECT_FALSE(ReadSuite(directory_ / "none", {}).has_value());
}

NamedSuite Named(const std::string& source, const std::string& task, const std::string& prompt) {
  EvalItem item;
  item.id = "0";
  item.prompt = prompt;
  NamedSuite out{source, {}};
  out.suite.names = {task};
  out.suite.tasks.emplace_back();
  out.suite.tasks[0].name = task;
  if (!prompt.empty()) out.suite.tasks[0].items.push_back(item);
  return out;
}

std::vector<std::string> NamesOf(const EvalSuite& suite) {
  std::vector<std::string> out;
  for (const EvalTask& task : suite.tasks) out.push_back(task.name);
  return out;
}

// Two suites' tasks of one name are two tasks.
TEST(Suites, NamesStayApart) {
  using Names = std::vector<std::string>;
  auto joined = JoinSuites(
      {Named("x/one", "sort", "p"), Named("y/two/", "sort", "q"), Named("z", "sum", "p")}, {});
  ASSERT_TRUE(joined.has_value()) << joined.error().ToString();
  EXPECT_EQ(NamesOf(*joined), (Names{"one/sort", "two/sort", "sum"}));
  joined = JoinSuites({Named("x/one", "sort", "p"), Named("y/one", "sort", "q")}, {});
  EXPECT_EQ(NamesOf(*joined), (Names{"x/one/sort", "y/one/sort"}));
  joined = JoinSuites(
      {Named("math500=a.jsonl", "math500", "p"), Named("math500=b.jsonl", "math500", "q")}, {});
  EXPECT_EQ(NamesOf(*joined), (Names{"a.jsonl/math500", "b.jsonl/math500"}));
  // The same items under two names measure nothing more.
  const auto twice = JoinSuites({Named("ruler", "vt@4096", "p"), Named("vt", "vt@4096", "p")}, {});
  ASSERT_FALSE(twice.has_value());
  EXPECT_NE(twice.error().message().find("vt@4096 is there twice"), std::string::npos);
}

TEST(Suites, UnknownNamesAreRefused) {
  for (const SuiteOptions& options :
       {SuiteOptions{0, {"nosuch"}, {}}, SuiteOptions{0, {}, {{"nosuch", 3}}}}) {
    const auto joined = JoinSuites({Named("x", "sort", "p")}, options);
    ASSERT_FALSE(joined.has_value());
    EXPECT_NE(joined.error().message().find("nosuch"), std::string::npos);
    EXPECT_NE(joined.error().message().find("sort"), std::string::npos);
  }
  EXPECT_TRUE(JoinSuites({Named("x", "sort", "p")}, {0, {"sort"}, {{"sort", 1}}}).has_value());
}

TEST(Suites, EmptyTasksAreNamedAndNothingIsAnError) {
  const auto some = JoinSuites({Named("x", "sort", "p"), Named("y", "sum", "")}, {});
  ASSERT_TRUE(some.has_value());
  EXPECT_EQ(some->tasks.size(), 1u);
  ASSERT_EQ(some->warnings.size(), 1u);
  EXPECT_NE(some->warnings[0].find("sum"), std::string::npos);
  const auto none = JoinSuites({Named("y", "sum", "")}, {});
  ASSERT_FALSE(none.has_value());
  EXPECT_NE(none.error().message().find("nothing to measure"), std::string::npos);
  EXPECT_NE(none.error().message().find("sum"), std::string::npos);
}

TEST(Suite, TheDemoSuiteIsWhole) {
  const auto suite = ReadSuite(OSCAR_DEMO_MODEL "/eval", {});
  ASSERT_TRUE(suite.has_value()) << suite.error().ToString();
  EXPECT_TRUE(suite->warnings.empty());
  ASSERT_EQ(suite->tasks.size(), 10u);
  for (const EvalTask& task : suite->tasks) {
    EXPECT_EQ(task.items.size(), task.name == "multikey_14k" ? 50u : 100u) << task.name;
    for (const EvalItem& item : task.items) {
      EXPECT_EQ(FinalAnswer(item.reference), item.answer) << item.id;
      // A retrieval answer is in its prompt, where the needle was put.
      if (task.name == "uuid_4k") {
        EXPECT_NE(item.prompt.find(item.answer), std::string::npos);
      }
    }
  }
}

TEST(Suite, FinalAnswerFollowsTheLastTag) {
  EXPECT_EQ(FinalAnswer(" 12 \n"), "12");
  EXPECT_EQ(FinalAnswer("<think>\n1</think>2</think>\n 3"), "3");
  EXPECT_EQ(FinalAnswer("x</think>"), "");
}

TEST(Suite, IllFormedHaystackIsRefused) {
  EXPECT_FALSE(CodePointText::Create("ab\xff", "h").has_value());
  EXPECT_FALSE(CodePointText::Create("ab\xe2\x82", "h").has_value());
  EXPECT_FALSE(CodePointText::Create("\xc0\x80", "h").has_value());
}

}  // namespace
}  // namespace oscar
