#include "base/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>

#include "base/check.h"

namespace oscar {
namespace {

std::atomic<int> g_level{static_cast<int>(LogLevel::kInfo)};
std::mutex g_sink_mutex;

LogSink& CustomSink() {
  static auto* sink = new LogSink;  // never destroyed: threads may log during exit
  return *sink;
}

spdlog::logger& StderrLogger() {
  static auto* logger = [] {
    auto* made =
        new spdlog::logger("oscar", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    made->set_pattern("%^%l%$: %v");
    made->set_level(spdlog::level::trace);
    made->flush_on(spdlog::level::trace);
    return made;
  }();
  return *logger;
}

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    default:
      return spdlog::level::err;
  }
}

}  // namespace

void SetLogLevel(LogLevel level) { g_level.store(static_cast<int>(level)); }

LogLevel GetLogLevel() { return static_cast<LogLevel>(g_level.load(std::memory_order_relaxed)); }

bool ParseLogLevel(std::string_view text, LogLevel* level) {
  if (text == "debug")
    *level = LogLevel::kDebug;
  else if (text == "info")
    *level = LogLevel::kInfo;
  else if (text == "warning")
    *level = LogLevel::kWarning;
  else if (text == "error")
    *level = LogLevel::kError;
  else if (text == "off")
    *level = LogLevel::kOff;
  else
    return false;
  return true;
}

void SetLogSink(LogSink sink) {
  std::lock_guard lock(g_sink_mutex);
  CustomSink() = std::move(sink);
}

void LogMessage(LogLevel level, std::string_view message) {
  if (level < GetLogLevel()) return;
  std::lock_guard lock(g_sink_mutex);
  if (CustomSink()) {
    CustomSink()(level, message);
  } else {
    StderrLogger().log(ToSpdlog(level), message);
  }
}

namespace internal {

void CheckFailed(const char* file, int line, const char* condition, const std::string& message) {
  fmt::print(stderr, "{}:{}: check failed: {}{}{}\n", file, line, condition,
             message.empty() ? "" : ": ", message);
  std::fflush(stderr);
  std::abort();
}

}  // namespace internal
}  // namespace oscar
