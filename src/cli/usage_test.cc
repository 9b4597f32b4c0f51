#include "cli/usage.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

namespace oscar::cli {
namespace {

using testing::HasSubstr;

// What is said of a command line that does not parse.
std::string Told(const std::vector<std::string>& arguments) {
  CLI::App app{"", "oscar"};
  app.require_subcommand(1);
  app.fallthrough();
  RunFunction run;
  AddChatCommand(app, run);
  AddGenerateCommand(app, run);
  AddServeCommand(app, run);
  AddRotationCommand(app, run);
  AddHelpCommand(app, run);
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::ParseError&) {
    return UnknownArguments(app, arguments);
  }
  return "parsed";
}

TEST(Usage, TheNearest) {
  EXPECT_EQ(Nearest("serv", {"chat", "serve"}), "serve");
  EXPECT_EQ(Nearest("--prot", {"--port", "--host"}), "--port");
  EXPECT_EQ(Nearest("frobnicate", {"chat", "serve"}), "");
}

TEST(Usage, UnknownCommands) {
  EXPECT_EQ(Told({"srve"}), "oscar: unknown command: srve; did you mean serve?");
  EXPECT_EQ(Told({"frobnicate", "--port", "1"}),
            "oscar: unknown command: frobnicate; oscar help lists them");
  EXPECT_EQ(Told({"rotation", "verifi"}),
            "oscar rotation: unknown command: verifi; did you mean verify?");
}

TEST(Usage, UnknownOptionsInOrder) {
  EXPECT_EQ(Told({"serve", "--prot", "1", "--zebra", "--hots=x"}),
            "oscar serve: unknown option --prot (did you mean --port?); unknown option --zebra; "
            "unknown option --hots=x (did you mean --host?)");
  EXPECT_EQ(Told({"generate", "--promt", "hi"}),
            "oscar generate: unknown option --promt (did you mean --prompt?)");
}

TEST(Usage, OptionsOfOtherServers) {
  EXPECT_THAT(Told({"serve", "x", "--tensor-parallel-size", "2"}), HasSubstr("one device"));
  EXPECT_THAT(Told({"serve", "--gpu-memory-utilization=0.9"}), HasSubstr("--kv-memory"));
  EXPECT_THAT(Told({"serve", "--kv-cache-dtype", "fp8"}), HasSubstr("--kv"));
  EXPECT_THAT(Told({"chat", "-ngl", "99"}), HasSubstr("--device"));
  EXPECT_THAT(Told({"chat", "--cache-type-k", "q4_0"}), HasSubstr("--kv"));
  // Those that mean the same are taken.
  for (const std::vector<std::string>& same : std::vector<std::vector<std::string>>{
           {"serve", "-m", "x", "-c", "4096", "-t", "2", "--served-model-name", "y"},
           {"serve", "--ctx-size", "4096", "--api-key", "k", "x"},
           {"generate", "x", "-p", "hi", "-n", "5", "--temp", "0"},
           {"chat", "x", "--n-predict", "5"}}) {
    EXPECT_EQ(Told(same), "parsed") << same[1];
  }
}

}  // namespace
}  // namespace oscar::cli
