// HostedModel: a model directory behind the batching engine: its text side, its weights, and the
// engine that runs it. In two steps, because weights may take minutes: Prepare reads and checks
// everything else. One owner; the engine may be used from any thread once loaded.
#pragma once

#include <memory>
#include <optional>

#include "dialogue/dialogue.h"
#include "engine/loaded_model.h"
#include "engine/service.h"

namespace oscar {

class HostedModel {
 public:
  static Result<std::unique_ptr<HostedModel>> Prepare(const ModelOptions& model,
                                                      const DialogueOptions& dialogue,
                                                      const EngineServiceOptions& engine);
  // Reads the weights and starts the engine. Call once.
  Status Load();

  const Dialogue& dialogue() const { return *dialogue_; }
  // After Load.
  LoadedModel& loaded() { return *loaded_; }
  EngineService& engine() { return *engine_; }
  const EngineServiceOptions& engine_options() const { return engine_options_; }

 private:
  HostedModel() = default;
  ModelOptions model_options_;
  EngineServiceOptions engine_options_;
  std::optional<Dialogue> dialogue_;
  std::unique_ptr<LoadedModel> loaded_;
  std::unique_ptr<EngineService> engine_;  // after what it uses
};

}  // namespace oscar
