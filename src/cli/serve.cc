// oscar serve: the OpenAI-compatible server.
#include "server/serve.h"

#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/progress.h"
#include "cli/byte_size.h"
#include "cli/command.h"
#include "cli/model_options.h"
#include "cli/validators.h"
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
  std::string api_key_file, chat_template;
  bool has_api_key_file = false, has_tls = false;
  bool open_metrics = false, isolate_keys = false, no_prefix_cache = false;
  bool no_generation_config = false;
  double request_timeout = 0.0, shutdown_timeout = 30.0, ping_interval = 15.0;
  server::RequestLimits limits;
  EngineServiceOptions engine;
  bool dry_run = false, json = false;
  int64_t plan_tokens = 32768;  // the conversation that the memory plan counts in
};

std::chrono::milliseconds Milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
}

Status PrintPlan(const ServeArguments& arguments) {
  OSCAR_ASSIGN_OR_RETURN(const auto planned, LoadedModel::Plan(arguments.model.options));
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
  OSCAR_ASSIGN_OR_RETURN(const auto bf16, LoadedModel::Plan(plain));
  const MemoryPlan& memory = planned->memory();
  const int64_t tokens = std::min(arguments.plan_tokens, planned->max_context());
  // A simulated method keeps BF16 pages, so that is what counts; its own bytes are told beside.
  const bool is_simulated = planned->kv().method().is_simulated();
  const uint64_t stored = planned->kv().StoredBytes(tokens);
  const uint64_t theirs = bf16->kv().StoredBytes(tokens);
  const uint64_t ours = is_simulated ? theirs : stored;
  const double stored_bits = planned->kv().StoredBits(tokens);
  const double bits = is_simulated ? bf16->kv().StoredBits(tokens) : stored_bits;
  // While the last of them is being read, which takes more than keeping it.
  const auto fits = [&](const LoadedModel& model, Reading reading) {
    return Conversations(model.kv().cache(), tokens, memory.kv_bytes, reading);
  };
  const Reading reading = planned->device() == Device::kCpu ? Reading::kByLayer : Reading::kByChunk;
  const int64_t fit = std::max(fits(*planned, Reading::kByChunk), fits(*planned, reading));
  const int64_t fit_bf16 = fits(*bf16, Reading::kByChunk);
  if (arguments.json) {
    const ordered_json json = {{"weight_bytes", memory.weight_bytes},
                               {"kv_budget_bytes", memory.kv_bytes},
                               {"available_bytes", memory.available_bytes},
                               {"open_page_bytes", memory.open_page_bytes},
                               {"sealed_page_bytes", memory.sealed_page_bytes},
                               {"max_context", planned->max_context()},
                               {"method", planned->kv().method().name},
                               {"conversation_tokens", tokens},
                               {"conversation_bytes", ours},
                               {"conversation_bytes_bf16", theirs},
                               {"conversations", fit},
                               {"conversations_bf16", fit_bf16},
                               {"bits_per_element", bits},
                               {"simulated", is_simulated},
                               {"method_bytes", stored},
                               {"method_bits_per_element", stored_bits}};
    fmt::print("{}\n", json.dump(2));
    return {};
  }
  fmt::print("weights           {:>12}  (read once)\n", FormatBytes(memory.weight_bytes));
  fmt::print("cache budget      {:>12}  of {} free\n", FormatBytes(memory.kv_bytes),
             FormatBytes(memory.available_bytes));
  fmt::print("page of 64 tokens {:>12}  in BF16, {} sealed\n", FormatBytes(memory.open_page_bytes),
             FormatBytes(memory.sealed_page_bytes));
  fmt::print("cache             {}\n", planned->kv().Describe());
  fmt::print("one conversation  {:>12}  for {} tokens, {:.2f} bits per element; {} in BF16\n",
             FormatBytes(ours), tokens, bits, FormatBytes(theirs));
  if (is_simulated) {
    fmt::print(
        "simulated         {:>12}  is what the method itself would take, {:.2f} bits per "
        "element; its pages are kept in BF16\n",
        FormatBytes(stored), stored_bits);
  }
  fmt::print("conversations     {:>12}  at once, one of them being read; {} in BF16\n", fit,
             fit_bf16);
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

Status RunServe(const ServeArguments& arguments) {
  OSCAR_RETURN_IF_ERROR(arguments.model.Check());
  OSCAR_RETURN_IF_ERROR(CheckSecurity(arguments));
  server::ServeOptions options;
  OSCAR_ASSIGN_OR_RETURN(options.api.keys, ReadKeys(arguments));
  if (arguments.dry_run) return PrintPlan(arguments);
  options.http = arguments.http;
  options.api.guard_metrics = !arguments.open_metrics;
  options.api.isolate_keys = arguments.isolate_keys;
  options.api.cors_origins = arguments.cors_origins;
  options.api.request_timeout = Milliseconds(arguments.request_timeout);
  options.api.ping_interval = Milliseconds(arguments.ping_interval);
  options.shutdown_timeout = Milliseconds(arguments.shutdown_timeout);
  server::HostOptions host;
  host.names = arguments.names;
  host.dialogue.chat_template = arguments.chat_template;
  host.dialogue.use_generation_config = !arguments.no_generation_config;
  host.limits = arguments.limits;
  host.engine = arguments.engine;
  host.engine.prefix_cache = !arguments.no_prefix_cache;
  // What is wrong with options or small files is said before the port is bound.
  OSCAR_ASSIGN_OR_RETURN(const std::shared_ptr<server::ModelHost> prepared,
                         server::ModelHost::Prepare(arguments.model.options, host));
  return server::RunServer(options, [&]() -> Result<server::Loaded> {
    OSCAR_ASSIGN_OR_RETURN(auto served, prepared->Load());
    return server::Loaded{std::move(served), prepared};
  });
}

}  // namespace

void AddServeCommand(CLI::App& app, RunFunction& run) {
  auto arguments = std::make_shared<ServeArguments>();
  ServeArguments& a = *arguments;
  CLI::App* command = app.add_subcommand("serve", "Serve a model over the OpenAI API");
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
  command->add_option("--cors-origin", a.cors_origins, "Origin that browsers may call from, or *")
      ->allow_extra_args(false)
      ->group(group);
  command->add_option("--chat-template", a.chat_template, "Jinja file instead of the model's own")
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
  command->add_option("--max-queue", a.engine.max_waiting, "Requests that may wait; more get 429")
      ->capture_default_str()
      ->check(CLI::Range(0, 1'000'000))
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
  command->add_option("--max-messages", a.limits.max_messages, "Messages of one chat")
      ->capture_default_str()
      ->check(CLI::Range(1, 1'000'000))
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
  command->add_flag("--json", a.json, "Print the plan as JSON")->needs(dry_run)->group(group);
  command->callback([arguments, key_file, tls_certificate, tls_key, &run] {
    arguments->has_api_key_file = key_file->count() > 0;
    arguments->has_tls = tls_certificate->count() + tls_key->count() > 0;
    run = [arguments] { return RunServe(*arguments); };
  });
}

}  // namespace oscar::cli
