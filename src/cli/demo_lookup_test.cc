// Commands where the demo model does not lie beside the program: it is missed only where something
// of it is needed, and then the error says what to name in its place.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "cli/command_test_util.h"
#include "engine/loaded_model.h"

namespace oscar::cli {
namespace {

using testing::HasSubstr;

class WithoutDemoModel : public CommandTest {
 protected:
  using CommandTest::CommandTest;
  void SetUp() override {
    CommandTest::SetUp();
    if (const char* set = std::getenv("OSCAR_DEMO_MODEL")) saved_ = set;
    unsetenv("OSCAR_DEMO_MODEL");
    // The presets build where the search beside the program does not reach.
    if (FindDemoModel().has_value()) GTEST_SKIP() << "the build directory lies beside models/demo";
  }
  void TearDown() override {
    if (!saved_.empty()) setenv("OSCAR_DEMO_MODEL", saved_.c_str(), 1);
    CommandTest::TearDown();
  }

 private:
  std::string saved_;
};

class EvalWithoutDemoModel : public WithoutDemoModel {
 protected:
  EvalWithoutDemoModel() : WithoutDemoModel(AddEvalCommand, "eval") {}
  // With an address that is none, so that what comes after the tasks fails at once.
  std::string Error(const std::string& arguments) {
    return std::string(Run("--endpoint nowhere --out " + Path("out") + " " + arguments).message());
  }
};

TEST_F(EvalWithoutDemoModel, TasksWithoutProseNeedNothingOfIt) {
  const std::string model = "--length 2000 --samples 1 --model " OSCAR_DEMO_MODEL " ";
  EXPECT_THAT(Error(model + "--suite niah_single_1,vt,fwe"), HasSubstr("nowhere"));
  const std::string prose = Error(model + "--suite niah_single_2");
  EXPECT_THAT(prose, HasSubstr("niah_single_2"));
  EXPECT_THAT(prose, HasSubstr("--haystack FILE"));
  EXPECT_THAT(Error(model + "--suite ruler"), HasSubstr("--haystack FILE"));
  EXPECT_THAT(
      Error(model + "--suite niah_single_2 --haystack " OSCAR_DEMO_MODEL "/eval/haystack.txt"),
      HasSubstr("nowhere"));
}

TEST_F(EvalWithoutDemoModel, SaysWhatWouldBeNeeded) {
  EXPECT_THAT(Error("--suite niah_single_1"), HasSubstr("--model DIR"));
  EXPECT_THAT(Error("--suite demo"), HasSubstr("--suite DIR"));
}

class CalibrateWithoutDemoModel : public WithoutDemoModel {
 protected:
  CalibrateWithoutDemoModel() : WithoutDemoModel(AddCalibrateCommand, "calibrate") {}
};

TEST_F(CalibrateWithoutDemoModel, TheSampleIsBuiltIn) {
  const Status status =
      Run("--model " OSCAR_DEMO_MODEL " --tokens 64 --kv-memory 64MiB --out " + Path("out"));
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_THAT(output_, HasSubstr("64 tokens in 1 sequence\n"));
  EXPECT_THAT(std::string(Run("--tokens 64 --out " + Path("out")).message()), HasSubstr("--model"));
}

}  // namespace
}  // namespace oscar::cli
