// oscar eval: cache methods x tasks on one model, in one table.
#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <cstdlib>
#include <set>

#include "base/file.h"
#include "base/log.h"
#include "cli/calibrate_once.h"
#include "cli/command.h"
#include "cli/eval_suites.h"
#include "cli/interrupt.h"
#include "cli/model_options.h"
#include "cli/validators.h"
#include "engine/loaded_model.h"
#include "run/comparison.h"
#include "run/endpoint_evaluation.h"
#include "run/eval_items.h"
#include "run/eval_report.h"
#include "run/evaluation.h"
#include "run/item_log.h"
#include "run/sweep.h"
#include "sandbox/sandbox.h"

namespace oscar::cli {
namespace {

namespace fs = std::filesystem;

struct EvalArguments {
  ModelArguments model;
  SamplingArguments sampling;
  SuiteArguments suite;
  std::vector<double> bits;
  std::vector<std::string> sweep;
  std::string prefill = "method";
  std::string windows = "auto";
  std::string prose;
  int prose_windows = 8;
  int repeats = 0;
  int64_t max_tokens = 0;
  bool strict_only = false;
  EndpointOptions endpoint;
  fs::path out;
  // Of the command line, by name; and all that belong to a model that is run here.
  std::set<std::string> given, of_model;
};

// Those of the names that the command line has.
std::string GivenOf(const EvalArguments& arguments, const std::set<std::string>& names) {
  std::string list;
  for (const std::string& name : names) {
    if (arguments.given.contains(name)) list += (list.empty() ? "" : ", ") + name;
  }
  return list;
}

// An option that would be passed over is an error: a run must not differ from its command line.
Status CheckOptions(const EvalArguments& arguments) {
  const auto given_of = [&](const std::set<std::string>& names) {
    return GivenOf(arguments, names);
  };
  if (arguments.given.contains("--endpoint")) {
    if (arguments.endpoint.url.empty()) {
      return InvalidArgument("--endpoint is empty; give http://HOST:PORT");
    }
    std::set<std::string> names = arguments.of_model;
    names.erase("--model");  // for its tokenizer
    names.insert(
        {"--sweep", "--text", "--text-windows", "--strict-only", "--prefill", "--windows"});
    if (const std::string list = given_of(names); !list.empty()) {
      return InvalidArgument(fmt::format(
          "{}: for a model that is run here, not for --endpoint; leave one of them out", list));
    }
  } else if (const std::string list = given_of({"--endpoint-model", "--parallel"}); !list.empty()) {
    return InvalidArgument(fmt::format("{}: only with --endpoint", list));
  }
  const bool has_ruler = std::ranges::any_of(arguments.suite.suites, IsRulerSuite);
  const bool has_demo =
      std::ranges::find(arguments.suite.suites, "demo") != arguments.suite.suites.end();
  if (const std::string list = given_of({"--haystack", "--length"}); !has_ruler && !list.empty()) {
    return InvalidArgument(fmt::format("{}: only with RULER's tasks, as --suite ruler", list));
  }
  if (!has_ruler && !has_demo && arguments.given.contains("--samples")) {
    return InvalidArgument("--samples: only with suites that are generated: demo, ruler");
  }
  const bool has_text = arguments.given.contains("--text") && arguments.prose != "none";
  if (has_text && arguments.prose_windows == 0) {
    return InvalidArgument("--text: --text-windows 0 reads none of it; leave one of them out");
  }
  if (arguments.prose == "none" && arguments.prose_windows > 0 &&
      arguments.given.contains("--text-windows")) {
    return InvalidArgument("--text-windows: there are none with --text none; leave it out");
  }
  return {};
}

// The same of options that only some methods have a use for.
Status CheckMethods(const EvalArguments& arguments, const std::vector<EvalMethod>& methods) {
  const auto has = [&](const auto& uses) { return std::ranges::any_of(methods, uses); };
  const fs::path& rotation = arguments.model.options.rotation;
  if (!rotation.empty() && !has([&](const EvalMethod& m) { return m.rotation == rotation; })) {
    return InvalidArgument(
        "--rotation: every method of --kv has its own or takes none; leave it out");
  }
  if (has([](const EvalMethod& m) { return m.kv != "bf16"; })) return {};
  const std::string list = GivenOf(arguments, {"--bits", "--sink", "--recent", "--prefill-cell",
                                               "--group", "--k-clip", "--v-clip"});
  if (list.empty()) return {};
  return InvalidArgument(fmt::format(
      "{}: --kv bf16 keeps every token in BF16, so this has no effect; leave it out", list));
}

// The same of options that only some tasks have a use for.
Status CheckTasks(const EvalArguments& arguments, const EvalSuite& suite) {
  const bool uses_tokenizer =
      std::ranges::any_of(arguments.suite.suites, IsRulerSuite) ||
      std::ranges::any_of(suite.tasks, [](const EvalTask& task) { return task.max_input > 0; });
  if (arguments.suite.is_remote && arguments.given.contains("--model") && !uses_tokenizer) {
    return InvalidArgument(
        "--model: with --endpoint only its tokenizer is used, to count and cut texts, and none of "
        "these tasks needs that; --endpoint-model names the server's model");
  }
  const bool draws = std::ranges::any_of(suite.tasks, [](const EvalTask& task) {
    return task.sampling.has_value() && task.sampling->temperature > 0;
  });
  if (const std::string list = GivenOf(arguments, {"--top-k", "--top-p", "--min-p"});
      !draws && !list.empty()) {
    return InvalidArgument(fmt::format(
        "{}: the outputs of these tasks are greedy; add --temperature to sample them", list));
  }
  for (const EvalTask& task : suite.tasks) {
    const bool has_references = std::ranges::any_of(
        task.items, [](const EvalItem& item) { return !item.reference.empty(); });
    if (arguments.strict_only && !has_references) {
      return InvalidArgument(
          fmt::format("--strict-only: {} has no references, so that nothing of it would be scored; "
                      "leave the option or the task out",
                      task.name));
    }
  }
  return {};
}

// The rotations of a sweep over calibrations, in OUT/calibration.
Status CalibrateSweep(const ModelOptions& model, const fs::path& out,
                      std::vector<EvalMethod>& methods) {
  for (EvalMethod& method : methods) {
    CalibrateOptions options;
    options.model = model;
    options.model.rotation.clear();
    std::string name;
    if (const auto tokens = method.swept.find(kSweepTokens); tokens != method.swept.end()) {
      options.text.tokens = std::atoll(tokens->second.c_str());
      name = tokens->second;
    }
    if (const auto text = method.swept.find(kSweepText); text != method.swept.end()) {
      if (text->second != "sample") options.text.data = text->second;
      std::string part = text->second;
      std::ranges::replace(part, '/', '_');
      name += (name.empty() ? "" : " ") + part;
    }
    if (name.empty()) continue;
    method.rotation = out / "calibration" / name;
    OSCAR_RETURN_IF_ERROR(CalibrateOnce(options, method.rotation));
  }
  return {};
}

Status RunEval(EvalArguments& arguments) {
  const ClearUpScope scope(EndSandboxes);
  OSCAR_RETURN_IF_ERROR(CheckOptions(arguments));
  EvalOptions options;
  OSCAR_ASSIGN_OR_RETURN(options.methods,
                         ParseMethods(SplitList(arguments.model.options.kv),
                                      arguments.model.options.rotation, arguments.bits));
  OSCAR_RETURN_IF_ERROR(CheckMethods(arguments, options.methods));
  OSCAR_ASSIGN_OR_RETURN(options.sweep, ParseSweep(arguments.sweep));
  if (!options.sweep.empty()) {
    OSCAR_ASSIGN_OR_RETURN(options.methods, ExpandSweep(options.methods, options.sweep));
  }
  // A server under test has its own weights; the tokenizer counts tokens.
  OSCAR_RETURN_IF_ERROR(arguments.model.Obtain(arguments.endpoint.url.empty() ? ModelParts::kWeights
                                                                              : ModelParts::kText));
  options.model = arguments.model.options;
  arguments.suite.generates_demo = arguments.given.contains("--samples");
  arguments.suite.seed = arguments.sampling.seed;
  arguments.suite.model = arguments.model.options.model;
  arguments.suite.is_remote = !arguments.endpoint.url.empty();
  OSCAR_ASSIGN_OR_RETURN(options.suite, MakeSuites(arguments.suite, options.prose));
  OSCAR_RETURN_IF_ERROR(SetSampling(
      options.suite, [&](const SamplingOptions& base) { return arguments.sampling.Apply(base); },
      arguments.repeats));
  OSCAR_RETURN_IF_ERROR(CheckTasks(arguments, options.suite));
  for (EvalTask& task : options.suite.tasks) {
    for (EvalItem& item : task.items) {
      if (arguments.max_tokens > 0) item.max_tokens = arguments.max_tokens;
    }
  }
  options.prefill = arguments.prefill == "exact"  ? EvalPrefill::kExact
                    : arguments.prefill == "cell" ? EvalPrefill::kCell
                                                  : EvalPrefill::kMethod;
  options.windows = arguments.windows == "tokens"  ? EvalWindows::kTokens
                    : arguments.windows == "pages" ? EvalWindows::kPages
                                                   : EvalWindows::kAuto;
  options.want_answers = !arguments.strict_only;
  options.seed = arguments.sampling.seed.value_or(0);
  if (!arguments.prose.empty()) options.prose = arguments.prose;
  if (arguments.prose == "none" || arguments.prose_windows == 0) options.prose.clear();
  options.prose_windows = arguments.prose_windows;
  if (options.prose.empty() && arguments.prose_windows > 0 &&
      arguments.given.contains("--text-windows")) {
    return InvalidArgument(
        "--text-windows: the suite has no heldout_prose.json; name a text with --text FILE");
  }
  options.out = arguments.out;
  OSCAR_RETURN_IF_ERROR(CalibrateSweep(options.model, options.out, options.methods));
  EvalResults results;
  if (arguments.endpoint.url.empty()) {
    OSCAR_ASSIGN_OR_RETURN(results, Evaluate(options));
  } else {
    EndpointOptions endpoint = arguments.endpoint;
    if (const char* key = std::getenv("OPENAI_API_KEY")) endpoint.api_key = key;
    OSCAR_ASSIGN_OR_RETURN(results, EvaluateEndpoint(options, endpoint));
  }
  OSCAR_RETURN_IF_ERROR(WriteResults(results, arguments.out));
  fmt::print("{}", ResultsToTable(results));
  fmt::print("\n{}/results.json, results.csv and report.html written\n", arguments.out.string());
  for (const auto& [name, chart] : SweepCharts(results)) {
    fmt::print("{}\n", (arguments.out / name).string());
  }
  if (arguments.endpoint.url.empty()) return {};
  if (const int64_t failed = results.methods.front().Failed(); failed > 0) {
    return Unavailable(fmt::format(
        "{} requests have no answer and count as wrong, so these scores are lower bounds; "
        "the same command asks them again",
        failed));
  }
  return {};
}

struct ReportArguments {
  fs::path input;
  fs::path against;
  fs::path out;
};

Status RunReport(const ReportArguments& arguments) {
  fs::path input = arguments.input;
  if (!arguments.against.empty()) {
    OSCAR_ASSIGN_OR_RETURN(const std::vector<ItemRecord> items, ReadItems(input));
    OSCAR_ASSIGN_OR_RETURN(const std::vector<ItemRecord> others, ReadItems(arguments.against));
    const Comparison comparison = CompareRuns(items, others);
    if (comparison.tasks.empty()) {
      return NotFound(fmt::format(
          "{} and {} have no item in common that has a strict score, which needs a reference",
          input.string(), arguments.against.string()));
    }
    fmt::print("{}", ComparisonToTable(comparison));
    return {};
  }
  if (IsDirectory(input)) input /= "results.json";
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
  command->remove_option(command->get_option("--bits"));
  command
      ->add_option("--bits", arguments->bits,
                   std::string(kBitsHelp) + "; several joined by commas are a method each")
      ->delimiter(',')
      ->check(HistoryBits())
      ->group("KV cache");
  for (const CLI::Option* option : command->get_options()) {
    if (option->get_name() != "--help") arguments->of_model.insert(option->get_name());
  }
  arguments->model.options.kv = "bf16,oscar+";
  command->get_option("--kv")
      ->description(
          "Methods to compare, joined by commas; NAME@DIR gives one its own rotation, "
          "NAME@none takes it away, oscar+:2.5 gives it bits")
      ->default_str(arguments->model.options.kv);
  command
      ->add_option("--suite", arguments->suite.suites,
                   "What to measure, joined by commas: demo, a directory of task files (*.jsonl), "
                   "ruler or one of its tasks, or a benchmark with your copy of its data: "
                   "gsm8k=FILE, math500=, aime25=, humaneval=, gpqa=, mmlu=, livecodebench=, "
                   "longbench-e=DIR; "
                   "qa_1=FILE and qa_2= are RULER's, from SQuAD and HotpotQA")
      ->delimiter(',')
      ->capture_default_str();
  command
      ->add_option("--tasks", arguments->suite.tasks,
                   "Only these tasks of the suites, such as sort, vt or lcc_e")
      ->delimiter(',');
  command
      ->add_option("--limit", arguments->suite.limit,
                   "First items of each task, 0 is all; 60,hop=20 sets one task apart")
      ->capture_default_str();
  command
      ->add_option("--length", arguments->suite.lengths,
                   "Tokens of RULER's items, joined by commas")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::Range(512, 1 << 24));
  command
      ->add_option(
          "--samples", arguments->suite.samples,
          "Items per task of suites that are generated: RULER's, and the demo suite, which "
          "without this option is the one that ships")
      ->capture_default_str()
      ->check(CLI::Range(1, 100000));
  command
      ->add_option("--haystack", arguments->suite.haystack,
                   "Text to hide RULER's needles in, .txt or RULER's .json; default: the demo "
                   "suite's")
      ->check(NotEmpty());
  command
      ->add_option("--max-tokens", arguments->max_tokens,
                   "Longest output, in place of the task's own")
      ->check(Positive());
  command
      ->add_option("--sweep", arguments->sweep,
                   "Vary a setting of every method, as in sink=0,64; given twice: a grid. sink, "
                   "recent, group, bits, calibration-tokens, calibration-text (sample, or as "
                   "--data of oscar calibrate)")
      ->check(NotEmpty());
  command->add_option("--endpoint", arguments->endpoint.url,
                      "Measure this OpenAI-compatible server in place of a model here; "
                      "$OPENAI_API_KEY is sent where set, and --model names its tokenizer for "
                      "tasks of a given length");
  command->add_option("--endpoint-model", arguments->endpoint.model,
                      "Its model; default: the first it lists");
  command->add_option("--parallel", arguments->endpoint.parallel, "Requests to it at a time")
      ->capture_default_str()
      ->check(CLI::Range(1, 256));
  command
      ->add_option("--prefill", arguments->prefill,
                   "Who reads prompts. method: each itself, by cells; cell: the first cell is read "
                   "once in BF16 and shared; exact: the whole prompt is")
      ->capture_default_str()
      ->check(CLI::IsMember({"method", "cell", "exact"}));
  command
      ->add_option("--windows", arguments->windows,
                   "Where the BF16 window ends. pages: as stored, 64 tokens leave it together; "
                   "tokens: at the token, as methods are defined (slower, CPU); auto: tokens for "
                   "methods whose window is shorter than what pages keep, with --prefill-cell 64 "
                   "on the CPU, else pages")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "pages", "tokens"}));
  command->add_flag("--strict-only", arguments->strict_only,
                    "End an item's output at its first wrong token: no answer score");
  command
      ->add_option("--repeats", arguments->repeats,
                   "Times each item is sampled; default: as published, once for greedy outputs")
      ->check(CLI::Range(1, 1000));
  command
      ->add_option("--text", arguments->prose,
                   "JSON list of documents for perplexity; default: the suite's "
                   "heldout_prose.json; none: no text metrics")
      ->check(NotEmpty());
  command->add_option("--text-windows", arguments->prose_windows, "Windows of 4096 tokens")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024));
  AddSamplingOptions(*command, arguments->sampling, "are each task's: greedy, or as published");
  command->get_option("--seed")->description(
      "For sampling, by default 0, and for generated items, by default 42");
  command->add_option("--out", arguments->out, "Directory for results; a stopped run resumes there")
      ->required();
  command->callback([arguments, command, &run] {
    for (const CLI::Option* option : command->get_options()) {
      if (option->count() > 0) arguments->given.insert(option->get_name());
    }
    run = [arguments] { return RunEval(*arguments); };
  });
}

void AddReportCommand(CLI::App& app, RunFunction& run) {
  auto arguments = std::make_shared<ReportArguments>();
  CLI::App* command =
      app.add_subcommand("report", "Write report.html, results.csv and the table of an evaluation");
  command->add_option("results", arguments->input, "results.json, or the directory that holds it")
      ->required();
  CLI::Option* const against = command->add_option(
      "--against", arguments->against,
      "Compare item by item with this run's items.jsonl, or the directory that "
      "holds it, instead: where strict scores differ, at which token, how closely");
  command->add_option("--out", arguments->out, "Directory; default: beside the results")
      ->excludes(against);
  command->callback([arguments, &run] { run = [arguments] { return RunReport(*arguments); }; });
}

}  // namespace oscar::cli
