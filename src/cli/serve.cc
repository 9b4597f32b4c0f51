// oscar serve: the OpenAI-compatible server.
#include "server/serve.h"

#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/progress.h"
#include "cli/byte_size.h"
#include "cli/command.h"
#include "cli/model_options.h"
#include "cli/validators.h"
#include "devices/devices.h"
#include "engine/gpu_plan.h"
#include "engine/loaded_model.h"
#include "engine/page_budget.h"
#include "generation/model_host.h"

namespace oscar::cli {
namespace {

using nlohmann::ordered_json;

struct ServeArguments {
  ModelArguments model;
  server::HttpOptions http;
  std::vector<std::string> api_keys, names, cors_origins;
  std::string api_key_file, chat_template, tool_parser = "auto", reasoning_parser = "auto";
  bool has_api_key_file = false, has_tls = false;
  bool open_metrics = false, metrics_compat = false, ignore_priority = false;
  bool isolate_keys = false, no_prefix_cache = false;
  bool no_generation_config = false;
  double request_timeout = 0.0, shutdown_timeout = 30.0, ping_interval = 15.0;
  double target_itl_ms = 0.0;
  server::RequestLimits limits;
  uint64_t response_store_bytes = server::ApiOptions().response_store_bytes;
  size_t response_store_count = server::ApiOptions().response_store_count;
  EngineServiceOptions engine;
  uint64_t snapshot_bytes = 0;
  bool has_snapshot_bytes = false;
  GrammarLimits grammar;
  bool dry_run = false, json = false;
  int64_t plan_tokens = 32768;  // the conversation that the memory plan counts in
  uint64_t gpu_memory = uint64_t{80} << 30;
};

std::chrono::milliseconds Milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
}

// What one GPU of so many would hold.
struct GpuPlan {
  std::vector<GpuShare> shares;  // the last is the plan
  bool fits = false;
  std::string refused;  // why this version runs the model on no GPU; empty where it does
};

GpuPlan PlanForGpus(const ServeArguments& arguments, const LoadedModel& planned, int64_t tokens) {
  const ModelConfig& config = planned.config();
  const bool fp8 = planned.has_fp8_weights();
  GpuPlan plan;
  plan.shares = PlanGpus(planned.spec(),
                         planned.HasMxfp4Experts() ? TensorTable::Fp8::kMxfp4Experts
                         : fp8                     ? TensorTable::Fp8::kAll
                                                   : TensorTable::Fp8::kNone,
                         fp8 && config.quantization_method == "fp8" ? config.fp8_block_rows : 1,
                         planned.kv(), tokens, arguments.gpu_memory);
  const GpuShare& last = plan.shares.back();
  plan.fits = last.problem.empty() && static_cast<double>(last.bytes()) <=
                                          kShareOfGpu * static_cast<double>(arguments.gpu_memory);
  const Status features = CheckDeviceFeatures(Device::kCuda, planned.spec());
  if (!features.ok()) plan.refused = features.message();
  return plan;
}

void PrintGpus(const ServeArguments& arguments, const GpuPlan& plan, int64_t tokens) {
  const GpuShare& last = plan.shares.back();
  const std::string label = fmt::format("GPUs of {}", FormatBytes(arguments.gpu_memory));
  if (!plan.fits) {
    fmt::print("{:<17} {:>12}  no number up to {} holds it: {}\n", label, "-", last.gpus,
               last.problem.empty() ? "the memory of each is too small" : last.problem);
    return;
  }
  fmt::print("{:<17} {:>12}  each with {} of weights and {} per conversation of {} tokens{}\n",
             label, last.gpus, FormatBytes(last.weight_bytes), FormatBytes(last.conversation_bytes),
             tokens, last.kv_heads_are_copied ? "; some hold the same KV heads" : "");
  if (last.gpus > 1) {
    const GpuShare& before = plan.shares[plan.shares.size() - 2];
    fmt::print("                                {} would {}\n", before.gpus,
               before.problem.empty()
                   ? fmt::format("need {} each, of which {:.0f} % of {} are to be had",
                                 FormatBytes(before.bytes()), 100 * kShareOfGpu,
                                 FormatBytes(arguments.gpu_memory))
                   : fmt::format("not do: {}", before.problem));
    fmt::print("                                this version runs on one GPU\n");
  }
  if (!plan.refused.empty()) fmt::print("                                {}\n", plan.refused);
}

Status PrintPlan(const ServeArguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(const auto planned, LoadedModel::DryRun(arguments.model.options));
  // The same model with a BF16 cache, for comparison.
  ModelOptions plain = arguments.model.options;
  plain.kv = "bf16";
  plain.rotation.clear();
  plain.bits.reset();
  plain.sink.reset();
  plain.recent.reset();
  plain.group_dims.reset();
  plain.k_clip.reset();
  plain.v_clip.reset();
  OSCAR_ASSIGN_OR_RETURN(const auto bf16, LoadedModel::DryRun(plain));
  const MemoryPlan& memory = planned->memory();
  const int64_t tokens = std::min(arguments.plan_tokens, planned->max_context());
  const uint64_t state = planned->spec().state_bytes();
  const uint64_t ours = planned->kv().StoredBytes(tokens) + state;
  const uint64_t theirs = bf16->kv().StoredBytes(tokens) + state;
  const double bits = planned->kv().StoredBits(tokens);
  // While the last of them is being read, which takes more than keeping it.
  const auto fits = [&](const LoadedModel& model, Reading reading) {
    return Conversations(model.kv().cache(), tokens, memory.kv_bytes, reading);
  };
  const Reading reading = planned->device() == Device::kCpu ? Reading::kByLayer : Reading::kByChunk;
  const int64_t fit = std::max(fits(*planned, Reading::kByChunk), fits(*planned, reading));
  const int64_t fit_bf16 = fits(*bf16, Reading::kByChunk);
  const TensorTable table(planned->spec());
  const GpuPlan gpus = PlanForGpus(arguments, *planned, tokens);
  if (arguments.json) {
    const GpuShare& share = gpus.shares.back();
    ordered_json json = {{"architecture", planned->spec().architecture},
                         {"parameters", table.num_parameters()},
                         {"active_parameters", table.num_active_parameters()},
                         {"weight_bytes", memory.weight_bytes},
                         {"kv_budget_bytes", memory.kv_bytes},
                         {"available_bytes", memory.available_bytes},
                         {"open_page_bytes", memory.open_page_bytes},
                         {"sealed_page_bytes", memory.sealed_page_bytes},
                         {"max_context", planned->max_context()},
                         {"method", planned->kv().method().name},
                         {"state_bytes", state},
                         {"conversation_tokens", tokens},
                         {"conversation_bytes", ours},
                         {"conversation_bytes_bf16", theirs},
                         {"conversations", fit},
                         {"conversations_bf16", fit_bf16},
                         {"bits_per_element", bits}};
    json["gpus"] = {{"memory_bytes", arguments.gpu_memory},
                    {"count", gpus.fits ? ordered_json(share.gpus) : ordered_json()},
                    {"weight_bytes_each", share.weight_bytes},
                    {"conversation_bytes_each", share.conversation_bytes},
                    {"problem", share.problem},
                    {"refused", gpus.refused}};
    fmt::print("{}\n", json.dump(2));
    return {};
  }
  const uint64_t parameters = table.num_parameters(), active = table.num_active_parameters();
  fmt::print("model             {:>12}  {:.2f} B parameters{}\n", planned->spec().architecture,
             static_cast<double>(parameters) / 1e9,
             active == parameters ? ""
                                  : fmt::format(", {:.2f} B of them for a token",
                                                static_cast<double>(active) / 1e9));
  fmt::print("weights           {:>12}  (read once){}\n", FormatBytes(memory.weight_bytes),
             memory.weight_bytes > memory.available_bytes ? ", more than is free here" : "");
  fmt::print("cache budget      {:>12}  of {} free\n", FormatBytes(memory.kv_bytes),
             FormatBytes(memory.available_bytes));
  fmt::print("page of 64 tokens {:>12}  in BF16, {} sealed\n", FormatBytes(memory.open_page_bytes),
             FormatBytes(memory.sealed_page_bytes));
  fmt::print("cache             {}\n", planned->kv().Describe());
  fmt::print("one conversation  {:>12}  for {} tokens, {:.2f} bits per element; {} in BF16\n",
             FormatBytes(ours), tokens, bits, FormatBytes(theirs));
  if (state > 0) {
    fmt::print(
        "recurrent state   {:>12}  of it, whatever its length: {:.0f} % here, {:.0f} % in BF16\n",
        FormatBytes(state), 100.0 * static_cast<double>(state) / static_cast<double>(ours),
        100.0 * static_cast<double>(state) / static_cast<double>(theirs));
  }
  fmt::print("conversations     {:>12}  at once, one of them being read; {} in BF16\n", fit,
             fit_bf16);
  PrintGpus(arguments, gpus, tokens);
  return {};
}

// A key or certificate that was meant and is empty (an unset variable in a script) must not open
// the server. The option parser takes an empty variable for an absent one.
Status CheckSecurity(const ServeArguments& arguments) {
  for (const char* name :
       {"OSCAR_API_KEY", "OSCAR_API_KEY_FILE", "OSCAR_TLS_CERT", "OSCAR_TLS_KEY"}) {
    const char* value = std::getenv(name);
    if (value == nullptr || *value != '\0') continue;
    return InvalidArgument(
        fmt::format("{} is set but empty; give it a value, or unset it to serve without", name));
  }
  if (arguments.has_tls &&
      (arguments.http.tls_certificate.empty() || arguments.http.tls_key.empty())) {
    return InvalidArgument(
        "--tls-cert and --tls-key go together; name both PEM files, or neither to serve plain "
        "HTTP");
  }
  return {};
}

Result<server::KeyRing> ReadKeys(const ServeArguments& arguments) {
  server::KeyRing keys;
  for (const std::string& key : arguments.api_keys) {
    if (key.empty()) {
      return Unexpected(InvalidArgument(
          "--api-key is empty; give a key, or leave the option out to serve without keys"));
    }
    if (const Status status = keys.Add(key); !status.ok()) {
      return Unexpected(status.WithContext("--api-key"));
    }
  }
  if (arguments.has_api_key_file) {
    if (arguments.api_key_file.empty()) {
      return Unexpected(InvalidArgument(
          "--api-key-file is empty; name a file with one key per line, or leave the option out to "
          "serve without keys"));
    }
    if (const Status status = keys.AddFile(arguments.api_key_file); !status.ok()) {
      return Unexpected(status.WithContext("--api-key-file"));
    }
  }
  if (arguments.isolate_keys && keys.empty()) {
    return Unexpected(InvalidArgument(
        "--isolate-keys keeps apart what keys share; add --api-key or --api-key-file"));
  }
  return keys;
}

Status RunServe(ServeArguments& arguments) {
  OSCAR_RETURN_IF_ERROR(arguments.model.Check());
  OSCAR_RETURN_IF_ERROR(CheckSecurity(arguments));
  server::ServeOptions options;
  OSCAR_ASSIGN_OR_RETURN(options.api.keys, ReadKeys(arguments));
  // A plan needs the config alone.
  OSCAR_RETURN_IF_ERROR(
      arguments.model.Obtain(arguments.dry_run ? ModelParts::kConfig : ModelParts::kWeights));
  if (arguments.dry_run) return PrintPlan(arguments);
  options.http = arguments.http;
  options.api.guard_metrics = !arguments.open_metrics;
  options.api.metrics_compat = arguments.metrics_compat;
  options.api.ignore_priority = arguments.ignore_priority;
  options.api.isolate_keys = arguments.isolate_keys;
  options.api.cors_origins = arguments.cors_origins;
  options.api.request_timeout = Milliseconds(arguments.request_timeout);
  options.api.ping_interval = Milliseconds(arguments.ping_interval);
  options.api.response_store_bytes = arguments.response_store_bytes;
  options.api.response_store_count = arguments.response_store_count;
  options.shutdown_timeout = Milliseconds(arguments.shutdown_timeout);
  server::HostOptions host;
  host.names = arguments.names;
  host.dialogue.chat_template = arguments.chat_template;
  host.dialogue.use_generation_config = !arguments.no_generation_config;
  if (arguments.tool_parser != "auto") {
    host.dialogue.call_format = FindCallFormat(arguments.tool_parser);
  }
  if (arguments.reasoning_parser != "auto") {
    host.dialogue.reasoning = FindReasoningKind(arguments.reasoning_parser);
  }
  host.limits = arguments.limits;
  host.grammar = arguments.grammar;
  host.grammar_worker = "/proc/self/exe";  // main answers to kGrammarWorkerArgument
  host.limits.max_conversation_bytes = arguments.http.max_body_bytes;
  host.engine = arguments.engine;
  if (arguments.has_snapshot_bytes) host.engine.snapshot_bytes = arguments.snapshot_bytes;
  host.engine.prefix_cache = !arguments.no_prefix_cache;
  host.engine.target_pass_seconds = arguments.target_itl_ms / 1e3;
  // What is wrong with options or small files is said before the port is bound.
  OSCAR_ASSIGN_OR_RETURN(const std::shared_ptr<server::ModelHost> prepared,
                         server::ModelHost::Prepare(arguments.model.options, host));
  return server::RunServer(options, [&]() -> Result<server::Loaded> {
    OSCAR_ASSIGN_OR_RETURN(auto served, prepared->Load());
    return server::Loaded{std::move(served), prepared};
  });
}

// "auto" or a name that `is_known`.
CLI::Validator ParserName(const std::string& what, const std::string& names,
                          std::function<bool(const std::string&)> is_known) {
  const auto check = [what, names, is_known = std::move(is_known)](const std::string& value) {
    if (value == "auto" || is_known(value)) return std::string();
    return fmt::format("{} is no {}; choose auto, {}", value, what, names);
  };
  return {check, "", what};
}

}  // namespace

void AddServeCommand(CLI::App& app, RunFunction& run) {
  auto arguments = std::make_shared<ServeArguments>();
  ServeArguments& a = *arguments;
  CLI::App* command =
      app.add_subcommand("serve", "Serve a model over the APIs of OpenAI and Anthropic");
  AddModelOptions(*command, a.model);

  const char* group = "Server";
  command->add_option("--host", a.http.host, "Address to listen on; 0.0.0.0 is every one")
      ->capture_default_str()
      ->group(group);
  command->add_option("--port", a.http.port, "Port; 0 takes a free one")
      ->capture_default_str()
      ->check(CLI::Range(0, 65535))
      ->group(group);
  command
      ->add_option("--model-name,--served-model-name,--alias", a.names,
                   "Name in the API, and aliases (repeatable)")
      ->allow_extra_args(false)
      ->group(group);
  command->add_option("--api-key", a.api_keys, "Key that clients must send (repeatable)")
      ->allow_extra_args(false)
      ->group(group);
  const CLI::Option* key_file =
      command->add_option("--api-key-file", a.api_key_file, "File with one key per line")
          ->group(group);
  const CLI::Option* tls_certificate =
      command->add_option("--tls-cert", a.http.tls_certificate, "PEM certificate: serve HTTPS")
          ->group(group);
  const CLI::Option* tls_key =
      command->add_option("--tls-key", a.http.tls_key, "PEM private key of the certificate")
          ->group(group);
  command->add_flag("--open-metrics", a.open_metrics, "GET /metrics needs no key")->group(group);
  command
      ->add_flag("--metrics-compat", a.metrics_compat,
                 "GET /metrics also under vLLM's names, for dashboards made for it")
      ->group(group);
  command->add_option("--cors-origin", a.cors_origins, "Origin that browsers may call from, or *")
      ->allow_extra_args(false)
      ->group(group);
  command->add_option("--chat-template", a.chat_template, "Jinja file instead of the model's own")
      ->group(group);
  command
      ->add_option("--tool-parser,--tool-call-parser", a.tool_parser,
                   "How the model writes calls of tools: auto (as its chat template says), " +
                       CallFormatNames())
      ->capture_default_str()
      ->check(ParserName("tool parser", CallFormatNames(),
                         [](const std::string& name) { return FindCallFormat(name).has_value(); }))
      ->group(group);
  command
      ->add_option("--reasoning-parser", a.reasoning_parser,
                   "How the model marks its reasoning: auto (as its chat template says), " +
                       ReasoningKindNames())
      ->capture_default_str()
      ->check(
          ParserName("reasoning parser", ReasoningKindNames(),
                     [](const std::string& name) { return FindReasoningKind(name).has_value(); }))
      ->group(group);
  command
      ->add_flag("--no-generation-config", a.no_generation_config,
                 "Ignore the sampling defaults and max_new_tokens of generation_config.json")
      ->group(group);

  group = "Limits";
  command->add_option("--max-num-seqs,--parallel", a.engine.max_running, "Sequences in one batch")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096))
      ->group(group);
  command
      ->add_option("--target-itl", a.target_itl_ms,
                   "Milliseconds between two tokens of an answer that reading prompts beside it "
                   "should keep to: --chunk shrinks by what passes take; 0: full passes")
      ->capture_default_str()
      ->check(NumberThat("between 0 and 60000", [](double ms) { return ms >= 0 && ms <= 6e4; }))
      ->group(group);
  command->add_option("--max-queue", a.engine.max_waiting, "Requests that may wait; more get 429")
      ->capture_default_str()
      ->check(CLI::Range(0, 1'000'000))
      ->group(group);
  command
      ->add_flag("--ignore-priority", a.ignore_priority,
                 "Serve requests by arrival, whatever their priority field says")
      ->group(group);
  command
      ->add_option("--request-timeout", a.request_timeout, "Seconds for a request; 0 is no limit")
      ->capture_default_str()
      ->check(NonNegative())
      ->group(group);
  command
      ->add_option("--shutdown-timeout", a.shutdown_timeout,
                   "Seconds that requests may continue after the first signal")
      ->capture_default_str()
      ->check(NonNegative())
      ->group(group);
  command->add_option("--max-connections", a.http.max_connections, "Open connections")
      ->capture_default_str()
      ->check(CLI::Range(1, 65536))
      ->group(group);
  TakesByteSize(command->add_option("--max-body", a.http.max_body_bytes, "Largest request body"))
      ->capture_default_str()
      ->group(group);
  TakesByteSize(command->add_option("--max-body-total", a.http.max_bytes_in_flight,
                                    "Bytes of all request bodies that are being read"))
      ->capture_default_str()
      ->group(group);
  command->add_option("--max-n", a.limits.max_n, "Choices of one request")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024))
      ->group(group);
  command->add_option("--max-stops", a.limits.max_stops, "Stop strings of one request")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024))
      ->group(group);
  command
      ->add_option("--max-logprobs", a.limits.max_top_logprobs,
                   "Most likely tokens reported per token")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024))
      ->group(group);
  command
      ->add_option("--grammar-timeout", a.grammar.seconds,
                   "Seconds that compiling one schema, regex or grammar may take")
      ->capture_default_str()
      ->check(CLI::Range(0.1, 600.0))
      ->group(group);
  TakesByteSize(command->add_option("--grammar-cache", a.grammar.cache_bytes,
                                    "Compiled schemas and grammars that are kept"))
      ->capture_default_str()
      ->group(group);
  command->add_option("--max-messages", a.limits.max_messages, "Messages of one chat")
      ->capture_default_str()
      ->check(CLI::Range(1, 1'000'000))
      ->group(group);
  TakesByteSize(command->add_option("--response-store", a.response_store_bytes,
                                    "Bytes of stored responses (/v1/responses); 0 stores none"))
      ->capture_default_str()
      ->group(group);
  command
      ->add_option("--response-store-count", a.response_store_count,
                   "Stored responses; the least recently used leave first")
      ->capture_default_str()
      ->check(CLI::Range(0, 10'000'000))
      ->group(group);
  command->add_option("--ping-interval", a.ping_interval, "Seconds between pings on quiet streams")
      ->capture_default_str()
      ->check(Positive())
      ->group(group);

  group = "Prefix cache";
  command->add_flag("--no-prefix-cache", a.no_prefix_cache, "Compute every prompt anew")
      ->group(group);
  command
      ->add_flag("--deterministic", a.engine.deterministic,
                 "Use cached prefixes only where answers stay the same to the bit")
      ->group(group);
  command
      ->add_option("--prefix-dir", a.engine.prefix_dir,
                   "Folder where cached prefixes survive a restart")
      ->group(group);
  TakesByteSize(command->add_option("--prefix-dir-size", a.engine.prefix_dir_bytes,
                                    "Most bytes in that folder"))
      ->capture_default_str()
      ->group(group);
  CLI::Option* snapshots = TakesByteSize(command->add_option(
      "--state-snapshots", a.snapshot_bytes,
      "Models with a recurrent state: bytes of the cache for snapshots of it, from which cached "
      "prefixes continue (default: a quarter; 0 keeps none)"));
  snapshots->group(group);
  command->add_flag("--isolate-keys", a.isolate_keys, "Keys do not share cached prefixes")
      ->group(group);

  group = "Plan";
  CLI::Option* dry_run =
      command->add_flag("--dry-run", a.dry_run, "Print the memory plan and stop")->group(group);
  command->add_option("--plan-tokens", a.plan_tokens, "Tokens of the conversations it counts in")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
      ->needs(dry_run)
      ->group(group);
  TakesByteSize(
      command->add_option("--gpu-memory", a.gpu_memory, "Memory of each GPU that it counts in"))
      ->capture_default_str()
      ->needs(dry_run)
      ->group(group);
  command->add_flag("--json", a.json, "Print the plan as JSON")->needs(dry_run)->group(group);
  command->callback([arguments, key_file, tls_certificate, tls_key, snapshots, &run] {
    arguments->has_snapshot_bytes = snapshots->count() > 0;
    arguments->has_api_key_file = key_file->count() > 0;
    arguments->has_tls = tls_certificate->count() + tls_key->count() > 0;
    run = [arguments] { return RunServe(*arguments); };
  });
}

}  // namespace oscar::cli
