#include "tasks/demo_suite.h"

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <openssl/sha.h>

#include <array>

#include "base/file.h"
#include "tasks/python_random.h"

namespace oscar {
namespace {

CodePointText Haystack() {
  Result<std::string> text =
      ReadFile(std::string(OSCAR_DEMO_MODEL) + "/eval/haystack.txt", uint64_t{1} << 26);
  EXPECT_TRUE(text.has_value());
  Result<CodePointText> out = CodePointText::Create(std::move(*text), "haystack");
  EXPECT_TRUE(out.has_value());
  return std::move(*out);
}

std::string Sha256(const std::string& text) {
  std::array<unsigned char, SHA256_DIGEST_LENGTH> hash;
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), hash.data());
  std::string out;
  for (const unsigned char byte : hash) out += fmt::format("{:02x}", byte);
  return out;
}

// From CPython 3.11: random.Random("7/sum/0"), random.Random(0.3), random.Random(0.0).
TEST(PythonRandomSeeds, TextAndFloats) {
  PythonRandom text = PythonRandom::OfText("7/sum/0");
  EXPECT_DOUBLE_EQ(text.Random(), 0.9746683270397365);
  EXPECT_EQ(text.GetBits(32), 985428655u);
  EXPECT_DOUBLE_EQ(PythonRandom::OfFloat(0.3).Random(), 0.018656062909995885);
  EXPECT_DOUBLE_EQ(PythonRandom::OfFloat(0.0).Random(), 0.8444218515250481);
}

// SHA-256 of all files the Python generator writes of a seed, in the order of DemoTasks(): 100
// items of each task, 50 of multikey_14k.
TEST(DemoSuite, IsWhatTheGeneratorWrites) {
  const CodePointText haystack = Haystack();
  const std::pair<uint64_t, std::string> kDigests[] = {
      {1, "e8e9b511069b4f4bacef5dfb0c77ba886955cac5992a5c1ec25eb5e4f06b7e63"},
      {7, "d95b5f6ce6e0db6b2fc0b6972cc167a59f71ee33faa81a9c8cab982b34eeb73e"},
      {20261118, "1e7156c808ed4565a2aa943d141e5d07dd5a2894ee6a3bfe2cc631b01be8a718"},
  };
  for (const auto& [seed, digest] : kDigests) {
    std::string text;
    for (const std::string_view task : DemoTasks()) {
      const Result<std::string> lines =
          DemoTaskLines(task, task == "multikey_14k" ? 50 : 100, seed, haystack);
      ASSERT_TRUE(lines.has_value()) << lines.error().message();
      text += *lines;
    }
    EXPECT_EQ(Sha256(text), digest) << "seed " << seed;
  }
}

TEST(DemoSuite, MakesItemsOfTheTasksWanted) {
  const CodePointText haystack = Haystack();
  SuiteOptions options;
  options.tasks = {"recall_4k", "sum"};
  options.task_limits["sum"] = 2;
  const Result<EvalSuite> suite = MakeDemoSuite(3, 1, haystack, options);
  ASSERT_TRUE(suite.has_value()) << suite.error().message();
  EXPECT_EQ(suite->names.size(), 10u);
  ASSERT_EQ(suite->tasks.size(), 2u);
  EXPECT_EQ(suite->tasks[0].items.size(), 3u);
  EXPECT_EQ(suite->tasks[1].items.size(), 2u);
  EXPECT_EQ(suite->tasks[0].items[2].id, "recall_4k-002");
  EXPECT_GT(suite->tasks[0].items[0].prompt.size(), 10000u);
  EXPECT_NE(suite->tasks[0].items[0].prompt, suite->tasks[0].items[1].prompt);
}

TEST(DemoSuite, RefusesAShortHaystackAndAnUnknownTask) {
  const Result<CodePointText> text = CodePointText::Create("A few words. No more.", "text");
  ASSERT_TRUE(text.has_value());
  EXPECT_EQ(DemoTaskLines("recall_4k", 1, 1, *text).error().code(), StatusCode::kOutOfRange);
  EXPECT_EQ(DemoTaskLines("recall", 1, 1, *text).error().code(), StatusCode::kNotFound);
  EXPECT_TRUE(DemoTaskLines("sum", 1, 1, *text).has_value());
}

}  // namespace
}  // namespace oscar
