// oscar bench: measures this machine beside what the kernels reach on it.
#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/thread_pool.h"
#include "bench/attention_bench.h"
#include "cache/block_codec.h"
#include "cli/command.h"
#include "simd/dispatch.h"

namespace oscar::cli {
namespace {

struct AttentionOptions {
  AttentionBenchOptions bench;
  int threads = 0;
  std::string json;
};

nlohmann::ordered_json ToJson(const AttentionOptions& options, const AttentionBenchReport& report) {
  nlohmann::ordered_json out = {{"q_heads", options.bench.q_heads},
                                {"kv_heads", options.bench.kv_heads},
                                {"head_dim", options.bench.head_dim},
                                {"group_dims", options.bench.group_dims},
                                {"threads", report.threads},
                                {"target", report.target},
                                {"read_bytes_per_second", report.read_bytes_per_second},
                                {"rows", nlohmann::ordered_json::array()}};
  for (const AttentionBenchRow& row : report.rows) {
    out["rows"].push_back({{"kv", row.name},
                           {"context", row.context},
                           {"bytes", row.bytes},
                           {"median_seconds", row.seconds},
                           {"best_seconds", row.best_seconds},
                           {"bytes_per_second", row.bytes_per_second},
                           {"speedup_vs_bf16", row.speedup_vs_bf16}});
  }
  return out;
}

Status RunAttention(const AttentionOptions& options) {
  OSCAR_RETURN_IF_ERROR(simd::CheckCpu());
  const auto& bench = options.bench;
  OSCAR_RETURN_IF_ERROR(CheckBlockShape(bench.head_dim, bench.group_dims));
  if (bench.q_heads % bench.kv_heads != 0) {
    return InvalidArgument(fmt::format("--q-heads {} is not a multiple of --kv-heads {}",
                                       bench.q_heads, bench.kv_heads));
  }
  for (const int64_t context : bench.contexts) {
    if (context < kMaxGroupTokens || context > (int64_t{1} << 22)) {
      return InvalidArgument(fmt::format("--contexts {}: between {} and {} tokens", context,
                                         kMaxGroupTokens, int64_t{1} << 22));
    }
  }
  ThreadPool pool(options.threads);
  bool header = false;
  size_t width = 5;
  for (const std::string& name : bench.methods) width = std::max(width, name.size());
  width = std::max(width, bench.bits.size());
  OSCAR_ASSIGN_OR_RETURN(
      const AttentionBenchReport report,
      RunAttentionBench(pool, bench, [&](const AttentionBenchReport& so_far) {
        if (!header) {
          fmt::print(
              "decode attention, one layer: {} query heads, {} KV heads, head dim {}, group {}\n"
              "{} threads, {}; read bandwidth {:.1f} GB/s\n\n{:>9} {:>{}} {:>10} {:>10} {:>10} "
              "{:>9} {:>7} {:>8}\n",
              bench.q_heads, bench.kv_heads, bench.head_dim, bench.group_dims, so_far.threads,
              so_far.target, so_far.read_bytes_per_second / 1e9, "context", "kv", width, "MB",
              "best ms", "median ms", "GB/s", "of roof", "vs bf16");
          header = true;
        }
        const auto& row = so_far.rows.back();
        fmt::print("{:>9} {:>{}} {:>10.2f} {:>10.3f} {:>10.3f} {:>9.2f} {:>6.0f}% {:>7.2f}x\n",
                   row.context, row.name, width, static_cast<double>(row.bytes) / 1e6,
                   row.best_seconds * 1e3, row.seconds * 1e3, row.bytes_per_second / 1e9,
                   100.0 * row.bytes_per_second / so_far.read_bytes_per_second,
                   row.speedup_vs_bf16);
        std::fflush(stdout);
      }));
  if (!options.json.empty()) {
    return WriteFileAtomically(options.json, ToJson(options, report).dump(2) + "\n");
  }
  return {};
}

}  // namespace

void AddBenchCommand(CLI::App& app, RunFunction& run) {
  CLI::App* bench =
      app.add_subcommand("bench", "Measure kernels, models and the server on this machine");
  bench->require_subcommand(1);
  auto options = std::make_shared<AttentionOptions>();
  CLI::App* command =
      bench->add_subcommand("attention", "Decode attention over INT2, INT4 and BF16 pages");
  command->add_option("--q-heads", options->bench.q_heads, "Query heads")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  command->add_option("--kv-heads", options->bench.kv_heads, "KV heads")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  command->add_option("--head-dim", options->bench.head_dim, "64, 128 or 256")
      ->capture_default_str();
  command->add_option("--group", options->bench.group_dims, "Dims that share a scale and a minimum")
      ->capture_default_str();
  command
      ->add_option("--kv", options->bench.methods,
                   "Cache methods whose pages are measured besides: oscar-su,kivi,...")
      ->delimiter(',');
  command->add_option("--bits", options->bench.bits,
                      "Also pages whose first heads have these bits of K/V, the others 2/2: "
                      "4/2,3/3,...");
  command->add_option("--contexts", options->bench.contexts, "Context lengths, tokens")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--seconds", options->bench.seconds_per_row, "Time for each row, seconds")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 3600.0));
  command->add_option("--threads", options->threads, "Threads; 0 is one per core")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024));
  command->add_option("--json", options->json, "Write the results to this file, too");
  command->callback([options, &run] { run = [options] { return RunAttention(*options); }; });
  AddDecodeBench(*bench, run);
  AddServeBench(*bench, run);
}

}  // namespace oscar::cli
