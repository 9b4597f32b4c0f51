// oscar eval: cache methods x tasks on one model, in one table.
#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <charconv>
#include <cstdlib>
#include <iterator>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/log.h"
#include "cli/command.h"
#include "cli/model_options.h"
#include "cli/validators.h"
#include "engine/loaded_model.h"
#include "evaluate/benchmarks.h"
#include "evaluate/comparison.h"
#include "evaluate/endpoint_evaluation.h"
#include "evaluate/evaluation.h"
#include "evaluate/item_log.h"
#include "evaluate/report.h"
#include "evaluate/ruler.h"
#include "text/chat.h"
#include "text/tokenizer.h"

namespace oscar::cli {
namespace {

namespace fs = std::filesystem;

struct EvalArguments {
  ModelArguments model;
  SamplingArguments sampling;
  std::vector<std::string> suites = {"demo"};
  std::vector<std::string> tasks;
  std::vector<int64_t> lengths = {4096};
  fs::path haystack;
  std::string prefill = "method";
  std::string windows = "auto";
  std::string prose;
  int prose_windows = 8;
  std::string limit = "0";
  int64_t samples = 100;
  int repeats = 0;
  int64_t max_tokens = 0;
  bool strict_only = false;
  EndpointOptions endpoint;
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

// "60" or "60,multikey_14k=30".
Status ParseLimits(const std::string& text, SuiteOptions& options) {
  for (const std::string& part : SplitList(text)) {
    const size_t equals = part.find('=');
    const std::string number = equals == std::string::npos ? part : part.substr(equals + 1);
    int64_t value = 0;
    const auto [stop, error] = std::from_chars(number.data(), number.data() + number.size(), value);
    if (error != std::errc() || stop != number.data() + number.size() || value < 0) {
      return InvalidArgument(
          fmt::format("--limit {}: give a number, or numbers of tasks as in 60,hop=20", text));
    }
    if (equals == std::string::npos) {
      options.limit = value;
    } else {
      options.task_limits[part.substr(0, equals)] = value;
    }
  }
  return {};
}

// What a prompt of the model's chat costs, for tasks that are generated to a length.
Result<std::function<Result<int64_t>(std::string_view)>> MakeTokenCounter(const fs::path& model) {
  OSCAR_ASSIGN_OR_RETURN(Tokenizer loaded, Tokenizer::Load(model));
  auto tokenizer = std::make_shared<const Tokenizer>(std::move(loaded));
  int64_t overhead = 0;
  const Result<ChatTemplate> chat = ChatTemplate::Load(model);
  if (chat.has_value()) {
    const nlohmann::ordered_json messages = {{{"role", "user"}, {"content", "x"}}};
    ChatRequest request;
    request.messages = &messages;
    request.now = 0;
    OSCAR_ASSIGN_OR_RETURN(const std::vector<TokenId> tokens, chat->Encode(request, *tokenizer));
    overhead = static_cast<int64_t>(tokens.size());
  }
  return [tokenizer, overhead](std::string_view text) -> Result<int64_t> {
    OSCAR_ASSIGN_OR_RETURN(const std::vector<TokenId> tokens, tokenizer->Encode(text));
    return static_cast<int64_t>(tokens.size()) + overhead;
  };
}

// What tasks take from the demo model where nothing else is named; `instead` says how to name it.
Result<fs::path> DemoModelFor(std::string_view what, std::string_view instead) {
  Result<fs::path> demo = FindDemoModel();
  if (demo.has_value()) return demo;
  return Unexpected(NotFound(fmt::format(
      "{} with the demo model, which was not found beside the program; {}", what, instead)));
}

Status AddRuler(const EvalArguments& arguments, const std::string& name,
                const SuiteOptions& options, EvalSuite& suite) {
  fs::path model = arguments.model.options.model, haystack = arguments.haystack;
  bool needs_essays = false;
  for (const std::string_view task : RulerTasks()) {
    needs_essays =
        needs_essays || ((name == "ruler" || name == task) && RulerTaskNeedsEssays(task));
  }
  if (model.empty()) {
    OSCAR_ASSIGN_OR_RETURN(
        model, DemoModelFor(fmt::format("the tokenizer that counts {}'s tokens comes", name),
                            "name the model's directory with --model DIR"));
  }
  std::string essays;
  if (needs_essays) {
    if (haystack.empty()) {
      OSCAR_ASSIGN_OR_RETURN(
          haystack, DemoModelFor(fmt::format("the prose that {} hides needles in comes", name),
                                 "name a text with --haystack FILE"));
      haystack /= "eval/haystack.txt";
    }
    OSCAR_ASSIGN_OR_RETURN(essays, ReadHaystack(haystack));
  }
  RulerOptions ruler;
  OSCAR_ASSIGN_OR_RETURN(ruler.count_tokens, MakeTokenCounter(model));
  ruler.essays = essays;
  ruler.seed = static_cast<uint32_t>(arguments.sampling.seed.value_or(42));
  for (const int64_t length : arguments.lengths) {
    ruler.length = length;
    for (const std::string_view task : RulerTasks()) {
      if (name != "ruler" && name != task) continue;
      const int64_t limit = options.LimitOf(std::string(task));
      ruler.samples = limit > 0 ? std::min(limit, arguments.samples) : arguments.samples;
      OSCAR_ASSIGN_OR_RETURN(EvalTask made, MakeRulerTask(task, ruler));
      suite.tasks.push_back(std::move(made));
    }
  }
  return {};
}

// Adds the tasks of one name of --suite; the prose for perplexity comes with a directory.
Status AddSuite(const EvalArguments& arguments, const std::string& name,
                const SuiteOptions& options, EvalSuite& suite, fs::path& prose) {
  const size_t equals = name.find('=');
  const std::string kind = name.substr(0, equals);
  if (kind == "ruler" || IsRulerTask(kind)) return AddRuler(arguments, kind, options, suite);
  EvalSuite part;
  if (IsBenchmark(kind)) {
    if (equals == std::string::npos) {
      return InvalidArgument(fmt::format(
          "--suite {}: name your copy of its data as {}=PATH; see docs/accuracy.md for the format",
          kind, kind));
    }
    OSCAR_ASSIGN_OR_RETURN(part, ReadBenchmark(kind, name.substr(equals + 1), options));
  } else {
    fs::path directory = name;
    if (name == "demo") {
      OSCAR_ASSIGN_OR_RETURN(
          directory, DemoModelFor("the demo suite comes", "name a directory with --suite DIR"));
      directory /= "eval";
    }
    OSCAR_ASSIGN_OR_RETURN(part, ReadSuite(directory, options));
    if (fs::exists(directory / "heldout_prose.json")) prose = directory / "heldout_prose.json";
  }
  std::move(part.tasks.begin(), part.tasks.end(), std::back_inserter(suite.tasks));
  suite.warnings.insert(suite.warnings.end(), part.warnings.begin(), part.warnings.end());
  return {};
}

Status RunEval(const EvalArguments& arguments) {
  EvalOptions options;
  options.model = arguments.model.options;
  OSCAR_ASSIGN_OR_RETURN(options.methods, ParseMethods(SplitList(arguments.model.options.kv),
                                                       arguments.model.options.rotation));
  SuiteOptions suite;
  suite.tasks = arguments.tasks;
  OSCAR_RETURN_IF_ERROR(ParseLimits(arguments.limit, suite));
  for (const std::string& name : arguments.suites) {
    OSCAR_RETURN_IF_ERROR(AddSuite(arguments, name, suite, options.suite, options.prose));
  }
  for (const std::string& warning : options.suite.warnings) LogWarning("{}", warning);
  OSCAR_RETURN_IF_ERROR(SetSampling(
      options.suite, [&](const SamplingOptions& base) { return arguments.sampling.Apply(base); },
      arguments.repeats));
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
  options.out = arguments.out;
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
    fmt::print("{}", ComparisonToTable(CompareRuns(items, others)));
    return {};
  }
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
      ->add_option(
          "--suite", arguments->suites,
          "What to measure, joined by commas: demo, a directory of task files (*.jsonl), "
          "ruler or one of its tasks, or a benchmark with your copy of its data: "
          "gsm8k=FILE, math500=, aime25=, humaneval=, gpqa=, livecodebench=, longbench-e=DIR")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--tasks", arguments->tasks, "Only these tasks of a directory")
      ->delimiter(',');
  command
      ->add_option("--limit", arguments->limit,
                   "First items of each task, 0 is all; 60,hop=20 sets one task apart")
      ->capture_default_str();
  command->add_option("--length", arguments->lengths, "Tokens of RULER's items, joined by commas")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::Range(512, 1 << 24));
  command->add_option("--samples", arguments->samples, "RULER's items a task")
      ->capture_default_str()
      ->check(CLI::Range(1, 100000));
  command->add_option("--haystack", arguments->haystack,
                      "Text that RULER's needles lie in, .txt or RULER's .json; default: the demo "
                      "suite's");
  command
      ->add_option("--max-tokens", arguments->max_tokens,
                   "Longest output, in place of the task's own")
      ->check(Positive());
  command->add_option("--endpoint", arguments->endpoint.url,
                      "Measure this OpenAI-compatible server in place of a model here; "
                      "$OPENAI_API_KEY is sent where set");
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
                    "Stop an item at its first wrong token: no answer score");
  command
      ->add_option("--repeats", arguments->repeats,
                   "Times each item is drawn; default: as published, once for greedy outputs")
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
  command->add_option("--against", arguments->against,
                      "Compare item by item with this run's items.jsonl, or the directory that "
                      "holds it, instead: where strict scores differ, at which token, how closely");
  command->add_option("--out", arguments->out, "Directory; default: beside the results");
  command->callback([arguments, &run] { run = [arguments] { return RunReport(*arguments); }; });
}

}  // namespace oscar::cli
