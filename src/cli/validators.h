// Checks of option values with errors that fit a line; CLI11's own spell out the largest double.
#pragma once

#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <cstdlib>
#include <string>

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

}  // namespace oscar::cli
