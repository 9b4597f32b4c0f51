// What oscar eval refuses before it asks a server or loads a model: the address is none, so a
// command line that is taken fails with its name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "cli/command_test_util.h"

namespace oscar::cli {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

class EvalCommand : public CommandTest {
 protected:
  EvalCommand() : CommandTest(AddEvalCommand, "eval") {}
  void SetUp() override {
    CommandTest::SetUp();
    for (const char* suite : {"one", "two"}) {
      std::filesystem::create_directories(dir_ / suite);
      std::ofstream(dir_ / suite / "sort.jsonl")
          << R"({"id":"1","prompt":")" << suite << R"(","answer":"a","max_tokens":1})"
          << "\n";
    }
  }
  std::string Error(const std::string& arguments) {
    return std::string(Run("--out " + Path("out") + " " + arguments).message());
  }
  // On a server, with a suite that is there.
  std::string ServerError(const std::string& arguments) {
    return Error("--endpoint nowhere --suite " + Path("one") + " " + arguments);
  }
};

TEST_F(EvalCommand, OptionsThatWouldDoNothingAreRefused) {
  EXPECT_THAT(ServerError(""), HasSubstr("nowhere"));
  for (const std::string option :
       {"--rotation x", "--kv oscar", "--text none", "--strict-only", "--prefill exact",
        "--windows pages", "--prefill-cell 64", "--device cpu", "--text-windows 1"}) {
    EXPECT_THAT(ServerError(option), AllOf(StartsWith(option.substr(0, option.find(' '))),
                                           HasSubstr("not for --endpoint")));
  }
  EXPECT_THAT(ServerError("--model " OSCAR_DEMO_MODEL), StartsWith("--model: "));
  EXPECT_THAT(ServerError("--length 2048"), HasSubstr("only with RULER"));
  for (const std::string option : {"--top-k 5", "--top-p 0.9", "--min-p 0.1"}) {
    EXPECT_THAT(ServerError(option), AllOf(StartsWith(option.substr(0, option.find(' '))),
                                           HasSubstr("greedy; add --temperature")));
    EXPECT_THAT(ServerError(option + " --temperature 0.6"), HasSubstr("nowhere"));
  }
  EXPECT_THAT(Error("--suite " + Path("one") + " --parallel 2"), HasSubstr("only with --endpoint"));
  EXPECT_THAT(
      Error("--suite vt --samples 1 --length 1024 --endpoint nowhere --model " OSCAR_DEMO_MODEL),
      HasSubstr("nowhere"));
}

TEST_F(EvalCommand, OptionsThatNoMethodUsesAreRefused) {
  const std::string suite = "--suite " + Path("one") + " ", plain = suite + "--kv bf16 ";
  for (const std::string option :
       {"--sink 64", "--recent 64", "--prefill-cell 64", "--group 32", "--k-clip 0.9"}) {
    EXPECT_THAT(Error(plain + option),
                AllOf(StartsWith(option.substr(0, option.find(' '))), HasSubstr("no effect")));
  }
  EXPECT_THAT(Error(suite + "--kv bf16,kivi --rotation x"), StartsWith("--rotation: "));
  EXPECT_THAT(Error(suite + "--kv oscar+@none --rotation x"), StartsWith("--rotation: "));
  EXPECT_THAT(Error(suite + "--kv bf16,oscar+ --rotation nowhere --model " OSCAR_DEMO_MODEL),
              HasSubstr("nowhere: no such"));
  EXPECT_THAT(Error(suite + "--text prose.json --text-windows 0"), StartsWith("--text: "));
  EXPECT_THAT(Error(suite + "--text none --text-windows 2"), StartsWith("--text-windows: "));
  EXPECT_THAT(Error(suite + "--text-windows 2"), HasSubstr("heldout_prose.json"));
  EXPECT_THAT(Error(suite + "--strict-only"),
              AllOf(StartsWith("--strict-only: sort "), HasSubstr("no references")));
}

TEST_F(EvalCommand, ValuesThatWouldBeReadAsOthersAreRefused) {
  EXPECT_THAT(ServerError("--seed=-1"), HasSubstr("-1 is not 0 or more"));
  EXPECT_THAT(Error("--endpoint nowhere --suite vt --length 1024 --samples 1 --seed 4294967297 "
                    "--model " OSCAR_DEMO_MODEL),
              AllOf(StartsWith("--seed"), HasSubstr("2^32")));
}

TEST_F(EvalCommand, ABrokenTemplateIsNotCountedAsNone) {
  std::filesystem::create_directories(dir_ / "model");
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "config.json"}) {
    std::filesystem::copy_file(std::filesystem::path(OSCAR_DEMO_MODEL) / name,
                               dir_ / "model" / name);
  }
  const std::string ruler =
      "--endpoint nowhere --suite vt --length 1024 --samples 1 --model " + Path("model");
  EXPECT_THAT(Error(ruler), HasSubstr("--endpoint nowhere"));
  std::ofstream(dir_ / "model/chat_template.jinja") << "{% for";
  EXPECT_THAT(Error(ruler), HasSubstr("template"));
}

TEST_F(EvalCommand, NamesMustBeKnown) {
  EXPECT_THAT(Error("--suite " + Path("one") + " --kv bf16,oscar+@"), StartsWith("--kv oscar+@: "));
  EXPECT_THAT(ServerError("--tasks nosuch"), AllOf(HasSubstr("nosuch"), HasSubstr("sort")));
  EXPECT_THAT(ServerError("--limit 1,nosuch=3"), AllOf(HasSubstr("nosuch"), HasSubstr("sort")));
  EXPECT_THAT(ServerError("--limit 1,sort=3"), HasSubstr("nowhere"));
  for (const char* limit : {",", "1,2", "sort=1,sort=2", "x", "-1"}) {
    EXPECT_THAT(ServerError(std::string("--limit=") + limit), StartsWith("--limit ")) << limit;
  }
  EXPECT_THAT(Error("--endpoint nowhere --suite foo"),
              AllOf(HasSubstr("foo"), HasSubstr("no directory"), HasSubstr("ruler"),
                    HasSubstr("math500=PATH")));
  EXPECT_THAT(Error("--endpoint nowhere --suite math500="), HasSubstr("math500=PATH"));
  EXPECT_THAT(Error("--endpoint nowhere --suite vt --tasks cwe --length 2048"), HasSubstr("cwe"));
}

TEST_F(EvalCommand, NothingToMeasureIsAnError) {
  std::filesystem::create_directories(dir_ / "broken");
  std::ofstream(dir_ / "broken/sort.jsonl") << "{\n[]\n";
  EXPECT_THAT(Error("--endpoint nowhere --suite " + Path("broken")),
              AllOf(HasSubstr("nothing to measure"), HasSubstr("sort.jsonl:1")));
  // One length is too short for cwe alone.
  const std::string ruler = "--endpoint nowhere --length 777 --samples 1 --model " OSCAR_DEMO_MODEL
                            " --haystack " OSCAR_DEMO_MODEL "/eval/haystack.txt ";
  EXPECT_THAT(Error(ruler + "--suite cwe"),
              AllOf(HasSubstr("nothing to measure"), HasSubstr("cwe does not fit 777")));
  EXPECT_THAT(Error(ruler + "--suite ruler"), HasSubstr("nowhere"));
}

TEST_F(EvalCommand, SuitesWithOneNameOfATask) {
  EXPECT_THAT(Error("--endpoint nowhere --suite " + Path("one") + "," + Path("two")),
              HasSubstr("nowhere"));
  EXPECT_THAT(Error("--endpoint nowhere --suite " + Path("one") + "," + Path("one")),
              HasSubstr("twice"));
}

class ReportCommand : public CommandTest {
 protected:
  ReportCommand() : CommandTest(AddReportCommand, "report") {}
};

TEST_F(ReportCommand, AComparisonWritesNothing) {
  EXPECT_THAT(std::string(Run("a --against b --out c").message()),
              AllOf(HasSubstr("--out"), HasSubstr("--against")));
}

TEST_F(ReportCommand, NothingToCompareIsAnError) {
  std::ofstream(dir_ / "a.jsonl") << R"({"method":"m","task":"t","id":"1","strict":true})"
                                  << "\n";
  std::ofstream(dir_ / "b.jsonl") << R"({"method":"m","task":"t","id":"2","strict":true})"
                                  << "\n";
  EXPECT_TRUE(Run(Path("a.jsonl") + " --against " + Path("a.jsonl")).ok());
  EXPECT_THAT(std::string(Run(Path("a.jsonl") + " --against " + Path("b.jsonl")).message()),
              HasSubstr("no item in common"));
}

}  // namespace
}  // namespace oscar::cli
