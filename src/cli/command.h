// One subcommand = one file with one Add function. It declares its options on a CLI::App, once,
// with default and unit, and sets what main runs after parsing. Data goes to stdout; progress,
// warnings and errors to stderr.
#pragma once

#include <functional>

#include "oscar/status.h"

namespace CLI {
class App;
}

namespace oscar::cli {

using RunFunction = std::function<Status()>;

// `run` outlives parsing; the callback that CLI11 calls for the chosen subcommand assigns it.
void AddBenchCommand(CLI::App& app, RunFunction& run);
void AddCalibrateCommand(CLI::App& app, RunFunction& run);
void AddChatCommand(CLI::App& app, RunFunction& run);
void AddDemoCommand(CLI::App& app, RunFunction& run);
// Subcommands of bench.
void AddDecodeBench(CLI::App& bench, RunFunction& run);
void AddServeBench(CLI::App& bench, RunFunction& run);
void AddEvalCommand(CLI::App& app, RunFunction& run);
void AddGenerateCommand(CLI::App& app, RunFunction& run);
void AddInfoCommand(CLI::App& app, RunFunction& run);
void AddInspectCommand(CLI::App& app, RunFunction& run);
// man and completions, which help does not list.
void AddManualCommands(CLI::App& app, RunFunction& run);
void AddPullCommand(CLI::App& app, RunFunction& run);
void AddReportCommand(CLI::App& app, RunFunction& run);
void AddReproduceCommand(CLI::App& app, RunFunction& run);
void AddRotationCommand(CLI::App& app, RunFunction& run);
void AddServeCommand(CLI::App& app, RunFunction& run);
void AddTokenizeCommand(CLI::App& app, RunFunction& run);
void AddZooCommand(CLI::App& app, RunFunction& run);

}  // namespace oscar::cli
