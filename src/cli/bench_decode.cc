// oscar bench decode: whole decode steps of a model, each cache method beside BF16 in the same run.
#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/log.h"
#include "base/progress.h"
#include "bench/decode_bench.h"
#include "cli/byte_size.h"
#include "cli/command.h"
#include "cli/model_options.h"
#include "cli/validators.h"
#include "quant/kv_method.h"
#include "report/charts.h"

namespace oscar::cli {
namespace {

struct DecodeBenchOptions {
  ModelArguments model;
  std::vector<std::string> methods = {"bf16", "oscar+"};
  std::vector<int64_t> contexts = {4096, 16384};
  std::vector<int> batches = {1};
  std::vector<int64_t> job_contexts, prompts;
  uint64_t job_memory = 0;
  int steps = 16;
  std::string json, csv, svg;
};

// One line of the table: a cell of the grid, or as many sequences as fit the job's memory.
struct Line {
  std::string method;
  bool job = false;
  DecodeBenchRow row;
  int fits = 0;               // a job's sequences; more than the batch where a step takes no more
  uint64_t needed_bytes = 0;  // of weights and pages
};

constexpr int kMostSequences = 512;  // of one step

class DecodeBench {
 public:
  explicit DecodeBench(const DecodeBenchOptions& options) : options_(options) {}
  Status Run();

 private:
  Status RunMethod(const std::string& method);
  Status AddCell(LoadedModel& loaded, int64_t context, int sequences, bool job);
  Status RunPrompts(LoadedModel& loaded);
  void PrintHeader(const LoadedModel& loaded);
  void PrintLine(const Line& line) const;
  Status WriteFiles() const;
  double RoofSeconds(const DecodeBenchRow& row) const {
    return static_cast<double>(row.bytes()) / roof_;
  }

  const DecodeBenchOptions& options_;
  std::string method_;
  bool header_ = false;
  double roof_ = 0.0;  // bytes a second; 0: not known
  std::string device_;
  std::vector<Line> lines_;
  std::map<std::tuple<int64_t, int, bool>, double> bf16_;  // -> tokens/s
};

void DecodeBench::PrintHeader(const LoadedModel& loaded) {
  if (header_) return;
  header_ = true;
  const ModelSpec& spec = loaded.spec();
  fmt::print(
      "{} layers, {}/{} heads of {}, weights {:.2f} GB ({:.2f} GB read per step), on {}\n",
      spec.num_layers(), spec.attention().num_heads, spec.attention().num_kv_heads,
      spec.attention().head_dim, static_cast<double>(loaded.memory().weight_bytes) / 1e9,
      static_cast<double>(const_cast<LoadedModel&>(loaded).model().weight_bytes_per_step()) / 1e9,
      device_);
  if (roof_ > 0) {
    fmt::print("read bandwidth measured on it: {}\n",
               roof_ < 1e12 ? fmt::format("{:.1f} GB/s", roof_ / 1e9)
                            : fmt::format("{:.2f} TB/s", roof_ / 1e12));
  }
  fmt::print(
      "each cache holds copies of one page of Gaussian rows, sealed by the method's own rule; no prompt "
      "was computed; \"alone\": a step that is not launched before the one before it has ended\n\n"
      "{:>14} {:>9} {:>6} {:>10} {:>9} {:>9} {:>9} {:>9} {:>7} {:>8}\n",
      "kv", "context", "batch", "tokens/s", "ms/step", "alone ms", "GB/step", "roof ms", "of roof",
      "vs bf16");
}

void DecodeBench::PrintLine(const Line& line) const {
  const DecodeBenchRow& row = line.row;
  if (row.seconds_per_step == 0.0) {
    fmt::print("{:>14} {:>9} {:>6} {:>10}  needs {} of weights and pages\n", line.method,
               row.context, row.batch, "-", FormatBytes(line.needed_bytes));
    return;
  }
  const auto base = bf16_.find({row.context, line.job ? 0 : row.batch, line.job});
  fmt::print(
      "{:>14} {:>9} {:>6} {:>10.2f} {:>9.3f} {:>9.3f} {:>9.3f} {:>9} {:>7} {:>8}{}{}\n",
      line.method, row.context, row.batch, row.tokens_per_second, row.seconds_per_step * 1e3,
      row.seconds_alone * 1e3, static_cast<double>(row.bytes()) / 1e9,
      roof_ > 0 ? fmt::format("{:.3f}", 1e3 * RoofSeconds(row)) : "-",
      roof_ > 0 ? fmt::format("{:.0f}%", 100 * RoofSeconds(row) / row.seconds_per_step) : "-",
      base == bf16_.end() ? "-" : fmt::format("{:.2f}x", row.tokens_per_second / base->second),
      !line.job ? ""
      : line.fits > row.batch
          ? fmt::format("  of {} that fit {}", line.fits, FormatBytes(options_.job_memory))
          : fmt::format("  as many as fit {}", FormatBytes(options_.job_memory)),
      row.experts_per_layer > 0 ? fmt::format("  {:.1f} experts per layer", row.experts_per_layer)
                                : "");
  std::fflush(stdout);
}

Status DecodeBench::AddCell(LoadedModel& loaded, int64_t context, int sequences, bool job) {
  const int batch = std::min(sequences, kMostSequences);
  Line line;
  line.fits = sequences;
  line.method = method_;
  line.job = job;
  line.row.context = context;
  line.row.batch = batch;
  line.needed_bytes = loaded.memory().weight_bytes +
                      DecodeBenchBytes(loaded.kv(), context, std::max(batch, 1), options_.steps);
  if (batch > 0) {
    const Result<DecodeBenchRow> row = RunDecodeBench(loaded, context, batch, options_.steps);
    if (row.has_value()) {
      line.row = *row;
    } else if (row.error().code() != StatusCode::kResourceExhausted) {
      return row.error();
    }
  }
  if (method_ == "bf16" && line.row.seconds_per_step > 0.0) {
    bf16_[{context, job ? 0 : batch, job}] = line.row.tokens_per_second;
  }
  PrintLine(line);
  lines_.push_back(std::move(line));
  return {};
}

Status DecodeBench::RunPrompts(LoadedModel& loaded) {
  for (const int64_t tokens : options_.prompts) {
    OSCAR_ASSIGN_OR_RETURN(const PrefillBenchRow row, RunPrefillBench(loaded, tokens));
    fmt::print(
        "{:>14} prompt of {} tokens: {:.1f} ms, {:.0f} tokens/s, {:.1f} TFLOP/s of model work\n",
        method_, tokens, row.seconds * 1e3, static_cast<double>(tokens) / row.seconds,
        row.flops / row.seconds / 1e12);
    std::fflush(stdout);
  }
  return {};
}

Status DecodeBench::RunMethod(const std::string& method) {
  method_ = method;
  ModelOptions model_options = options_.model.options;
  model_options.kv = method;
  int64_t longest = 0;
  for (const auto* list : {&options_.contexts, &options_.job_contexts, &options_.prompts}) {
    for (const int64_t context : *list) longest = std::max(longest, context);
  }
  model_options.max_sequences = 1;
  for (const int batch : options_.batches) {
    model_options.max_sequences = std::max(model_options.max_sequences, batch);
  }
  if (!options_.job_contexts.empty()) {
    OSCAR_ASSIGN_OR_RETURN(const auto plan, LoadedModel::Plan(model_options));
    const uint64_t weights = plan->memory().weight_bytes;
    const uint64_t pages = options_.job_memory > weights ? options_.job_memory - weights : 0;
    const uint64_t most = pages / plan->kv().StoredBytes(std::ranges::min(options_.job_contexts));
    model_options.max_sequences = std::max(
        {model_options.max_sequences, 128,
         static_cast<int>(std::min<uint64_t>(most, static_cast<uint64_t>(kMostSequences)))});
  }
  OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<LoadedModel> loaded,
                         LoadForDecodeBench(model_options, longest, options_.steps));
  device_ = loaded->device() == Device::kCpu
                ? fmt::format("cpu, {} threads", loaded->threads().num_threads())
                : loaded->device_name();
  if (roof_ == 0.0) {
    OSCAR_ASSIGN_OR_RETURN(roof_, loaded->backend().MeasureReadBandwidth());
  }
  PrintHeader(*loaded);
  for (const int64_t context : options_.contexts) {
    for (const int batch : options_.batches) {
      OSCAR_RETURN_IF_ERROR(AddCell(*loaded, context, batch, /*job=*/false));
    }
  }
  for (const int64_t context : options_.job_contexts) {
    const int batch = LargestBatch(*loaded, options_.job_memory, context, options_.steps);
    OSCAR_RETURN_IF_ERROR(AddCell(*loaded, context, batch, /*job=*/true));
  }
  return RunPrompts(*loaded);
}

Status DecodeBench::WriteFiles() const {
  if (!options_.json.empty()) {
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const Line& line : lines_) {
      const DecodeBenchRow& row = line.row;
      if (row.seconds_per_step == 0.0) continue;
      rows.push_back({{"kv", line.method},
                      {"job", line.job},
                      {"context", row.context},
                      {"batch", row.batch},
                      {"tokens_per_second", row.tokens_per_second},
                      {"seconds_per_step", row.seconds_per_step},
                      {"seconds_alone", row.seconds_alone},
                      {"weight_bytes", row.weight_bytes},
                      {"kv_bytes", row.kv_bytes},
                      {"bytes_per_second", row.bytes_per_second}});
      if (row.experts_per_layer > 0) rows.back()["experts_per_layer"] = row.experts_per_layer;
      if (roof_ > 0) rows.back()["of_bandwidth"] = RoofSeconds(row) / row.seconds_per_step;
    }
    OSCAR_RETURN_IF_ERROR(WriteFileAtomically(options_.json, rows.dump(2) + "\n"));
  }
  if (!options_.csv.empty()) {
    std::string csv =
        "kv,job,context,batch,tokens_per_second,seconds_per_step,seconds_alone,"
        "weight_bytes,kv_bytes,roof_seconds,of_roof,needed_bytes\n";
    for (const Line& line : lines_) {
      const DecodeBenchRow& row = line.row;
      // What was not measured stays empty: zeros would look like numbers.
      std::string measured = ",,,,,,";
      if (row.seconds_per_step > 0.0) {
        measured =
            fmt::format("{:.4f},{:.8f},{:.8f},{},{},", row.tokens_per_second, row.seconds_per_step,
                        row.seconds_alone, row.weight_bytes, row.kv_bytes);
        measured += roof_ > 0 ? fmt::format("{:.8f},{:.4f}", RoofSeconds(row),
                                            RoofSeconds(row) / row.seconds_per_step)
                              : ",";
      }
      csv += fmt::format("{},{},{},{},{},{}\n", line.method, line.job ? 1 : 0, row.context,
                         row.batch, measured, line.needed_bytes);
    }
    OSCAR_RETURN_IF_ERROR(WriteFileAtomically(options_.csv, csv));
  }
  if (options_.svg.empty()) return {};
  std::vector<ChartSeries> series;
  // bf16 and one other: a context is a colour.
  const bool pair =
      options_.methods.size() == 2 && std::ranges::count(options_.methods, "bf16") == 1;
  for (const std::string& method : options_.methods) {
    for (size_t c = 0; c < options_.contexts.size(); ++c) {
      const int64_t context = options_.contexts[c];
      ChartSeries& line = series.emplace_back();
      line.dashed = method == "bf16";
      if (pair) {
        line.color = kPlainColor + static_cast<int>(c);
      } else if (options_.contexts.size() == 1) {
        // As in reports of oscar eval.
        const auto table = KvMethodTable();
        line.color = static_cast<int>(
            std::ranges::find(table, method.substr(0, method.find(':')), &KvMethodInfo::name) -
            table.begin());
      }
      line.name = context < 1000 ? fmt::format("{} {}", method, context)
                                 : fmt::format("{} {}K", method, context / 1000);
      for (const Line& cell : lines_) {
        if (cell.method != method || cell.job || cell.row.context != context) continue;
        if (cell.row.seconds_per_step == 0.0) continue;
        line.x.push_back(cell.row.batch);
        line.y.push_back(cell.row.tokens_per_second);
      }
      if (line.x.empty()) series.pop_back();
    }
  }
  ChartOptions chart;
  chart.title = fmt::format("Decode on {}", device_);
  chart.x = {"batch", true, {}, {}};
  const auto [least, most] = std::ranges::minmax(options_.batches);
  if (least < most && most < 100 * least) {  // doublings
    chart.x.low = static_cast<double>(least);
    chart.x.high = static_cast<double>(most);
  }
  chart.y = {"tokens/s", true, {}, {}};
  return WriteFileAtomically(options_.svg, StandaloneChart(LineChart(series, chart)));
}

Status DecodeBench::Run() {
  for (const std::string& method : options_.methods) OSCAR_RETURN_IF_ERROR(RunMethod(method));
  return WriteFiles();
}

}  // namespace

void AddDecodeBench(CLI::App& bench, RunFunction& run) {
  auto options = std::make_shared<DecodeBenchOptions>();
  CLI::App* command =
      bench.add_subcommand("decode", "Whole decode steps of a model over filled caches");
  command->add_option("--methods", options->methods, "Cache methods; the ratio is against bf16")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--contexts", options->contexts, "Context lengths, tokens")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 22));
  command->add_option("--batches", options->batches, "Sequences in one step")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::Range(1, 512));
  CLI::Option* const job_memory =
      command->add_option("--job-memory", options->job_memory,
                          "Bytes that weights, workspaces and pages may take, such as 128GiB");
  TakesByteSize(job_memory);
  command
      ->add_option("--job-contexts", options->job_contexts,
                   "Context lengths for as many sequences as fit --job-memory")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 22))
      ->needs(job_memory);
  command->add_option("--prompts", options->prompts, "Prompt lengths to time, tokens")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  command->add_option("--steps", options->steps, "Timed steps per row; the median is reported")
      ->capture_default_str()
      ->check(CLI::Range(1, 100000));
  command->add_option("--json", options->json, "Write the results to this file, too");
  command->add_option("--csv", options->csv, "Write the results as CSV, too");
  command->add_option("--svg", options->svg, "Plot tokens/s over the batch");
  AddModelOptions(*command, options->model);
  command->remove_option(command->get_option("--kv"));  // --methods names them
  command->add_option("--config", options->model.options.model,
                      "A config.json, for --random-weights; the same as --model");
  command->callback([options, &run] {
    run = [options]() -> Status {
      OSCAR_RETURN_IF_ERROR(options->model.Obtain(ModelParts::kWeights));
      return DecodeBench(*options).Run();
    };
  });
}

}  // namespace oscar::cli
