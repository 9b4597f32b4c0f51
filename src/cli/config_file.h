// --config FILE: options from an INI or TOML file. Only a regular file of bounded size is read: a
// device has no end, and a pipe may never begin.
#pragma once

#include <CLI/App.hpp>
#include <cstdint>

namespace oscar::cli {

// Every option at once takes a few KiB.
inline constexpr uint64_t kMaxConfigFileBytes = uint64_t{256} << 10;

void AddConfigFile(CLI::App& app);

}  // namespace oscar::cli
