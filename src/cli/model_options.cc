#include "cli/model_options.h"

#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "cli/byte_size.h"
#include "cli/validators.h"
#include "hub/hub.h"
#include "quant/kv_method.h"

namespace oscar::cli {
namespace {

std::string MethodHelp() {
  std::string names;
  for (const KvMethodInfo& method : KvMethodTable()) {
    names += fmt::format("{}{}", names.empty() ? "" : ", ", method.name);
  }
  return fmt::format(
      "Cache method: {}. Some take switches, as in oscar-su:norm=head:bits=3 (docs/quantizers.md). "
      "oscar+ is this project's own; oscar is OSCAR (arXiv 2605.17757) as "
      "published; oscar-su is "
      "OScaR (arXiv 2605.19660), another method of a similar name",
      names);
}

}  // namespace

void AddModelOptions(CLI::App& command, ModelArguments& arguments) {
  ModelOptions& o = arguments.options;
  const char* group = "Model";
  command
      .add_option("model,-m,--model", o.model,
                  "Model directory, or a name on the Hugging Face hub such as Qwen/Qwen3-8B or "
                  "ORG/NAME@REVISION, downloaded where it is not here; default: the demo model")
      ->check(NotEmpty())
      ->group(group);
  AddOfflineFlag(command, arguments.offline)->group(group);
  command.add_option("--device", o.device, "auto (a GPU where there is one), cpu or cuda")
      ->default_str("auto")
      ->transform(
          OneOf<Device>({{"auto", Device::kAuto}, {"cpu", Device::kCpu}, {"cuda", Device::kCuda}},
                        "auto, cpu or cuda"))
      ->group(group);
  command
      .add_flag("--batch-invariant", o.batch_invariant,
                "On a GPU: the same bits for any batch, slower prompts")
      ->group(group);
  command
      .add_flag(
          "--portable", o.portable,
          "The same bits on any CPU and on a GPU: one order of every sum, several times slower")
      ->group(group);
  command.add_option("-t,--threads", o.num_threads, "Compute threads; 0 is one per core")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024))
      ->group(group);
  command
      .add_option("-c,--max-model-len,--ctx-size", o.max_context,
                  "Context in tokens; 0 is the model's own")
      ->capture_default_str()
      ->check(NonNegative())
      ->group(group);
  command
      .add_option("--rope-scaling", o.rope_scaling,
                  "Stretch positions: yarn:4, linear:2, llama3:8:8192 or none")
      ->check(NotEmpty())
      ->group(group);
  CLI::Option* const random = command
                                  .add_flag("--random-weights", o.random_weights,
                                            "Random weights in the model's shapes, for speed work")
                                  ->group(group);
  command.add_option("--weights-seed", o.weights_seed, "Seed of the random weights")
      ->needs(random)
      ->check(NoMinus())
      ->capture_default_str()
      ->group(group);

  command
      .add_option("--weights", o.weights,
                  "checkpoint (as stored) or fp8 (quantised while loading; a GPU keeps half the "
                  "bytes)")
      ->default_str("checkpoint")
      ->transform(OneOf<WeightFormat>(
          {{"checkpoint", WeightFormat::kCheckpoint}, {"fp8", WeightFormat::kFp8}},
          "checkpoint or fp8"))
      ->group(group);

  group = "KV cache";
  command.add_option("--kv", o.kv, MethodHelp())->capture_default_str()->group(group);
  command
      .add_option("--rotation", o.rotation,
                  "Rotation file or directory (rotation.safetensors or a k_*.pt, v_*.pt pair, and "
                  "sensitivity.json); none: also not the model's own folder rotation/")
      ->check(NotEmpty())
      ->group(group);
  command.add_option("--bits", o.bits, kBitsHelp)->check(HistoryBits())->group(group);
  TakesByteSize(command.add_option("--kv-memory", o.kv_memory,
                                   "Cache budget, such as 512MiB or 1.5GiB; 0 is automatic"))
      ->capture_default_str()
      ->group(group);
  CLI::Option* const sink =
      command.add_option("--sink", o.sink, "First tokens kept in BF16; a multiple of 64")
          ->group(group);
  CLI::Option* const recent =
      command.add_option("--recent", o.recent, "Newest tokens kept in BF16; a multiple of 64")
          ->group(group);
  command.add_option("--group", o.group_dims, "Dims that share one scale: 32, 64, 128 or the head")
      ->group(group);
  command.add_option("--k-clip", o.k_clip, "Clip ratio of keys, 0 is off")->group(group);
  command.add_option("--v-clip", o.v_clip, "Clip ratio of values, 0 is off")->group(group);
  CLI::Option* const cell =
      command
          .add_option("--prefill-cell", o.prefill_cell,
                      "Prompt tokens that see one another exactly; a multiple of 64")
          ->capture_default_str()
          ->group(group);
  arguments.history = {sink, recent, cell};
  command
      .add_option("--chunk", o.chunk,
                  "Prompt tokens in one pass: speed, never answers; 0 is 512 on the CPU, 4096 on "
                  "a GPU")
      ->capture_default_str()
      ->check(CLI::Range(0, 65536))
      ->group(group);
}

CLI::Option* AddOfflineFlag(CLI::App& command, bool& offline) {
  return command.add_flag("--offline", offline,
                          "Ask no hub: names must be in the local hub cache (as HF_HUB_OFFLINE=1)");
}

Status ModelArguments::Obtain(ModelParts parts) {
  if (options.model.empty()) return {};
  if (options.random_weights && parts == ModelParts::kWeights) parts = ModelParts::kText;
  OSCAR_ASSIGN_OR_RETURN(options.model, hub::ObtainModel(options.model, parts, offline));
  return {};
}

Status ModelArguments::Check() const {
  if (options.kv != "bf16") return {};
  for (const CLI::Option* option : history) {
    if (option->count() == 0) continue;
    return InvalidArgument(
        fmt::format("{}: --kv bf16 keeps every token in BF16, so this has no effect; leave it out",
                    option->get_name()));
  }
  return {};
}

void AddSamplingOptions(CLI::App& command, SamplingArguments& arguments, const char* defaults) {
  const std::string group = fmt::format("Sampling (defaults {})", defaults);
  command
      .add_option("--temperature,--temp", arguments.temperature, "0 takes the most likely token")
      ->check(NumberThat("between 0 and 100", [](double x) { return x >= 0 && x <= 100; }))
      ->group(group);
  command.add_option("--top-k", arguments.top_k, "Keep the k most likely tokens; 0 or -1 is off")
      ->check(NumberThat("a whole number from -1 to 1000000000",
                         [](double x) { return x >= -1 && x <= 1e9 && x == std::floor(x); }))
      ->group(group);
  command.add_option("--top-p", arguments.top_p, "Keep tokens up to this total probability")
      ->check(NumberThat("above 0 and at most 1",
                         [](double x) { return static_cast<float>(x) > 0 && x <= 1; }))
      ->group(group);
  command
      .add_option("--min-p", arguments.min_p,
                  "Keep tokens at least this likely relative to the best")
      ->check(NumberThat("between 0 and 1", [](double x) { return x >= 0 && x <= 1; }))
      ->group(group);
  command.add_option("--repetition-penalty", arguments.repetition_penalty, "1 is off")
      ->check(NumberThat("between 0.01 and 100", [](double x) { return x >= 0.01 && x <= 100; }))
      ->group(group);
  const auto penalty = NumberThat("between -2 and 2", [](double x) { return x >= -2 && x <= 2; });
  command.add_option("--presence-penalty", arguments.presence_penalty, "0 is off")
      ->check(penalty)
      ->group(group);
  command.add_option("--frequency-penalty", arguments.frequency_penalty, "0 is off")
      ->check(penalty)
      ->group(group);
  command.add_option("--seed", arguments.seed, "Makes sampling repeatable")
      ->check(NoMinus())
      ->group(group);
}

SamplingOptions SamplingArguments::Apply(SamplingOptions o) const {
  o.temperature = temperature.value_or(o.temperature);
  o.top_k = std::max(top_k.value_or(o.top_k), 0);
  o.top_p = top_p.value_or(o.top_p);
  o.min_p = min_p.value_or(o.min_p);
  o.repetition_penalty = repetition_penalty.value_or(o.repetition_penalty);
  o.presence_penalty = presence_penalty.value_or(o.presence_penalty);
  o.frequency_penalty = frequency_penalty.value_or(o.frequency_penalty);
  if (seed.has_value()) o.seed = seed;
  return o;
}

void AddAnswerOptions(CLI::App& command, AnswerArguments& arguments) {
  command
      .add_option("-n,--max-tokens,--n-predict", arguments.max_tokens,
                  "Most tokens of an answer; 0 is the rest of the context; default: the model's "
                  "max_new_tokens")
      ->check(NonNegative());
  command.add_option("--stop", arguments.stop, "Text that ends the answer (repeatable)")
      ->allow_extra_args(false)
      ->check(NotEmpty());
  command
      .add_option("--stop-token-id", arguments.stop_token_ids,
                  "Token that ends the answer, besides the model's own (repeatable)")
      ->allow_extra_args(false)
      ->check(CLI::Range(0, std::numeric_limits<int32_t>::max()));
  command.add_option("--template-arguments", arguments.template_arguments,
                     "JSON object of variables for the chat template, such as "
                     "'{\"enable_thinking\": false}'");
  AddSamplingOptions(command, arguments.sampling);
}

Status AnswerArguments::Check() const {
  if (template_arguments.empty()) return {};
  constexpr const char* kName = "--template-arguments";
  OSCAR_ASSIGN_OR_RETURN(const auto arguments, ParseJson(template_arguments, kName));
  if (!arguments.is_object()) {
    return InvalidArgument(
        fmt::format("{}: must be a JSON object, such as '{{\"enable_thinking\": false}}'", kName));
  }
  for (const char* taken : {"messages", "tools", "documents", "add_generation_prompt"}) {
    if (arguments.contains(taken)) {
      return InvalidArgument(
          fmt::format("{}: \"{}\" cannot be set: the name is taken", kName, taken));
    }
  }
  return {};
}

CompletionOptions AnswerArguments::Apply(const SamplingOptions& defaults) const {
  CompletionOptions options;
  options.sampling = sampling.Apply(defaults);
  options.max_tokens = max_tokens;
  options.stop = stop;
  options.stop_token_ids = stop_token_ids;
  options.template_arguments = template_arguments;
  return options;
}

}  // namespace oscar::cli
