// ModelHost: a model directory made ready to serve: the loaded model, its tokenizer and template,
// and the engine that runs it. Owns everything that the ServedModel it hands out points to.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/loaded_model.h"
#include "engine/service.h"
#include "generation/served_model.h"
#include "text/chat.h"
#include "text/tokenizer.h"

namespace oscar::server {

struct HostOptions {
  std::vector<std::string> names;       // empty: the directory's name
  std::filesystem::path chat_template;  // a Jinja file instead of the model's own; empty: none
  bool use_generation_config = true;    // sampling defaults of the model
  RequestLimits limits;  // of single requests; vocabulary and defaults are the model's
  EngineServiceOptions engine;
};

class ModelHost {
 public:
  static Result<std::unique_ptr<ModelHost>> Load(const ModelOptions& load,
                                                 const HostOptions& options);
  const std::shared_ptr<const ServedModel>& served() const { return served_; }
  EngineService& engine() { return *engine_; }

 private:
  ModelHost() = default;
  std::unique_ptr<LoadedModel> loaded_;
  std::optional<Tokenizer> tokenizer_;
  std::optional<ChatTemplate> chat_;
  std::unique_ptr<EngineService> engine_;  // after what it uses
  std::shared_ptr<const ServedModel> served_;
};

}  // namespace oscar::server
