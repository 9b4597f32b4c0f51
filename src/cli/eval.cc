// oscar eval: cache methods x tasks on one model, in one table.
#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include "base/file.h"
#include "base/log.h"
#include "cli/command.h"
#include "cli/model_options.h"
#include "engine/loaded_model.h"
#include "evaluate/evaluation.h"
#include "evaluate/report.h"

namespace oscar::cli {
namespace {

namespace fs = std::filesystem;

struct EvalArguments {
  ModelArguments model;
  SamplingArguments sampling;
  std::string suite = "demo";
  std::vector<std::string> tasks;
  std::string prefill = "method";
  std::string prose;
  int prose_windows = 8;
  int64_t limit = 0;
  int repeats = 1;
  bool strict_only = false;
  fs::path out;
};

std::vector<std::string> SplitList(const std::string& text) {
  std::vector<std::string> out;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    if (end > at) out.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

Status RunEval(const EvalArguments& arguments) {
  OSCAR_RETURN_IF_ERROR(CheckDevice(arguments.model));
  EvalOptions options;
  options.model = arguments.model.options;
  OSCAR_ASSIGN_OR_RETURN(options.methods, ParseMethods(SplitList(arguments.model.options.kv),
                                                       arguments.model.options.rotation));
  fs::path suite = arguments.suite;
  if (arguments.suite == "demo") {
    OSCAR_ASSIGN_OR_RETURN(const fs::path demo, FindDemoModel());
    suite = demo / "eval";
  }
  OSCAR_ASSIGN_OR_RETURN(options.suite, ReadSuite(suite, {arguments.limit, arguments.tasks}));
  for (const std::string& warning : options.suite.warnings) LogWarning("{}", warning);
  options.share_prefill = arguments.prefill == "exact";
  options.want_answers = !arguments.strict_only;
  options.repeats = arguments.repeats;
  options.seed = arguments.sampling.seed.value_or(0);
  SamplingOptions greedy;
  greedy.temperature = 0;
  const SamplingOptions sampling = arguments.sampling.Apply(greedy);
  if (sampling.temperature > 0) options.sampling = sampling;
  options.prose = arguments.prose;
  if (arguments.prose.empty() && fs::exists(suite / "heldout_prose.json")) {
    options.prose = suite / "heldout_prose.json";
  }
  if (arguments.prose == "none" || arguments.prose_windows == 0) options.prose.clear();
  options.prose_windows = arguments.prose_windows;
  options.out = arguments.out;
  OSCAR_ASSIGN_OR_RETURN(const EvalResults results, Evaluate(options));
  OSCAR_RETURN_IF_ERROR(WriteResults(results, arguments.out));
  fmt::print("{}", ResultsToTable(results));
  fmt::print("\n{}/results.json, results.csv and report.html written\n", arguments.out.string());
  return {};
}

struct ReportArguments {
  fs::path input;
  fs::path out;
};

Status RunReport(const ReportArguments& arguments) {
  fs::path input = arguments.input;
  if (fs::is_directory(input)) input /= "results.json";
  OSCAR_ASSIGN_OR_RETURN(const std::string text, ReadFile(input, uint64_t{1} << 28));
  OSCAR_ASSIGN_OR_RETURN(const EvalResults results, ResultsFromJson(text, input.string()));
  const fs::path out = arguments.out.empty() ? input.parent_path() : arguments.out;
  std::error_code error;
  fs::create_directories(out, error);
  OSCAR_RETURN_IF_ERROR(WriteResults(results, out));
  fmt::print("{}", ResultsToTable(results));
  return {};
}

}  // namespace

void AddEvalCommand(CLI::App& app, RunFunction& run) {
  auto arguments = std::make_shared<EvalArguments>();
  CLI::App* command =
      app.add_subcommand("eval", "Score cache methods on tasks: accuracy, perplexity, bits, bytes");
  AddModelOptions(*command, arguments->model);
  arguments->model.options.kv = "bf16,oscar+";
  command->get_option("--kv")
      ->description(
          "Methods to compare, joined by commas; NAME@DIR gives one a rotation of its own, "
          "NAME@none takes it away")
      ->default_str(arguments->model.options.kv);
  command
      ->add_option("--suite", arguments->suite,
                   "Directory of task files (*.jsonl), or demo for the demo model's")
      ->capture_default_str();
  command->add_option("--tasks", arguments->tasks, "Only these tasks, joined by commas")
      ->delimiter(',');
  command->add_option("--limit", arguments->limit, "First items of each task; 0 is all")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  command
      ->add_option("--prefill", arguments->prefill,
                   "method: each reads its prompts itself, by cells; exact: prompts are read once "
                   "in BF16 and shared by all methods")
      ->capture_default_str()
      ->check(CLI::IsMember({"method", "exact"}));
  command->add_flag("--strict-only", arguments->strict_only,
                    "Stop an item at its first wrong token: no answer score");
  command->add_option("--repeats", arguments->repeats, "Times each item is drawn")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000));
  command->add_option("--text", arguments->prose,
                      "JSON list of documents for perplexity; default: the suite's "
                      "heldout_prose.json; none: no text metrics");
  command->add_option("--text-windows", arguments->prose_windows, "Windows of 4096 tokens")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024));
  AddSamplingOptions(*command, arguments->sampling);
  command->add_option("--out", arguments->out, "Directory for results; a stopped run goes on there")
      ->required();
  command->callback([arguments, &run] { run = [arguments] { return RunEval(*arguments); }; });
}

void AddReportCommand(CLI::App& app, RunFunction& run) {
  auto arguments = std::make_shared<ReportArguments>();
  CLI::App* command =
      app.add_subcommand("report", "Write report.html, results.csv and the table of an evaluation");
  command->add_option("results", arguments->input, "results.json, or the directory that holds it")
      ->required();
  command->add_option("--out", arguments->out, "Directory; default: beside the results");
  command->callback([arguments, &run] { run = [arguments] { return RunReport(*arguments); }; });
}

}  // namespace oscar::cli
