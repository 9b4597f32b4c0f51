// Formats of strings as regular expressions: one table for schemas and for the arguments of calls.
// Every string that matches is of the format, also to validators that are strict about it: dates
// that exist, addresses without leading zeros, labels of 63 characters at most. Some strings of a
// format match none (host names of more than four labels). Pure functions.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace oscar {

// Without anchors, of printable ASCII without quotes and backslashes; classes and counted
// repetitions alone, so that every reader of expressions takes it. nullopt: not in the table.
std::optional<std::string> FormatPattern(std::string_view format);

// Whether answers keep to the format: those of the table, and those that the grammar library knows.
// Any other format is a note to readers, as JSON Schema has it.
bool IsKnownFormat(std::string_view format);

}  // namespace oscar
