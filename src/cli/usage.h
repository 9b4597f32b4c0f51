// What is said to whoever mistypes: the nearest command or option, and what the options of other
// servers are called here; and `oscar help`.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cli/command.h"

namespace oscar::cli {

void AddHelpCommand(CLI::App& app, RunFunction& run);

// One line on the arguments that nothing takes, in their order; empty where all were taken. `app`
// is the program, after a parse of `given` that failed.
std::string UnknownArguments(const CLI::App& app, const std::vector<std::string>& given);

// The candidate within two edits of `word`, or a third of its length; empty: none.
std::string Nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace oscar::cli
