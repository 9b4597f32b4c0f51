// ModelHost: a model directory made ready to serve. Owns everything that the ServedModel it hands
// out points to.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "generation/served_model.h"
#include "runtime/hosted_model.h"

namespace oscar::server {

struct HostOptions {
  std::vector<std::string> names;  // empty: the directory's name
  DialogueOptions dialogue;
  RequestLimits limits;  // of single requests; vocabulary and defaults are the model's
  EngineServiceOptions engine;
  GrammarLimits grammar;
  std::string grammar_worker;  // GrammarCompilerOptions::worker
};

class ModelHost {
 public:
  // Checks options, config, tokenizer and template, so that their errors come at once.
  static Result<std::unique_ptr<ModelHost>> Prepare(const ModelOptions& load,
                                                    const HostOptions& options);
  // Reads the weights and starts the engine. Call once.
  Result<std::shared_ptr<const ServedModel>> Load();

 private:
  explicit ModelHost(const HostOptions& options) : options_(options) {}
  const HostOptions options_;
  std::unique_ptr<HostedModel> hosted_;
  std::unique_ptr<GrammarCompiler> grammars_;
};

}  // namespace oscar::server
