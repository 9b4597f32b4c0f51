// The options of every command that loads a model, declared once.
#pragma once

#include <string>
#include <vector>

#include "io/hub_cache.h"
#include "oscar/options.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace oscar::cli {

struct ModelArguments {
  ModelOptions options;
  // Options that are about tokens which leave BF16. The command line's, which outlives this.
  std::vector<const CLI::Option*> history;
  bool offline = false;
  // Finds the model, downloading what the command needs of it; then it is a path. Call it once
  // everything else about the command line is known to be right. Random weights need no shards.
  Status Obtain(ModelParts parts);
  // For commands with one cache method: names an option that was given and cannot matter.
  Status Check() const;
};
// Of --bits, which `oscar eval` takes several of.
inline constexpr char kBitsHelp[] =
    "History bits per K/V element of oscar+, 2.25 to 4.25; heads that lose most to 2 bits get more";
void AddModelOptions(CLI::App& command, ModelArguments& arguments);
// --offline, for commands that take a name without the other options.
CLI::Option* AddOfflineFlag(CLI::App& command, bool& offline);

// Unset options keep the model's own defaults.
struct SamplingArguments {
  std::optional<float> temperature, top_p, min_p, repetition_penalty, presence_penalty,
      frequency_penalty;
  std::optional<int> top_k;  // -1 is 0
  std::optional<uint64_t> seed;
  SamplingOptions Apply(SamplingOptions defaults) const;
};
// Ranges are those of SamplingOptions::Validate, told before a model is loaded. `defaults` says in
// help where those of unset options come from.
void AddSamplingOptions(CLI::App& command, SamplingArguments& arguments,
                        const char* defaults = "come from the model's generation_config.json");

// What chat and generate ask of an answer.
struct AnswerArguments {
  SamplingArguments sampling;
  std::optional<int64_t> max_tokens;
  std::vector<std::string> stop;
  std::vector<int32_t> stop_token_ids;
  std::string template_arguments;
  // Told before a model is loaded.
  Status Check() const;
  CompletionOptions Apply(const SamplingOptions& defaults) const;
};
void AddAnswerOptions(CLI::App& command, AnswerArguments& arguments);

}  // namespace oscar::cli
