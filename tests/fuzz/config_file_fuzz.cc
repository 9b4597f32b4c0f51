// The text of a --config file on the options of `oscar serve`: parsed, or refused with an error of
// the parser's.
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <sstream>
#include <string>

#include "cli/command.h"
#include "cli/config_file.h"
#include "fuzz_util.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace oscar;
  if (size > cli::kMaxConfigFileBytes) return 0;  // refused before it is read
  CLI::App app("fuzz", "oscar");
  cli::RunFunction run;
  cli::AddConfigFile(app);
  cli::AddServeCommand(app, run);
  app.fallthrough();
  std::istringstream text{std::string(FuzzText(data, size))};
  try {
    app.parse_from_stream(text);
  } catch (const CLI::Error& error) {
    OSCAR_CHECK(error.get_exit_code() != 0 || error.get_name() == "CallForHelp");
  }
  return 0;
}
