#include "cli/byte_size.h"

#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <utility>

namespace oscar::cli {

Result<uint64_t> ParseByteSize(std::string_view text) {
  const auto refuse = [&] {
    return Unexpected(InvalidArgument(
        fmt::format("{} is not a size in bytes, such as 1073741824, 512MiB or 1.5GiB", text)));
  };
  // from_chars alone would take a minus, "inf" and "nan".
  if (text.empty() || (std::isdigit(static_cast<unsigned char>(text[0])) == 0 && text[0] != '.')) {
    return refuse();
  }
  const char* const end = text.data() + text.size();
  std::string unit;
  const auto read_unit = [&](const char* from) {
    while (from != end && *from == ' ') ++from;
    unit.assign(from, end);
    std::ranges::transform(unit, unit.begin(), [](unsigned char c) { return std::tolower(c); });
    constexpr std::array<std::array<std::string_view, 3>, 5> kUnits = {{{"", "b", ""},
                                                                        {"k", "kb", "kib"},
                                                                        {"m", "mb", "mib"},
                                                                        {"g", "gb", "gib"},
                                                                        {"t", "tb", "tib"}}};
    for (size_t power = 0; power < kUnits.size(); ++power) {
      if (std::ranges::find(kUnits[power], unit) != kUnits[power].end()) {
        return static_cast<int>(10 * power);
      }
    }
    return -1;
  };
  // Whole numbers exactly; a double holds 53 bits.
  uint64_t whole = 0;
  const auto [after_whole, whole_error] = std::from_chars(text.data(), end, whole);
  if (whole_error == std::errc() && (after_whole == end || *after_whole != '.')) {
    const int shift = read_unit(after_whole);
    if (shift < 0 || (shift > 0 && whole >> (64 - shift) != 0)) return refuse();
    return whole << shift;
  }
  double value = 0.0;
  const auto [after, error] = std::from_chars(text.data(), end, value, std::chars_format::fixed);
  if (error != std::errc()) return refuse();
  const int shift = read_unit(after);
  if (shift < 0) return refuse();
  const double bytes = std::ldexp(value, shift);
  if (bytes >= 0x1p64) return refuse();
  return static_cast<uint64_t>(bytes);
}

CLI::Option* TakesByteSize(CLI::Option* option) {
  const auto convert = [](std::string& text) -> std::string {
    const Result<uint64_t> bytes = ParseByteSize(text);
    if (!bytes.has_value()) return bytes.error().message();
    text = std::to_string(*bytes);
    return "";
  };
  return option->transform(CLI::Validator(convert, "SIZE", "bytes"));
}

}  // namespace oscar::cli
