// oscar bench decode: whole decode steps of a model, each cache method beside BF16 in the same run.
#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/log.h"
#include "cli/command.h"
#include "cli/model_options.h"
#include "engine/decode_bench.h"

namespace oscar::cli {
namespace {

struct DecodeBenchOptions {
  ModelArguments model;
  std::vector<std::string> methods = {"bf16", "oscar+"};
  std::vector<int64_t> contexts = {4096, 16384};
  std::vector<int> batches = {1};
  int steps = 16;
  std::string json;
};

Status RunDecode(const DecodeBenchOptions& options) {
  OSCAR_RETURN_IF_ERROR(CheckDevice(options.model));
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  std::map<std::pair<int64_t, int>, double> bf16;  // (context, batch) -> tokens/s
  bool header = false;
  for (const std::string& method : options.methods) {
    ModelOptions model_options = options.model.options;
    model_options.kv = method;
    OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<LoadedModel> loaded,
                           LoadedModel::Load(model_options));
    if (!header) {
      fmt::print(
          "{} layers, {}/{} heads of {}, weights {:.1f} MB, {} threads\n\n{:>14} {:>9} {:>6} "
          "{:>10} "
          "{:>10} {:>10} {:>8} {:>8}\n",
          loaded->spec().num_layers, loaded->spec().num_heads, loaded->spec().num_kv_heads,
          loaded->spec().head_dim, static_cast<double>(loaded->model().weight_bytes()) / 1e6,
          loaded->threads().num_threads(), "kv", "context", "batch", "tokens/s", "ms/step", "KV MB",
          "GB/s", "vs bf16");
      header = true;
    }
    for (const int64_t context : options.contexts) {
      for (const int batch : options.batches) {
        const Result<DecodeBenchRow> row = RunDecodeBench(*loaded, context, batch, options.steps);
        if (!row.has_value()) {
          fmt::print("{:>14} {:>9} {:>6}  {}\n", method, context, batch, row.error().message());
          continue;
        }
        if (method == "bf16") bf16[{context, batch}] = row->tokens_per_second;
        const auto base = bf16.find({context, batch});
        const std::string ratio =
            base == bf16.end() ? "-"
                               : fmt::format("{:.2f}x", row->tokens_per_second / base->second);
        fmt::print("{:>14} {:>9} {:>6} {:>10.2f} {:>10.2f} {:>10.2f} {:>8.2f} {:>8}\n",
                   loaded->kv().method().is_simulated() ? method + " (sim)" : method, context,
                   batch, row->tokens_per_second, row->seconds_per_step * 1e3,
                   static_cast<double>(row->kv_bytes) / 1e6, row->bytes_per_second / 1e9, ratio);
        std::fflush(stdout);
        rows.push_back({{"kv", method},
                        {"simulated", loaded->kv().method().is_simulated()},
                        {"context", context},
                        {"batch", batch},
                        {"tokens_per_second", row->tokens_per_second},
                        {"seconds_per_step", row->seconds_per_step},
                        {"weight_bytes", row->weight_bytes},
                        {"kv_bytes", row->kv_bytes},
                        {"bytes_per_second", row->bytes_per_second}});
      }
    }
  }
  if (!options.json.empty()) return WriteFileAtomically(options.json, rows.dump(2) + "\n");
  return {};
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
  command->add_option("--steps", options->steps, "Timed steps a row; the median counts")
      ->capture_default_str()
      ->check(CLI::Range(1, 100000));
  command->add_option("--json", options->json, "Write the results to this file, too");
  AddModelOptions(*command, options->model);
  command->remove_option(command->get_option("--kv"));  // --methods names them
  command->callback([options, &run] { run = [options] { return RunDecode(*options); }; });
}

}  // namespace oscar::cli
