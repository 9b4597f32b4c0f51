// oscar bench serve: what clients see of the server under load, each cache method with the same
// bytes of cache.
#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/log.h"
#include "base/progress.h"
#include "bench/load_bench.h"
#include "cli/command.h"
#include "cli/model_options.h"
#include "engine/page_budget.h"
#include "generation/model_host.h"
#include "http/http_server.h"
#include "server/api_server.h"

namespace oscar::cli {
namespace {

struct ServeBenchOptions {
  ModelArguments model;
  std::vector<std::string> methods = {"bf16", "oscar+"};
  std::vector<int> clients = {1, 4, 16};
  std::vector<int64_t> shared = {0, 8192};
  int rounds = 2;
  int64_t budget_tokens = 56000;
  int64_t prompt_tokens = 512, max_tokens = 64;
  std::string url, api_key, json, csv;
};

struct Row {
  std::string method;
  int clients = 0;
  int64_t shared = 0;
  int64_t fit = -1;  // conversations of these lengths with nothing shared; -1: unknown
  LoadReport report;
};

constexpr const char* kCsvHeader =
    "kv,clients,shared_tokens,prompt_tokens,max_tokens,answered,failed,seconds,"
    "output_tokens_per_second,input_tokens_per_second,first_token_p50,first_token_p95,"
    "per_token_p50,per_token_p95,cached_share,fit,most_running,preemptions,most_kv_bytes,"
    "kv_budget_bytes";

std::string CsvLine(const ServeBenchOptions& options, const Row& row) {
  const LoadReport& r = row.report;
  return fmt::format(
      "{},{},{},{},{},{},{},{:.3f},{:.2f},{:.2f},{:.4f},{:.4f},{:.5f},{:.5f},{:.4f},"
      "{},{:.0f},{:.0f},{:.0f},{:.0f}",
      row.method, row.clients, row.shared, options.prompt_tokens, options.max_tokens, r.answered,
      r.failed, r.seconds, r.output_tokens_per_second, r.input_tokens_per_second, r.first_token_p50,
      r.first_token_p95, r.per_token_p50, r.per_token_p95, r.cached_share, row.fit, r.most_running,
      r.preemptions, r.most_kv_bytes, r.kv_budget_bytes);
}

nlohmann::ordered_json ToJson(const ServeBenchOptions& options, const Row& row) {
  const LoadReport& r = row.report;
  return {{"kv", row.method},
          {"clients", row.clients},
          {"shared_tokens", row.shared},
          {"prompt_tokens", options.prompt_tokens},
          {"max_tokens", options.max_tokens},
          {"answered", r.answered},
          {"failed", r.failed},
          {"first_error", r.first_error},
          {"seconds", r.seconds},
          {"output_tokens_per_second", r.output_tokens_per_second},
          {"input_tokens_per_second", r.input_tokens_per_second},
          {"first_token_seconds", {{"p50", r.first_token_p50}, {"p95", r.first_token_p95}}},
          {"per_token_seconds", {{"p50", r.per_token_p50}, {"p95", r.per_token_p95}}},
          {"cached_share", r.cached_share},
          {"conversations_fit", row.fit},
          {"most_running", r.most_running},
          {"preemptions", r.preemptions},
          {"most_kv_bytes", r.most_kv_bytes},
          {"kv_budget_bytes", r.kv_budget_bytes}};
}

void PrintRow(const Row& row) {
  const LoadReport& r = row.report;
  const auto known = [](double value) {
    return value < 0.0 ? std::string("-") : fmt::format("{:.0f}", value);
  };
  fmt::print(
      "{:>10} {:>7} {:>8} {:>9} {:>9.1f} {:>9.1f} {:>9.3f} {:>9.3f} {:>9.1f} {:>6.0f}% {:>5} "
      "{:>7} {:>8}\n",
      row.method, row.clients, row.shared,
      r.failed > 0 ? fmt::format("{}+{}x", r.answered, r.failed) : std::to_string(r.answered),
      r.output_tokens_per_second, r.input_tokens_per_second, r.first_token_p50, r.first_token_p95,
      r.per_token_p50 * 1e3, r.cached_share * 100.0, row.fit < 0 ? "-" : std::to_string(row.fit),
      known(r.most_running), known(r.preemptions));
  std::fflush(stdout);
  if (!r.first_error.empty()) LogWarning("{} requests failed: {}", r.failed, r.first_error);
}

// A server under test: one of a method in this process, over real connections, or another one.
struct Target {
  std::string method;
  ServerAddress address;
  int vocab_size = 8192;
  uint64_t budget = 0;
  std::unique_ptr<LoadedModel> plan;  // null: unknown
  // In the order of destruction, reversed.
  std::unique_ptr<server::ModelHost> host;
  std::unique_ptr<server::ApiServer> api;
  std::unique_ptr<server::HttpServer> http;

  ~Target() {
    if (api != nullptr) api->Abort();
    if (http != nullptr) http->Stop(std::chrono::seconds(5));
  }
  int64_t Fit(int64_t tokens) const {
    if (plan == nullptr) return -1;
    const CacheConfig& cache = plan->kv().cache();
    return std::max(Conversations(cache, tokens, budget, Reading::kByChunk),
                    Conversations(cache, tokens, budget, Reading::kByLayer));
  }
};

Result<std::unique_ptr<Target>> StartTarget(const ServeBenchOptions& options,
                                            const std::string& method, uint64_t budget) {
  ModelOptions model = options.model.options;
  model.kv = method;
  model.kv_memory = budget;
  server::HostOptions host;
  host.engine.max_running = std::max(64, *std::ranges::max_element(options.clients));
  host.engine.max_waiting = 4096;
  auto target = std::make_unique<Target>();
  target->method = method;
  target->budget = budget;
  OSCAR_ASSIGN_OR_RETURN(target->host, server::ModelHost::Prepare(model, host));
  OSCAR_ASSIGN_OR_RETURN(auto served, target->host->Load());
  OSCAR_ASSIGN_OR_RETURN(target->plan, LoadedModel::Plan(model));
  target->vocab_size = target->plan->spec().vocab_size;
  server::HttpOptions http;
  http.port = 0;
  http.max_connections = 4096;
  target->api = std::make_unique<server::ApiServer>(server::ApiOptions{});
  OSCAR_ASSIGN_OR_RETURN(target->http, server::HttpServer::Bind(http));
  target->http->Start(*target->api);
  target->api->SetModel(std::move(served));
  target->address.port = target->http->port();
  return target;
}

Result<Row> RunRow(const ServeBenchOptions& options, const Target& target, int64_t shared,
                   int clients, uint64_t seed) {
  LoadOptions load;
  load.clients = clients;
  load.requests = clients * options.rounds;
  load.prompt_tokens = options.prompt_tokens;
  load.shared_tokens = shared;
  load.max_tokens = options.max_tokens;
  load.vocab_size = target.vocab_size;
  load.seed = seed;
  Progress progress(fmt::format("{}, {} clients, {} shared", target.method, clients, shared),
                    static_cast<uint64_t>(load.requests), "requests");
  Row row{target.method,
          clients,
          shared,
          target.Fit(shared + options.prompt_tokens + options.max_tokens),
          {}};
  OSCAR_ASSIGN_OR_RETURN(row.report, RunLoad(target.address, load, [&] { progress.Add(1); }));
  return row;
}

Status RunServeBench(const ServeBenchOptions& options) {
  std::vector<Row> rows;
  uint64_t budget = 0;
  if (options.url.empty()) {
    ModelOptions plain = options.model.options;
    plain.kv = "bf16";
    plain.rotation.clear();
    plain.bits.reset();
    plain.sink.reset(), plain.recent.reset(), plain.group_dims.reset();
    plain.k_clip.reset(), plain.v_clip.reset();
    OSCAR_ASSIGN_OR_RETURN(const auto bf16, LoadedModel::Plan(plain));
    budget =
        bf16->memory().open_page_bytes / kPageTokens * static_cast<uint64_t>(options.budget_tokens);
    if (options.model.options.kv_memory > 0) budget = options.model.options.kv_memory;
    fmt::print("{} of cache for each method; ", FormatBytes(budget));
  }
  fmt::print("prompts of {} tokens (and those shared), {} generated, {} requests per client\n\n",
             options.prompt_tokens, options.max_tokens, options.rounds);
  fmt::print("{:>10} {:>7} {:>8} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>7} {:>5} {:>7} {:>8}\n",
             "kv", "clients", "shared", "answered", "out tok/s", "in tok/s", "TTFT p50", "TTFT p95",
             "ms/token", "cached", "fit", "running", "preempt");
  std::vector<std::unique_ptr<Target>> targets;
  if (!options.url.empty()) {
    auto target = std::make_unique<Target>();
    target->method = "url";
    OSCAR_ASSIGN_OR_RETURN(target->address, ParseServerAddress(options.url));
    target->address.api_key = options.api_key;
    targets.push_back(std::move(target));
  } else {
    for (const std::string& method : options.methods) {
      OSCAR_ASSIGN_OR_RETURN(auto target, StartTarget(options, method, budget));
      targets.push_back(std::move(target));
    }
  }
  // Methods side by side, so that a machine that is busier for a while is so for all of them; other
  // prompts in every row, so that only what is meant to be shared is.
  uint64_t seed = 0;
  for (const int64_t shared : options.shared) {
    for (const int clients : options.clients) {
      ++seed;
      for (const auto& target : targets) {
        OSCAR_ASSIGN_OR_RETURN(Row row, RunRow(options, *target, shared, clients, seed));
        PrintRow(row);
        rows.push_back(std::move(row));
      }
    }
  }
  if (!options.json.empty()) {
    nlohmann::ordered_json json = nlohmann::ordered_json::array();
    for (const Row& row : rows) json.push_back(ToJson(options, row));
    OSCAR_RETURN_IF_ERROR(WriteFileAtomically(options.json, json.dump(2) + "\n"));
  }
  if (!options.csv.empty()) {
    std::string text = fmt::format("{}\n", kCsvHeader);
    for (const Row& row : rows) text += CsvLine(options, row) + "\n";
    OSCAR_RETURN_IF_ERROR(WriteFileAtomically(options.csv, text));
  }
  const bool failed = std::ranges::any_of(rows, [](const Row& r) { return r.report.failed > 0; });
  return failed ? Unavailable("some requests failed; the lines above say why") : Status{};
}

}  // namespace

void AddServeBench(CLI::App& bench, RunFunction& run) {
  auto options = std::make_shared<ServeBenchOptions>();
  ServeBenchOptions& o = *options;
  CLI::App* command = bench.add_subcommand(
      "serve", "The server under load: tokens/s and time to first token against clients");
  command->add_option("--methods", o.methods, "Cache methods, each with the same bytes of cache")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--clients", o.clients, "Clients that stream at once")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  command->add_option("--shared", o.shared, "Tokens that all prompts begin with")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 22));
  command->add_option("--prompt-tokens", o.prompt_tokens, "Unshared tokens of each prompt")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 22));
  command->add_option("--max-tokens", o.max_tokens, "Tokens of an answer")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 22));
  command->add_option("--rounds", o.rounds, "Requests per client, one after the other")
      ->capture_default_str()
      ->check(CLI::Range(1, 1'000'000));
  command
      ->add_option("--budget-tokens", o.budget_tokens,
                   "Cache of each method: the bytes of this many BF16 tokens; --kv-memory wins")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{64}, int64_t{1} << 40));
  command->add_option("--url", o.url, "A server that runs already (http://HOST:PORT) instead");
  command->add_option("--api-key", o.api_key, "Key for --url");
  command->add_option("--json", o.json, "Write the results to this file, too");
  command->add_option("--csv", o.csv, "Write the results to this file, too");
  AddModelOptions(*command, o.model);
  command->remove_option(command->get_option("--kv"));  // --methods names them
  command->callback([options, &run] {
    run = [options]() -> Status {
      if (options->url.empty()) {
        OSCAR_RETURN_IF_ERROR(options->model.Obtain(ModelParts::kWeights));
      }
      return RunServeBench(*options);
    };
  });
}

}  // namespace oscar::cli
