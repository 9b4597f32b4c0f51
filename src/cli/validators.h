// Checks of option values with errors that fit a line; CLI11's own spell out the largest double.
#pragma once

#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

namespace oscar::cli {

inline CLI::Validator NumberThat(const char* what, bool (*holds)(double)) {
  const auto check = [what, holds](const std::string& text) {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    const bool is_number = end != text.c_str() && *end == '\0';
    return is_number && holds(value) ? "" : fmt::format("{} is not {}", text, what);
  };
  return {check, what, what};
}

inline CLI::Validator NonNegative() {
  return NumberThat("0 or more", [](double value) { return value >= 0; });
}
inline CLI::Validator Positive() {
  return NumberThat("above 0", [](double value) { return value > 0; });
}

inline CLI::Validator HistoryBits() {
  return NumberThat("between 2.125 and 5", [](double x) { return x >= 2.125 && x <= 5; });
}

// An unset variable of a script must not choose a default.
inline CLI::Validator NotEmpty() {
  const auto check = [](const std::string& text) { return text.empty() ? "is empty" : ""; };
  return {check, "", "not empty"};
}

// Before a conversion to an unsigned number, which would wrap.
inline CLI::Validator NoMinus() {
  const auto check = [](const std::string& text) {
    return text.starts_with('-') ? fmt::format("{} is not 0 or more", text) : "";
  };
  return {check, "", "no minus"};
}

// Names of enumerators; `list` is how help and errors spell them.
template <typename T>
CLI::Validator OneOf(std::vector<std::pair<std::string, T>> names, const char* list) {
  const auto convert = [names = std::move(names), list](std::string& text) -> std::string {
    for (const auto& [name, value] : names) {
      if (name != text) continue;
      text = std::to_string(static_cast<int>(value));
      return "";
    }
    return fmt::format("{} is not {}", text, list);
  };
  return {convert, list, "one of"};
}

}  // namespace oscar::cli
