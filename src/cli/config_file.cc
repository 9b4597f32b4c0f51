#include "cli/config_file.h"

#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <string>

#include "base/file.h"

namespace oscar::cli {

void AddConfigFile(CLI::App& app) {
  // Runs before CLI11 opens the file.
  const auto check = [](const std::string& path) {
    const Result<std::string> text = ReadFile(path, kMaxConfigFileBytes);
    return text.has_value() ? std::string() : text.error().message();
  };
  app.set_config("--config", "",
                 "Read options from an INI or TOML file: a [serve] section with lines such as "
                 "port=8080 or kv-memory=\"2GiB\"")
      ->check(CLI::Validator(check, "", "config file"));
  app.allow_config_extras(CLI::config_extras_mode::error);
}

}  // namespace oscar::cli
