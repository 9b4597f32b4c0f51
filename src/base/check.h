// OSCAR_CHECK(condition, "format", args...): aborts with a message when a programmer's assumption
// is wrong. Must be unreachable from user input: files, requests and options get a Status instead.
// OSCAR_DCHECK is the same in debug builds and nothing in release.
#pragma once

#include <fmt/core.h>

#include <string>

namespace oscar::internal {
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition,
                              const std::string& message);
inline std::string CheckMessage() { return {}; }
template <typename... Args>
std::string CheckMessage(fmt::format_string<Args...> format, Args&&... args) {
  return fmt::format(format, std::forward<Args>(args)...);
}
}  // namespace oscar::internal

#define OSCAR_CHECK(condition, ...)                                                 \
  do {                                                                              \
    if (!(condition)) [[unlikely]]                                                  \
      ::oscar::internal::CheckFailed(__FILE__, __LINE__, #condition,                \
                                     ::oscar::internal::CheckMessage(__VA_ARGS__)); \
  } while (false)

#ifdef NDEBUG
#define OSCAR_DCHECK(condition, ...)                \
  do {                                              \
    if (false) OSCAR_CHECK(condition, __VA_ARGS__); \
  } while (false)
#else
#define OSCAR_DCHECK(condition, ...) OSCAR_CHECK(condition, __VA_ARGS__)
#endif
