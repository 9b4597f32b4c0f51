// Leveled log lines on stderr. Data goes to stdout; everything else comes here, so that a command's
// output can be piped. Safe from any thread. The sink is the only global besides the SIMD table.
#pragma once

#include <fmt/core.h>

#include <functional>
#include <string>
#include <string_view>

namespace oscar {

enum class LogLevel : int { kDebug = 0, kInfo, kWarning, kError, kOff };

void SetLogLevel(LogLevel level);
LogLevel GetLogLevel();
// Parses "debug", "info", "warning", "error", "off"; returns false for anything else.
bool ParseLogLevel(std::string_view text, LogLevel* level);

// Replaces stderr; an empty function restores it. For tests and for programs that embed the
// library.
using LogSink = std::function<void(LogLevel, std::string_view message)>;
void SetLogSink(LogSink sink);

void LogMessage(LogLevel level, std::string_view message);

template <typename... Args>
void Log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
  if (level < GetLogLevel()) return;
  LogMessage(level, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void LogDebug(fmt::format_string<Args...> format, Args&&... args) {
  Log(LogLevel::kDebug, format, std::forward<Args>(args)...);
}
template <typename... Args>
void LogInfo(fmt::format_string<Args...> format, Args&&... args) {
  Log(LogLevel::kInfo, format, std::forward<Args>(args)...);
}
template <typename... Args>
void LogWarning(fmt::format_string<Args...> format, Args&&... args) {
  Log(LogLevel::kWarning, format, std::forward<Args>(args)...);
}
template <typename... Args>
void LogError(fmt::format_string<Args...> format, Args&&... args) {
  Log(LogLevel::kError, format, std::forward<Args>(args)...);
}

}  // namespace oscar
