#include "base/log.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/check.h"

namespace oscar {
namespace {

TEST(Log, LevelsFilterAndSinkReceives) {
  std::vector<std::string> lines;
  SetLogSink([&](LogLevel, std::string_view message) { lines.emplace_back(message); });
  const LogLevel before = GetLogLevel();
  SetLogLevel(LogLevel::kWarning);
  LogInfo("hidden {}", 1);
  LogWarning("shown {}", 2);
  SetLogLevel(LogLevel::kOff);
  LogError("hidden {}", 3);
  SetLogLevel(before);
  SetLogSink({});
  EXPECT_EQ(lines, std::vector<std::string>{"shown 2"});
}

TEST(Log, ParsesLevelNames) {
  LogLevel level = LogLevel::kInfo;
  EXPECT_TRUE(ParseLogLevel("debug", &level));
  EXPECT_EQ(level, LogLevel::kDebug);
  EXPECT_FALSE(ParseLogLevel("verbose", &level));
}

TEST(CheckDeathTest, NamesConditionAndMessage) {
  const int x = 3;
  EXPECT_DEATH(OSCAR_CHECK(x == 4, "x is {}", x), "check failed: x == 4: x is 3");
}

}  // namespace
}  // namespace oscar
