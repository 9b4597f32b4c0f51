// oscar bench serve: what clients see of the server under load, each cache method with the same
// bytes of cache.
#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "base/file.h"
#include "base/log.h"
#include "base/progress.h"
#include "bench/load_bench.h"
#include "cli/command.h"
#include "cli/model_options.h"
#include "cli/validators.h"
#include "engine/page_budget.h"
#include "generation/model_host.h"
#include "http/http_server.h"
#include "report/charts.h"
#include "server/api_server.h"

namespace oscar::cli {
namespace {

// A server's budget of cache where nothing says: the bytes of so many BF16 tokens.
constexpr int64_t kBudgetTokens = 56000;

struct ServeBenchOptions {
  ModelArguments model;
  std::vector<std::string> methods = {"bf16", "oscar+"};
  std::vector<int> clients = {1, 4, 16};
  std::vector<std::string> rates;
  std::vector<int64_t> shared = {0, 8192};
  int rounds = 2, requests = 64;
  int64_t budget_tokens = kBudgetTokens;
  Workload workload;
  double timeout_seconds = 600.0, target_ttft_ms = 0.0, target_tpot_ms = 0.0;  // targets: 0: none
  int64_t beside_prompt_tokens = 0, beside_max_tokens = 512;
  bool together = false;
  std::string url, api_key, served_model, json, csv, html;
};

// How a row asks: so many clients, or so many requests per second.
struct Pace {
  int clients = 0;
  double rate = 0.0;
  std::string Text() const {
    if (rate <= 0.0) return fmt::format("{} clients", clients);
    return std::isfinite(rate) ? fmt::format("{}/s", rate) : "all at once";
  }
};

struct Row {
  std::string method;
  Pace pace;
  int64_t shared = 0;
  int64_t fit = -1;  // conversations of these lengths with nothing shared; -1: unknown
  LoadReport report;
};

struct Figure {
  const char* name;  // in tables
  const char* key;   // in JSON
  Percentiles LoadReport::*percentiles;
  std::vector<double> LoadReport::*curve;  // null: not plotted
};
constexpr std::array<Figure, 4> kFigures = {{
    {"TTFT", "first_token_seconds", &LoadReport::first_token, &LoadReport::first_token_curve},
    {"TPOT", "per_token_seconds", &LoadReport::per_token, &LoadReport::per_token_curve},
    {"ITL", "between_tokens_seconds", &LoadReport::between_tokens,
     &LoadReport::between_tokens_curve},
    {"latency", "latency_seconds", &LoadReport::latency, nullptr},
}};

constexpr const char* kCsvHeader =
    "kv,clients,rate,shared_tokens,prompt_tokens,max_tokens,answered,failed,seconds,"
    "requests_per_second,good_per_second,output_tokens_per_second,input_tokens_per_second,"
    "first_token_p50,first_token_p95,first_token_p99,per_token_p50,per_token_p95,per_token_p99,"
    "between_tokens_p50,between_tokens_p95,between_tokens_p99,cached_share,fit,most_running,"
    "preemptions,most_kv_bytes,kv_budget_bytes";

bool HasTargets(const ServeBenchOptions& options) {
  return options.target_ttft_ms > 0.0 || options.target_tpot_ms > 0.0;
}

std::string CsvLine(const ServeBenchOptions& options, const Row& row) {
  const LoadReport& r = row.report;
  const bool is_fixed = options.workload.dataset == Dataset::kRandom;
  std::string out = fmt::format(
      "{},{},{},{},{},{},{},{},{:.3f},{:.4f},{},{:.2f},{:.2f}", row.method,
      row.pace.rate > 0.0 ? "" : std::to_string(row.pace.clients),
      row.pace.rate > 0.0 ? fmt::format("{}", row.pace.rate) : "", row.shared,
      is_fixed ? std::to_string(options.workload.prompt_tokens) : "",
      is_fixed ? std::to_string(options.workload.max_tokens) : "", r.answered, r.failed, r.seconds,
      r.requests_per_second, HasTargets(options) ? fmt::format("{:.4f}", r.good_per_second) : "",
      r.output_tokens_per_second, r.input_tokens_per_second);
  for (const Percentiles* p : {&r.first_token, &r.per_token, &r.between_tokens}) {
    out += fmt::format(",{:.5f},{:.5f},{:.5f}", p->p50, p->p95, p->p99);
  }
  return out + fmt::format(",{:.4f},{},{:.0f},{:.0f},{:.0f},{:.0f}", r.cached_share, row.fit,
                           r.most_running, r.preemptions, r.most_kv_bytes, r.kv_budget_bytes);
}

nlohmann::ordered_json ToJson(const Percentiles& p) {
  return {{"count", p.count}, {"mean", p.mean}, {"p50", p.p50}, {"p90", p.p90},
          {"p95", p.p95},     {"p99", p.p99},   {"max", p.max}};
}

nlohmann::ordered_json ToJson(const ServeBenchOptions& options, const Row& row) {
  const LoadReport& r = row.report;
  const Workload& work = options.workload;
  const bool is_fixed = work.dataset == Dataset::kRandom, is_open = row.pace.rate > 0.0;
  using Json = nlohmann::ordered_json;
  const auto target = [](double ms) { return ms > 0.0 ? Json(ms / 1e3) : Json(); };
  Json out = {{"kv", row.method},
              {"clients", is_open ? Json() : Json(row.pace.clients)},
              {"rate", !is_open                       ? Json()
                       : std::isfinite(row.pace.rate) ? Json(row.pace.rate)
                                                      : Json("inf")},
              {"dataset", is_fixed ? "random" : "sharegpt-like"},
              {"prompt_format", work.format == PromptFormat::kIds ? "ids" : "text"},
              {"shared_tokens", row.shared},
              {"prompt_tokens", is_fixed ? Json(work.prompt_tokens) : Json()},
              {"max_tokens", is_fixed ? Json(work.max_tokens) : Json()},
              {"answered", r.answered},
              {"failed", r.failed},
              {"first_error", r.first_error},
              {"short_answers", r.short_answers},
              {"uncounted_answers", r.uncounted},
              {"seconds", r.seconds},
              {"requests_per_second", r.requests_per_second},
              {"output_tokens_per_second", r.output_tokens_per_second},
              {"input_tokens_per_second", r.input_tokens_per_second}};
  for (const Figure& figure : kFigures) out[figure.key] = ToJson(r.*figure.percentiles);
  out["goodput"] = nullptr;
  if (HasTargets(options)) {
    out["goodput"] = {{"target_first_token_seconds", target(options.target_ttft_ms)},
                      {"target_per_token_seconds", target(options.target_tpot_ms)},
                      {"requests_per_second", r.good_per_second},
                      {"share", r.good_share}};
  }
  out["beside"] = nullptr;
  if (r.beside.has_value()) {
    out["beside"] = {{"prompt_tokens", r.beside->prompt_tokens},
                     {"completion_tokens", r.beside->completion_tokens},
                     {"first_token_seconds", r.beside->first_token},
                     {"between_tokens_seconds", ToJson(r.beside->between_tokens)}};
  }
  out["latest_arrival_seconds"] = r.latest_arrival;
  out["cached_share"] = r.cached_share;
  out["conversations_fit"] = row.fit;
  out["most_running"] = r.most_running;
  out["preemptions"] = r.preemptions;
  out["most_kv_bytes"] = r.most_kv_bytes;
  out["kv_budget_bytes"] = r.kv_budget_bytes;
  return out;
}

void PrintLoadHeader() {
  fmt::print(
      "{:>10} {:>12} {:>7} {:>9} {:>7} {:>7} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8} {:>6} {:>5} "
      "{:>7} {:>7}\n",
      "kv", "load", "shared", "answered", "req/s", "good/s", "out tok/s", "in tok/s", "TTFT p50",
      "TTFT p95", "ms/token", "ITL p99", "cached", "fit", "running", "preempt");
}

void PrintRow(const ServeBenchOptions& options, const Row& row) {
  const LoadReport& r = row.report;
  const auto known = [](double value) {
    return value < 0.0 ? std::string("-") : fmt::format("{:.0f}", value);
  };
  fmt::print(
      "{:>10} {:>12} {:>7} {:>9} {:>7.2f} {:>7} {:>9.1f} {:>9.1f} {:>9.3f} {:>9.3f} {:>8.1f} "
      "{:>8.1f} {:>5.0f}% {:>5} {:>7} {:>7}\n",
      row.method, row.pace.Text(), row.shared,
      r.failed > 0 ? fmt::format("{}+{}x", r.answered, r.failed) : std::to_string(r.answered),
      r.requests_per_second,
      HasTargets(options) ? fmt::format("{:.2f}", r.good_per_second) : std::string("-"),
      r.output_tokens_per_second, r.input_tokens_per_second, r.first_token.p50, r.first_token.p95,
      r.per_token.p50 * 1e3, r.between_tokens.p99 * 1e3, r.cached_share * 100.0,
      row.fit < 0 ? "-" : std::to_string(row.fit), known(r.most_running), known(r.preemptions));
  if (r.beside.has_value()) {
    const Percentiles& p = r.beside->between_tokens;
    fmt::print(
        "{:>10} beside: {} tokens read in {:.3f} s, {} generated; ms between tokens p50 {:.1f}, "
        "p99 {:.1f} ({:.2f} times the median), max {:.1f}\n",
        "", r.beside->prompt_tokens, r.beside->first_token, r.beside->completion_tokens,
        p.p50 * 1e3, p.p99 * 1e3, p.p50 > 0.0 ? p.p99 / p.p50 : 0.0, p.max * 1e3);
  }
  std::fflush(stdout);
  if (!r.first_error.empty()) LogWarning("{} requests failed: {}", r.failed, r.first_error);
  if (r.short_answers > 0) {
    LogWarning("{} answers are shorter than asked for: the server does not know ignore_eos",
               r.short_answers);
  }
  if (r.uncounted > 0) {
    LogWarning("{} answers came without usage: pieces of text are counted as tokens", r.uncounted);
  }
  if (r.latest_arrival > 0.1) {
    LogWarning("requests were sent up to {:.1f} s late: more than {} at a time are not open",
               r.latest_arrival, kMaxInFlight);
  }
}

void PrintPercentiles(const std::vector<Row>& rows) {
  fmt::print("\n{:>10} {:>12} {:>7} {:>8} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}\n", "kv", "load",
             "shared", "ms", "mean", "p50", "p90", "p95", "p99", "max");
  for (const Row& row : rows) {
    for (const Figure& figure : kFigures) {
      const Percentiles& p = row.report.*figure.percentiles;
      fmt::print(
          "{:>10} {:>12} {:>7} {:>8} {:>9.1f} {:>9.1f} {:>9.1f} {:>9.1f} {:>9.1f} {:>9.1f}\n",
          row.method, row.pace.Text(), row.shared, figure.name, p.mean * 1e3, p.p50 * 1e3,
          p.p90 * 1e3, p.p95 * 1e3, p.p99 * 1e3, p.max * 1e3);
    }
  }
}

std::string RowName(const Row& row, bool with_shared) {
  return fmt::format("{}, {}{}", row.method, row.pace.Text(),
                     with_shared ? fmt::format(", {} shared", row.shared) : "");
}

// Percentiles of every row, and tokens and good answers against the load where there are several.
std::string RenderHtml(const ServeBenchOptions& options, const std::vector<Row>& rows) {
  const bool with_shared = options.shared.size() > 1;
  std::string body = "<div class=\"charts\">";
  for (const Figure& figure : kFigures) {
    if (figure.curve == nullptr) continue;
    std::vector<ChartSeries> series;
    for (const Row& row : rows) {
      ChartSeries line{RowName(row, with_shared), {}, {}, -1, row.method == "bf16"};
      const std::vector<double>& curve = row.report.*figure.curve;
      for (size_t i = 0; i < curve.size(); ++i) {
        line.x.push_back(static_cast<double>(i));
        line.y.push_back(1e3 * curve[i]);
      }
      if (!line.x.empty()) series.push_back(std::move(line));
    }
    ChartOptions chart;
    chart.title = figure.curve == &LoadReport::first_token_curve ? "Time to first token"
                  : figure.curve == &LoadReport::per_token_curve ? "Time per token after the first"
                                                                 : "Time between pieces of text";
    chart.x = {"percentile", false, 0.0, 100.0};
    chart.y = {"ms", true, {}, {}};
    body += "<div>" + LineChart(series, chart) + "</div>";
  }
  const auto against_load = [&](const char* title, const char* unit, double LoadReport::*value) {
    std::map<std::pair<std::string, int64_t>, ChartSeries> lines;
    for (const Row& row : rows) {
      if (row.pace.rate > 0.0 && !std::isfinite(row.pace.rate)) continue;
      ChartSeries& line = lines[{row.method, row.shared}];
      line.name = row.method + (with_shared ? fmt::format(", {} shared", row.shared) : "");
      line.dashed = row.method == "bf16";
      line.x.push_back(row.pace.rate > 0.0 ? row.pace.rate : row.pace.clients);
      line.y.push_back(row.report.*value);
    }
    std::vector<ChartSeries> series;
    for (auto& [key, line] : lines) series.push_back(std::move(line));
    if (series.empty() || series.front().x.size() < 2) return std::string();
    ChartOptions chart;
    chart.title = title;
    chart.x = {options.rates.empty() ? "clients" : "requests per second", false, {}, {}};
    chart.y = {unit, false, 0.0, {}};
    return "<div>" + LineChart(series, chart) + "</div>";
  };
  body += against_load("Generated tokens", "tokens/s", &LoadReport::output_tokens_per_second);
  if (HasTargets(options)) {
    body += against_load("Answers within the targets", "per second", &LoadReport::good_per_second);
  }
  body +=
      "</div>\n<div class=\"scroll\"><table><thead><tr><th>cache</th><th>load</th><th>shared</th>"
      "<th>answered</th><th>failed</th><th>tokens/s out</th><th>tokens/s in</th>";
  if (HasTargets(options)) body += "<th>good/s</th>";
  for (const Figure& figure : kFigures) {
    body += fmt::format("<th>{0} p50, ms</th><th>{0} p99, ms</th>", figure.name);
  }
  body += "</tr></thead><tbody>\n";
  for (const Row& row : rows) {
    const LoadReport& r = row.report;
    body += fmt::format(
        "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{:.1f}</td>"
        "<td>{:.1f}</td>",
        EscapeHtml(row.method), row.pace.Text(), row.shared, r.answered, r.failed,
        r.output_tokens_per_second, r.input_tokens_per_second);
    if (HasTargets(options)) body += fmt::format("<td>{:.2f}</td>", r.good_per_second);
    for (const Figure& figure : kFigures) {
      const Percentiles& p = r.*figure.percentiles;
      body += fmt::format("<td>{:.1f}</td><td>{:.1f}</td>", p.p50 * 1e3, p.p99 * 1e3);
    }
    body += "</tr>\n";
  }
  return HtmlPage("A server under load", body + "</tbody></table></div>\n");
}

// A server under test: one of a method in this process, over real connections, or another one.
struct Target {
  std::string method;
  ServerAddress address;
  std::string served_model;
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
  if (!options.rates.empty()) host.engine.max_running = 256;
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
                   const Pace& pace, uint64_t seed) {
  LoadOptions load;
  load.workload = options.workload;
  load.workload.shared_tokens = shared;
  load.workload.vocab_size = target.vocab_size;
  load.workload.seed += seed;
  load.clients = pace.clients;
  load.rate = pace.rate;
  load.requests = pace.rate > 0.0 ? options.requests : pace.clients * options.rounds;
  load.model = target.served_model;
  load.timeout = std::chrono::milliseconds(std::llround(1e3 * options.timeout_seconds));
  if (options.target_ttft_ms > 0.0) load.target_first_token = options.target_ttft_ms / 1e3;
  if (options.target_tpot_ms > 0.0) load.target_per_token = options.target_tpot_ms / 1e3;
  load.beside_prompt_tokens = options.beside_prompt_tokens;
  load.beside_max_tokens = options.beside_max_tokens;
  Progress progress(fmt::format("{}, {}, {} shared", target.method, pace.Text(), shared),
                    static_cast<uint64_t>(load.requests), "requests");
  Row row{target.method, pace, shared, -1, {}};
  if (options.workload.dataset == Dataset::kRandom) {
    row.fit = target.Fit(shared + options.workload.prompt_tokens + options.workload.max_tokens);
  }
  OSCAR_ASSIGN_OR_RETURN(row.report, RunLoad(target.address, load, [&] { progress.Add(1); }));
  return row;
}

// A server that runs already.
Result<std::unique_ptr<Target>> FindTarget(const ServeBenchOptions& options) {
  auto target = std::make_unique<Target>();
  OSCAR_ASSIGN_OR_RETURN(target->address, ParseServerAddress(options.url));
  target->address.api_key = options.api_key;
  target->served_model = options.served_model;
  ServerInfo info;
  if (auto asked = AskServer(target->address); asked.has_value()) {
    info = std::move(*asked);
  } else if (options.served_model.empty()) {
    return Unexpected(
        Unavailable(fmt::format("{}; --served-model names the model of a server that lists none",
                                asked.error().message())));
  }
  if (target->served_model.empty()) target->served_model = info.model;
  target->method = info.owner.empty() ? "url" : info.owner.substr(0, 10);
  fmt::print("{}: {}, model {}; ", options.url, info.owner.empty() ? "a server" : info.owner,
             target->served_model.empty() ? "not named" : target->served_model);
  return target;
}

Result<uint64_t> BudgetOf(const ServeBenchOptions& options) {
  if (options.model.options.kv_memory > 0) return options.model.options.kv_memory;
  ModelOptions plain = options.model.options;
  plain.kv = "bf16";
  plain.rotation.clear();
  plain.bits.reset();
  plain.sink.reset(), plain.recent.reset(), plain.group_dims.reset();
  plain.k_clip.reset(), plain.v_clip.reset();
  OSCAR_ASSIGN_OR_RETURN(const auto bf16, LoadedModel::Plan(plain));
  return bf16->memory().open_page_bytes / kPageTokens *
         static_cast<uint64_t>(options.budget_tokens);
}

Status WriteFiles(const ServeBenchOptions& options, const std::vector<Row>& rows) {
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
  if (options.html.empty()) return {};
  return WriteFileAtomically(options.html, RenderHtml(options, rows));
}

Status RunServeBench(const ServeBenchOptions& options) {
  std::vector<Pace> paces;
  for (const std::string& rate : options.rates) {
    OSCAR_ASSIGN_OR_RETURN(const double value, ParseRate(rate));
    paces.push_back({0, value});
  }
  if (paces.empty()) {
    for (const int clients : options.clients) paces.push_back({clients, 0.0});
  }
  // Servers are started when their turn comes, so that one engine at a time is in memory; together,
  // a machine that is busier for a while is so for all of them.
  std::vector<std::unique_ptr<Target>> targets;
  std::vector<Row> rows;
  uint64_t budget = 0;
  const bool is_remote = !options.url.empty();
  if (is_remote) {
    OSCAR_ASSIGN_OR_RETURN(auto target, FindTarget(options));
    targets.push_back(std::move(target));
  } else {
    OSCAR_ASSIGN_OR_RETURN(budget, BudgetOf(options));
    fmt::print("{} of cache for each method; ", FormatBytes(budget));
  }
  const Workload& work = options.workload;
  if (work.dataset == Dataset::kRandom) {
    fmt::print("prompts of {} tokens (and those shared), {} generated, ", work.prompt_tokens,
               work.max_tokens);
  } else {
    fmt::print("lengths like ShareGPT's, ");
  }
  fmt::print("{}\n\n", options.rates.empty() ? fmt::format("{} requests per client", options.rounds)
                                             : fmt::format("{} requests", options.requests));
  PrintLoadHeader();
  const auto run = [&](const Target& target, size_t shared, size_t pace) -> Status {
    // Other prompts in every row, so that only what is meant to be shared is; the same for all.
    const uint64_t seed = shared * paces.size() + pace;
    OSCAR_ASSIGN_OR_RETURN(Row row,
                           RunRow(options, target, options.shared[shared], paces[pace], seed));
    PrintRow(options, row);
    rows.push_back(std::move(row));
    return {};
  };
  const auto each = [&](const auto& visit) -> Status {
    for (size_t shared = 0; shared < options.shared.size(); ++shared) {
      for (size_t pace = 0; pace < paces.size(); ++pace) OSCAR_RETURN_IF_ERROR(visit(shared, pace));
    }
    return {};
  };
  if (is_remote || options.together) {
    for (const std::string& method : options.methods) {
      if (is_remote) break;
      OSCAR_ASSIGN_OR_RETURN(auto target, StartTarget(options, method, budget));
      targets.push_back(std::move(target));
    }
    const auto ask_all = [&](size_t shared, size_t pace) -> Status {
      for (const auto& target : targets) OSCAR_RETURN_IF_ERROR(run(*target, shared, pace));
      return {};
    };
    OSCAR_RETURN_IF_ERROR(each(ask_all));
  } else {
    for (const std::string& method : options.methods) {
      OSCAR_ASSIGN_OR_RETURN(const auto target, StartTarget(options, method, budget));
      const auto ask = [&](size_t shared, size_t pace) { return run(*target, shared, pace); };
      OSCAR_RETURN_IF_ERROR(each(ask));
    }
  }
  PrintPercentiles(rows);
  OSCAR_RETURN_IF_ERROR(WriteFiles(options, rows));
  const bool failed = std::ranges::any_of(rows, [](const Row& r) { return r.report.failed > 0; });
  return failed ? Unavailable("some requests failed; the lines above say why") : Status{};
}

// An option that would be passed over is an error.
Status CheckOptions(const ServeBenchOptions& options, const std::set<std::string>& given,
                    const std::set<std::string>& of_own_server) {
  const auto refuse_if = [&](bool applies, const std::set<std::string>& names,
                             const char* why) -> Status {
    for (const std::string& name : names) {
      if (applies && given.contains(name)) return InvalidArgument(fmt::format("{}: {}", name, why));
    }
    return {};
  };
  const bool is_remote = !options.url.empty(), is_open = !options.rates.empty();
  OSCAR_RETURN_IF_ERROR(refuse_if(is_remote, of_own_server, "for a server of its own, not --url"));
  OSCAR_RETURN_IF_ERROR(refuse_if(!is_remote, {"--api-key", "--served-model"}, "only with --url"));
  OSCAR_RETURN_IF_ERROR(refuse_if(is_open, {"--clients", "--rounds"},
                                  "--rate says when requests arrive; leave one of them out"));
  OSCAR_RETURN_IF_ERROR(refuse_if(!is_open, {"--requests"}, "only with --rate"));
  OSCAR_RETURN_IF_ERROR(refuse_if(options.workload.dataset != Dataset::kRandom,
                                  {"--prompt-tokens", "--max-tokens"},
                                  "the lengths of sharegpt-like are its own; leave it out"));
  return refuse_if(options.beside_prompt_tokens == 0, {"--beside-max-tokens"},
                   "only with --beside");
}

constexpr char kFooter[] = R"(Examples:
  oscar bench serve --methods bf16,oscar+ --clients 4,16 --shared 0
      two servers of this program, one after the other, with the same bytes of cache
  oscar bench serve --url http://127.0.0.1:8000 --dataset sharegpt-like --rate 1,2,4 --requests 200
        --shared 0 --target-ttft 500 --target-tpot 50 --html load.html
      any OpenAI-compatible server (vLLM, SGLang, llama.cpp); good/s counts answers within both
  oscar bench serve --url http://127.0.0.1:8000 --beside 30000 --rate 1 --prompt-tokens 8192
        --max-tokens 256 --shared 0
      a long conversation while requests arrive: how evenly do its tokens come?

TTFT: time to the first token; TPOT: mean time per token after it; ITL: time between two pieces of
text. With --rate requests arrive whether or not others are answered, as users do; with --clients
each waits for its answer, so that a slow server is asked less.)";

}  // namespace

void AddServeBench(CLI::App& bench, RunFunction& run) {
  auto options = std::make_shared<ServeBenchOptions>();
  ServeBenchOptions& o = *options;
  CLI::App* command = bench.add_subcommand(
      "serve", "The server under load: tokens/s and time to first token against clients");
  command->footer(kFooter);
  command
      ->add_option("--methods", o.methods,
                   "Cache methods, one server after the other, each with the same bytes of cache")
      ->delimiter(',')
      ->capture_default_str();
  command->add_flag("--together", o.together,
                    "All servers in memory at once, asked alternately: evens out what else the "
                    "machine does");
  command
      ->add_option("--budget-tokens", o.budget_tokens,
                   "Cache of each method: the bytes of this many BF16 tokens; --kv-memory wins")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{64}, int64_t{1} << 40));
  AddModelOptions(*command, o.model);
  command->remove_option(command->get_option("--kv"));  // --methods names them
  std::set<std::string> of_own_server;
  for (const CLI::Option* option : command->get_options()) {
    if (option->get_name() != "--help") of_own_server.insert(option->get_name());
  }
  command->add_option("--url", o.url, "A server that runs already (http://HOST:PORT) instead");
  command->add_option("--api-key", o.api_key, "Its key");
  command->add_option("--served-model", o.served_model, "Its model; default: the first it lists");

  const char* group = "Load";
  command
      ->add_option("--dataset", o.workload.dataset,
                   "random (--prompt-tokens, --max-tokens) or sharegpt-like: lengths spread as "
                   "those of chats, 215 tokens in and 203 out on average, at most 1024")
      ->default_str("random")
      ->transform(
          OneOf<Dataset>({{"random", Dataset::kRandom}, {"sharegpt-like", Dataset::kShareGptLike}},
                         "random or sharegpt-like"))
      ->group(group);
  command
      ->add_option("--prompt-format", o.workload.format,
                   "ids (lengths are exact) or text (words, about a token each)")
      ->default_str("ids")
      ->transform(OneOf<PromptFormat>({{"ids", PromptFormat::kIds}, {"text", PromptFormat::kText}},
                                      "ids or text"))
      ->group(group);
  command->add_option("--clients", o.clients, "Clients that stream at once")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::Range(1, kMaxInFlight))
      ->group(group);
  command
      ->add_option(
          "--rate", o.rates,
          "Requests per second instead of clients, at random (Poisson) by --seed; inf: all "
          "at once")
      ->delimiter(',')
      ->group(group);
  command->add_option("--requests", o.requests, "Requests of each --rate")
      ->capture_default_str()
      ->check(CLI::Range(1, 1'000'000))
      ->group(group);
  command->add_option("--rounds", o.rounds, "Requests per client, one after the other")
      ->capture_default_str()
      ->check(CLI::Range(1, 1'000'000))
      ->group(group);
  command->add_option("--shared", o.shared, "Tokens that all prompts begin with")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 22))
      ->group(group);
  command->add_option("--prompt-tokens", o.workload.prompt_tokens, "Unshared tokens of each prompt")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 22))
      ->group(group);
  command->add_option("--max-tokens", o.workload.max_tokens, "Tokens of an answer")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 22))
      ->group(group);
  command
      ->add_option(
          "--beside", o.beside_prompt_tokens,
          "First start one conversation with a prompt of so many tokens; the load runs from "
          "its first token to its last")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 22))
      ->group(group);
  command->add_option("--beside-max-tokens", o.beside_max_tokens, "Tokens of its answer")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{2}, int64_t{1} << 22))
      ->group(group);
  command->add_option("--seed", o.workload.seed, "Of prompts, lengths and arrivals")
      ->capture_default_str()
      ->check(NoMinus())
      ->group(group);
  command->add_option("--timeout", o.timeout_seconds, "Seconds for one answer; later it has failed")
      ->capture_default_str()
      ->check(CLI::Range(0.001, 86400.0))
      ->group(group);

  group = "Results";
  command
      ->add_option("--target-ttft", o.target_ttft_ms,
                   "Milliseconds to the first token, at most, for an answer to count as good")
      ->check(Positive())
      ->group(group);
  command
      ->add_option("--target-tpot", o.target_tpot_ms,
                   "Milliseconds per token after it, at most, for an answer to count as good")
      ->check(Positive())
      ->group(group);
  command->add_option("--json", o.json, "Write the results to this file, too")->group(group);
  command->add_option("--csv", o.csv, "Write the results to this file, too")->group(group);
  command->add_option("--html", o.html, "Plot percentiles and throughput into this page")
      ->group(group);
  command->callback([options, command, of_own_server, &run] {
    std::set<std::string> given;
    for (const CLI::Option* option : command->get_options()) {
      // A variable is for every command, and may be meant for another one.
      const std::string variable = option->get_envname();
      const bool is_set = !variable.empty() && std::getenv(variable.c_str()) != nullptr;
      if (option->count() > 0 && !is_set) given.insert(option->get_name());
    }
    run = [options, given, of_own_server]() -> Status {
      OSCAR_RETURN_IF_ERROR(CheckOptions(*options, given, of_own_server));
      if (options->url.empty()) {
        OSCAR_RETURN_IF_ERROR(options->model.Obtain(ModelParts::kWeights));
      }
      return RunServeBench(*options);
    };
  });
}

}  // namespace oscar::cli
