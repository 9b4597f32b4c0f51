// oscar reproduce: one table of the papers, run again, with the published figures beside.
#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "bench/decode_bench.h"
#include "cli/calibrate_once.h"
#include "cli/command.h"
#include "cli/eval_suites.h"
#include "cli/interrupt.h"
#include "cli/model_options.h"
#include "cli/validators.h"
#include "quant/kv_method.h"
#include "reproduce/reproduction.h"
#include "rotation/rotation_file.h"
#include "run/eval_items.h"
#include "run/evaluation.h"
#include "sandbox/sandbox.h"
#include "tasks/benchmarks.h"

namespace oscar::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr char kSpeedFile[] = "speed.json";
constexpr uint64_t kMaxFileBytes = uint64_t{1} << 26;

struct ReproduceArguments {
  std::string table;
  bool list = false, json = false, partial = false;
  ModelArguments model;
  std::string named;  // --model as typed
  fs::path data, haystack, out;
  std::vector<std::string> methods;
  std::string paper_model;
  std::string limit = "0";
  std::vector<int64_t> lengths;
  int64_t samples = 100, max_tokens = 0, calibration_tokens = 30000;
  int repeats = 0, steps = 16;
  std::set<std::string> given;
};

bool NeedsSpeed(PaperMeasureKind kind) {
  return kind == PaperMeasureKind::kMillisecondsAStep || kind == PaperMeasureKind::kTokensPerSecond;
}

class Reproducer {
 public:
  explicit Reproducer(ReproduceArguments& arguments) : arguments_(arguments) {}
  Status Run();

 private:
  Status CheckOptions() const;
  Status ChooseRows();
  // Names of `--suite` with the files that are there; what is missing is an error or a departure.
  Status FindData();
  Status Calibrate();
  Status RunSuites();
  Status RunSpeed();
  Status Write() const;
  bool Takes(const PaperRow& row) const {
    return !row.kv.empty() &&
           (arguments_.methods.empty() ||
            std::ranges::find(arguments_.methods, row.kv) != arguments_.methods.end());
  }
  bool Has(const char* option) const { return arguments_.given.contains(option); }
  fs::path PathOf(std::string_view suite) const;

  ReproduceArguments& arguments_;
  const PaperTable* table_ = nullptr;
  std::vector<std::string> suites_;
  Reproduction out_;
};

Status Reproducer::CheckOptions() const {
  const bool has_ruler = !table_->lengths.empty(), has_tasks = !table_->suites.empty();
  const auto refuse = [&](std::initializer_list<const char*> names, const char* why) -> Status {
    for (const char* name : names) {
      if (Has(name)) return InvalidArgument(fmt::format("{}: {} {}", name, table_->name, why));
    }
    return {};
  };
  if (!has_ruler) {
    OSCAR_RETURN_IF_ERROR(refuse({"--length", "--samples", "--haystack"},
                                 "has no task that is generated to a length"));
  }
  if (!has_tasks) {
    OSCAR_RETURN_IF_ERROR(refuse({"--data", "--limit", "--max-tokens", "--repeats", "--partial"},
                                 "has no tasks, only speeds"));
  } else {
    OSCAR_RETURN_IF_ERROR(refuse({"--steps"}, "times no decode steps"));
  }
  const bool calibrates = std::ranges::any_of(
      table_->rows, [&](const PaperRow& row) { return Takes(row) && row.kv == "oscar"; });
  if (!calibrates || Has("--rotation")) {
    OSCAR_RETURN_IF_ERROR(refuse({"--calibration-tokens"}, "calibrates nothing here"));
  }
  if (!calibrates) OSCAR_RETURN_IF_ERROR(refuse({"--rotation"}, "has no method that takes one"));
  if (arguments_.model.options.random_weights && has_tasks) {
    return InvalidArgument(
        fmt::format("--random-weights: {} scores what a model says; random weights are for speeds",
                    table_->name));
  }
  return {};
}

Status Reproducer::ChooseRows() {
  for (const std::string& method : arguments_.methods) {
    if (std::ranges::any_of(table_->rows, [&](const PaperRow& row) { return row.kv == method; })) {
      continue;
    }
    std::string names;
    for (const PaperRow& row : table_->rows) {
      if (!row.kv.empty()) names += fmt::format("{}{}", names.empty() ? "" : ", ", row.kv);
    }
    return InvalidArgument(fmt::format("--kv {}: {} has {}", method, table_->name, names));
  }
  for (const PaperRow& row : table_->rows) {
    ReproducedRow& line = out_.rows.emplace_back();
    line.row = &row;
    line.ours.resize(table_->measures.size());
    if (!row.kv.empty() && !Takes(row)) line.missing = "left out by --kv";
  }
  out_.table = table_;
  out_.model = arguments_.named;
  out_.column = MatchPaperModel(*table_, arguments_.named);
  if (!arguments_.paper_model.empty()) {
    out_.column = {};
    std::set<std::string_view> models;
    for (const PaperFigure& figure : table_->figures) models.insert(figure.model);
    const auto found = models.find(arguments_.paper_model);
    if (found == models.end()) {
      std::string names;
      for (const std::string_view model : models) {
        names += fmt::format("{}{}", names.empty() ? "" : ", ", model);
      }
      return InvalidArgument(
          fmt::format("--paper-model {}: {}", arguments_.paper_model,
                      names.empty() ? fmt::format("{} has no published figure", table_->name)
                                    : "the table has figures of " + names));
    }
    out_.column = *found;
  }
  return {};
}

fs::path Reproducer::PathOf(std::string_view suite) const {
  const PaperData* const data = DataOf(suite);
  if (data == nullptr || arguments_.data.empty()) return {};
  for (const std::string_view file : data->files) {
    const fs::path path = arguments_.data / file;
    if (Exists(path)) return suite == "longbench-e" ? path.parent_path() : path;
  }
  return {};
}

Status Reproducer::FindData() {
  std::string missing, names;
  for (const std::string_view suite : table_->suites) {
    const PaperData* const data = DataOf(suite);
    if (data == nullptr) {  // made here
      suites_.emplace_back(suite);
      continue;
    }
    if (const fs::path path = PathOf(suite); !path.empty()) {
      suites_.push_back(fmt::format("{}={}", suite, path.string()));
      if (suite != "longbench-e") continue;
      for (const std::string& file : MissingLongBenchFiles(path)) {
        missing += fmt::format("{}{}", missing.empty() ? "" : "; ", (path / file).string());
        names += fmt::format("{}{}", names.empty() ? "" : ", ", file);
      }
      continue;
    }
    if (data->optional) {
      LogInfo("{} is left out: no {} in the folder of --data, which is at {}", suite,
              data->files.front(), data->origin);
      out_.departures.push_back(fmt::format("{} is left out: no data.", suite));
      continue;
    }
    missing += fmt::format("{}{} ({}, from {})", missing.empty() ? "" : "; ", suite,
                           data->files.front(), data->origin);
    names += fmt::format("{}{}", names.empty() ? "" : ", ", suite);
  }
  if (missing.empty()) return {};
  if (!arguments_.partial || suites_.empty()) {
    return NotFound(fmt::format(
        "{} needs data that is not {}: {}; put the files there under these names{}", table_->name,
        arguments_.data.empty() ? std::string("here, as --data names no folder")
                                : "in " + arguments_.data.string(),
        missing,
        suites_.empty() ? "" : ", or measure the tasks whose data is there with --partial"));
  }
  out_.departures.push_back(fmt::format("no data of {}, so the mean is of other tasks.", names));
  return {};
}

// The rotation of `oscar`, in the published form: one matrix per layer and fixed clips. A second
// run finds it.
Status Reproducer::Calibrate() {
  const bool is_needed = std::ranges::any_of(
      table_->rows, [&](const PaperRow& row) { return Takes(row) && row.kv == "oscar"; });
  if (!is_needed || !arguments_.model.options.rotation.empty()) return {};
  CalibrateOptions options;
  options.model = arguments_.model.options;
  options.text.tokens = arguments_.calibration_tokens;
  options.fit.fit_clip = false;
  options.fit.per_head_k = options.fit.per_head_v = false;
  options.fit.k_clip = kPublishedKClip;
  options.fit.v_clip = PaperValueClip(out_.column);
  std::string text = "the built-in sample";
  if (const fs::path path = PathOf(table_->calibration); !path.empty()) {
    options.text.data = fmt::format("{}={}", table_->calibration, path.string());
    text = fmt::format("{}'s prompts", table_->calibration);
  }
  if (options.text.data.empty() && !table_->calibration.empty()) {
    out_.departures.push_back(fmt::format(
        "the rotation is calibrated on {}, for lack of {}'s data.", text, table_->calibration));
  }
  if (arguments_.calibration_tokens < 30000) {
    out_.departures.push_back(
        fmt::format("the rotation is calibrated on {} tokens.", arguments_.calibration_tokens));
  }
  arguments_.model.options.rotation = arguments_.out / kRotationFolderName;
  return CalibrateOnce(options, arguments_.model.options.rotation);
}

Status Reproducer::RunSuites() {
  EvalOptions options;
  for (const PaperRow& row : table_->rows) {
    if (!Takes(row)) continue;
    EvalMethod method{std::string(row.kv), std::string(row.kv), {}};
    if (row.kv == "oscar") method.rotation = arguments_.model.options.rotation;
    options.methods.push_back(std::move(method));
  }
  options.model = arguments_.model.options;
  if (table_->group_dims > 0) options.model.group_dims = table_->group_dims;
  SuiteArguments suites;
  suites.suites = suites_;
  suites.limit = arguments_.limit;
  suites.haystack = arguments_.haystack;
  suites.samples = arguments_.samples;
  suites.model = options.model.model;
  suites.lengths = !arguments_.lengths.empty()
                       ? arguments_.lengths
                       : std::vector<int64_t>(table_->lengths.begin(), table_->lengths.end());
  fs::path prose;  // perplexity is in none of the tables
  OSCAR_ASSIGN_OR_RETURN(options.suite, MakeSuites(suites, prose));
  bool samples = false;
  for (EvalTask& task : options.suite.tasks) {
    if (table_->repeats > 0 && task.repeats > 1) task.repeats = table_->repeats;
    samples |= task.repeats > 1 || task.sampling.has_value();
    for (EvalItem& item : task.items) {
      if (arguments_.max_tokens > 0) item.max_tokens = arguments_.max_tokens;
      if (table_->plain_prompts) item.use_template = false;
    }
  }
  if (arguments_.repeats > 0 && !samples) {
    return InvalidArgument(fmt::format(
        "--repeats: {}'s outputs are greedy, so they would all be alike", table_->name));
  }
  OSCAR_RETURN_IF_ERROR(SetSampling(
      options.suite, [](const SamplingOptions& base) { return base; }, arguments_.repeats));
  if (arguments_.limit != "0") {
    out_.departures.push_back(fmt::format("--limit {}: the first items alone.", arguments_.limit));
  }
  if (arguments_.max_tokens > 0) {
    out_.departures.push_back(
        fmt::format("--max-tokens {}: longer outputs end there.", arguments_.max_tokens));
  }
  if (arguments_.repeats > 0) {
    out_.departures.push_back(fmt::format("--repeats {}.", arguments_.repeats));
  }
  options.out = arguments_.out;
  OSCAR_ASSIGN_OR_RETURN(const EvalResults results, Evaluate(options));
  OSCAR_RETURN_IF_ERROR(WriteResults(results, arguments_.out));
  for (const std::string& warning : results.warnings) out_.departures.push_back(warning + ".");
  AddScores(results, out_);
  return {};
}

// Rows that were timed before on this device, with these steps and this model.
class SpeedLog {
 public:
  explicit SpeedLog(fs::path path) : path_(std::move(path)) {
    const Result<std::string> text = ReadFile(path_, kMaxFileBytes);
    if (!text.has_value()) return;
    const Result<ordered_json> rows = ParseOrderedJson(*text, path_.string());
    if (rows.has_value() && rows->is_array()) {
      rows_ = *rows;
    } else {
      LogWarning("{}: not read; speeds are measured again", path_.string());
    }
  }
  const ordered_json* Find(const ordered_json& key) const {
    for (const ordered_json& row : rows_) {
      if (row.is_object() && row.value("key", ordered_json()) == key) return &row;
    }
    return nullptr;
  }
  Status Add(const ordered_json& key, const DecodeBenchRow& row) {
    rows_.push_back({{"key", key},
                     {"seconds_per_step", row.seconds_per_step},
                     {"tokens_per_second", row.tokens_per_second},
                     {"weight_bytes", row.weight_bytes},
                     {"kv_bytes", row.kv_bytes}});
    return WriteFileAtomically(path_, rows_.dump(2) + "\n");
  }

 private:
  fs::path path_;
  ordered_json rows_ = ordered_json::array();
};

Status Reproducer::RunSpeed() {
  std::error_code error;
  fs::create_directories(arguments_.out, error);
  SpeedLog log(arguments_.out / kSpeedFile);
  for (ReproducedRow& line : out_.rows) {
    if (!Takes(*line.row)) continue;
    ModelOptions options = arguments_.model.options;
    options.kv = line.row->kv;
    OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<LoadedModel> plan, LoadedModel::Plan(options));
    line.description = plan->kv().Describe();
    out_.device = plan->device_name();
    for (size_t m = 0; m < table_->measures.size(); ++m) {
      const PaperMeasure& measure = table_->measures[m];
      if (measure.kind == PaperMeasureKind::kHistoryRatio) {
        line.ours[m] = Measured{16 / plan->kv().HistoryBits()};
        continue;
      }
      if (!NeedsSpeed(measure.kind)) continue;
      const ordered_json key = {
          {"model", arguments_.named},     {"random_weights", options.random_weights},
          {"device", plan->device_name()}, {"threads", options.num_threads},
          {"method", line.description},    {"context", measure.context},
          {"batch", measure.batch},        {"steps", arguments_.steps},
      };
      if (log.Find(key) == nullptr) {
        options.max_sequences = measure.batch;
        LogInfo("{}: {}", line.row->kv, measure.name);
        OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<LoadedModel> loaded,
                               LoadForDecodeBench(options, measure.context, arguments_.steps));
        const Result<DecodeBenchRow> row =
            RunDecodeBench(*loaded, measure.context, measure.batch, arguments_.steps);
        if (!row.has_value() && row.error().code() == StatusCode::kResourceExhausted) {
          line.missing = fmt::format("{}: {}", measure.name, row.error().message());
          continue;
        }
        if (!row.has_value()) return row.error();
        OSCAR_RETURN_IF_ERROR(log.Add(key, *row));
      }
      const ordered_json& found = *log.Find(key);
      line.ours[m] = Measured{measure.kind == PaperMeasureKind::kTokensPerSecond
                                  ? found.at("tokens_per_second").get<double>()
                                  : 1e3 * found.at("seconds_per_step").get<double>()};
    }
  }
  if (arguments_.model.options.random_weights) {
    LogInfo("random weights: speed does not depend on what weights are");
  }
  return {};
}

Status Reproducer::Write() const {
  const fs::path& out = arguments_.out;
  OSCAR_RETURN_IF_ERROR(WriteFileAtomically(out / "reproduction.json", ReproductionToJson(out_)));
  OSCAR_RETURN_IF_ERROR(WriteFileAtomically(
      out / "reproduction.html", ReproductionToHtml(out_, suites_.empty() ? "" : "report.html")));
  fmt::print("{}\n{}/reproduction.json and reproduction.html written\n", ReproductionToTable(out_),
             out.string());
  return {};
}

Status Reproducer::Run() {
  OSCAR_ASSIGN_OR_RETURN(table_, FindPaperTable(arguments_.table));
  if (!table_->refused.empty()) {
    return Unimplemented(fmt::format("{}: {}", table_->name, table_->refused));
  }
  if (arguments_.out.empty()) return InvalidArgument("--out: name a directory for the results");
  OSCAR_RETURN_IF_ERROR(ChooseRows());
  OSCAR_RETURN_IF_ERROR(CheckOptions());
  OSCAR_RETURN_IF_ERROR(FindData());
  OSCAR_RETURN_IF_ERROR(arguments_.model.Obtain(ModelParts::kWeights));
  OSCAR_RETURN_IF_ERROR(Calibrate());
  if (!table_->suites.empty()) {
    OSCAR_RETURN_IF_ERROR(RunSuites());
  } else {
    OSCAR_RETURN_IF_ERROR(RunSpeed());
  }
  return Write();
}

}  // namespace

void AddReproduceCommand(CLI::App& app, RunFunction& run) {
  auto arguments = std::make_shared<ReproduceArguments>();
  CLI::App* command = app.add_subcommand(
      "reproduce", "Run a table of the OSCAR and OScaR papers, published figures beside");
  CLI::Option* const table =
      command->add_option("table", arguments->table, "The table; --list shows them");
  CLI::Option* const list =
      command->add_flag("--list", arguments->list, "Show the tables, their methods and their data")
          ->excludes(table);
  command->add_flag("--json", arguments->json, "With --list: as JSON, with every published figure")
      ->needs(list);
  AddModelOptions(*command, arguments->model);
  // The table says these.
  for (const char* name : {"--kv", "--bits", "--sink", "--recent", "--group", "--k-clip",
                           "--v-clip", "--prefill-cell"}) {
    command->remove_option(command->get_option(name));
  }
  command->get_option("--rotation")
      ->description(
          "Rotation of oscar; default: calibrated first, on the paper's texts where they are "
          "in --data, into OUT/rotation");
  command->add_option("--kv", arguments->methods, "Only these methods of the table")
      ->delimiter(',')
      ->group("KV cache");
  command
      ->add_option("--data", arguments->data,
                   "Folder with your copies of the data sets; --list names the files")
      ->check(NotEmpty());
  command->add_option("--out", arguments->out,
                      "Directory for results; a stopped run resumes there");
  command
      ->add_option("--paper-model", arguments->paper_model,
                   "The paper's model to compare with; default: by the name of --model")
      ->check(NotEmpty());
  command->add_flag("--partial", arguments->partial,
                    "Measure the tasks whose data is there; nothing is compared then");
  command
      ->add_option("--limit", arguments->limit,
                   "First items of each task, 0 is all; 60,vt=20 sets one task apart")
      ->capture_default_str();
  command
      ->add_option("--repeats", arguments->repeats,
                   "Times each item is sampled; default: as published")
      ->check(CLI::Range(1, 1000));
  command
      ->add_option("--max-tokens", arguments->max_tokens,
                   "Longest output, in place of the task's own")
      ->check(Positive());
  command
      ->add_option("--calibration-tokens", arguments->calibration_tokens,
                   "Tokens that the rotation of oscar is calibrated on")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{1}, kMaxCalibrationTokens));
  command
      ->add_option("--length", arguments->lengths,
                   "Tokens of RULER's items; default: 4096,8192,16384,32768")
      ->delimiter(',')
      ->check(CLI::Range(512, 1 << 24));
  command->add_option("--samples", arguments->samples, "RULER's items per task and length")
      ->capture_default_str()
      ->check(CLI::Range(1, 100000));
  command
      ->add_option("--haystack", arguments->haystack,
                   "Text to hide RULER's needles in; default: the demo suite's")
      ->check(NotEmpty());
  command->add_option("--steps", arguments->steps, "Timed decode steps; the median is reported")
      ->capture_default_str()
      ->check(CLI::Range(1, 100000));
  command->footer(
      "oscar reproduce --list\n"
      "oscar reproduce oscar-reasoning --model Qwen/Qwen3-8B --data ~/data --out ~/reproduce/8b");
  command->callback([arguments, command, &run] {
    for (const CLI::Option* option : command->get_options()) {
      if (option->count() > 0) arguments->given.insert(option->get_name());
    }
    arguments->named = arguments->model.options.model.string();
    if (arguments->named.empty()) arguments->named = "the demo model";
    run = [arguments]() -> Status {
      if (arguments->list) {
        fmt::print("{}", arguments->json ? PaperTablesToJson() : PaperTablesToText());
        return {};
      }
      if (arguments->table.empty()) {
        return InvalidArgument("name a table; oscar reproduce --list shows them");
      }
      const ClearUpScope scope(EndSandboxes);
      return Reproducer(*arguments).Run();
    };
  });
}

}  // namespace oscar::cli
