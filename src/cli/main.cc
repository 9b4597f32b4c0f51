// oscar: one binary, one subcommand a file. Exit codes: 0 ok, 1 failure, 2 usage, 130 interrupted.
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <exception>
#include <new>
#include <string_view>

#include "base/log.h"
#include "cli/command.h"
#include "cli/config_file.h"
#include "cli/usage.h"
#include "grammar/compiler.h"
#include "oscar/version.h"

namespace oscar::cli {
namespace {

constexpr int kExitUsage = 2;

// Every option is also an environment variable, OSCAR_<NAME>: --kv-memory is OSCAR_KV_MEMORY.
void NameEnvironmentVariables(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    if (option->get_lnames().empty()) continue;
    std::string name = option->get_lnames().front();
    if (name == "help" || name == "version" || name == "config") continue;
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) {
      return c == '-' ? '_' : static_cast<char>(std::toupper(c));
    });
    option->envname("OSCAR_" + name);
  }
  for (CLI::App* sub : app.get_subcommands({})) NameEnvironmentVariables(*sub);
}

int Main(int argc, char** argv) {
  CLI::App app{
      "Serve and study large language models on a 2-bit KV cache.\n"
      "Each command explains itself: oscar help COMMAND",
      "oscar"};
  app.require_subcommand(1);
  app.set_version_flag("--version", std::string("oscar ") + kVersion);
  AddConfigFile(app);
  app.get_formatter()->column_width(34);
  std::string log_level = "info";
  app.add_option("--log-level", log_level, "debug, info, warning, error or off")
      ->capture_default_str()
      ->check(CLI::IsMember({"debug", "info", "warning", "error", "off"}));
  app.fallthrough();

  RunFunction run;
  AddDemoCommand(app, run);
  AddBenchCommand(app, run);
  AddChatCommand(app, run);
  AddGenerateCommand(app, run);
  AddCalibrateCommand(app, run);
  AddEvalCommand(app, run);
  AddInspectCommand(app, run);
  AddInfoCommand(app, run);
  AddPullCommand(app, run);
  AddReportCommand(app, run);
  AddReproduceCommand(app, run);
  AddRotationCommand(app, run);
  AddServeCommand(app, run);
  AddTokenizeCommand(app, run);
  AddZooCommand(app, run);
  AddManualCommands(app, run);
  AddHelpCommand(app, run);
  NameEnvironmentVariables(app);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // Help and version are "errors" with code 0; everything else is a usage error.
    if (error.get_exit_code() != 0) {
      if (const std::string unknown = UnknownArguments(app, {argv + 1, argv + argc});
          !unknown.empty()) {
        std::fprintf(stderr, "%s\n", unknown.c_str());
        return kExitUsage;
      }
    }
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  LogLevel level = LogLevel::kInfo;
  ParseLogLevel(log_level, &level);
  SetLogLevel(level);

  const Status status = run();
  if (!status.ok()) {
    std::fprintf(stderr, "oscar: %s\n", status.message().c_str());
  }
  // A flush on the way fails once and forgets; the stream remembers.
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    std::fprintf(stderr, "oscar: cannot write to standard output; is the disk full?\n");
    return 1;
  }
  return InfoOf(status.code()).exit_code;
}

}  // namespace
}  // namespace oscar::cli

int main(int argc, char** argv) {
  try {
    // `oscar serve` starts itself so; nothing of it is for users.
    if (argc == 2 && std::string_view(argv[1]) == oscar::kGrammarWorkerArgument) {
      return oscar::RunGrammarWorker();
    }
    return oscar::cli::Main(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "oscar: out of memory\n");
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "oscar: %s\n", error.what());
    return 1;
  }
}
