// For tests of commands: a directory of the test's own and a way to run a command line.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <cstdio>
#include <filesystem>
#include <string>

#include "base/log.h"
#include "cli/command.h"
#include "oscar/status.h"

namespace oscar::cli {

class CommandTest : public testing::Test {
 protected:
  using AddCommand = void (*)(CLI::App&, RunFunction&);
  CommandTest(AddCommand add, std::string name) : add_(add), name_(std::move(name)) {}

  void SetUp() override {
    SetLogLevel(LogLevel::kError);
    std::string name = (std::filesystem::temp_directory_path() / "oscar_cli_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    dir_ = name;
  }
  void TearDown() override {
    std::error_code error;
    std::filesystem::remove_all(dir_, error);
    SetLogLevel(LogLevel::kInfo);
  }

  // Runs "oscar NAME <arguments>"; stdout is kept in output_.
  Status Run(const std::string& arguments) {
    CLI::App app{"test", "oscar"};
    RunFunction run;
    add_(app, run);
    try {
      app.parse(name_ + " " + arguments, false);
    } catch (const CLI::ParseError& error) {
      return InvalidArgument(std::string("usage: ") + error.what());
    }
    testing::internal::CaptureStdout();
    Status status = run();
    std::fflush(stdout);
    output_ = testing::internal::GetCapturedStdout();
    return status;
  }
  std::string Path(const std::string& name) const { return (dir_ / name).string(); }

  std::filesystem::path dir_;
  std::string output_;

 private:
  AddCommand add_;
  std::string name_;
};

}  // namespace oscar::cli
