// The options of every command that loads a model, declared once.
#pragma once

#include <string>

#include "oscar/options.h"

namespace CLI {
class App;
}

namespace oscar::cli {

struct ModelArguments {
  ModelOptions options;
};
void AddModelOptions(CLI::App& command, ModelArguments& arguments);

// Unset options keep the model's own defaults.
struct SamplingArguments {
  std::optional<float> temperature, top_p, min_p, repetition_penalty, presence_penalty,
      frequency_penalty;
  std::optional<int> top_k;
  std::optional<uint64_t> seed;
  SamplingOptions Apply(SamplingOptions defaults) const;
};
void AddSamplingOptions(CLI::App& command, SamplingArguments& arguments);

}  // namespace oscar::cli
