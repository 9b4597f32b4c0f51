#include "runtime/hosted_model.h"

#include <algorithm>

namespace oscar {
namespace {

// A GPU reads weights at the speed of some hundred tokens; more in a pass costs little more.
constexpr int kCudaStepTokens = 2048;

}  // namespace

Result<std::unique_ptr<HostedModel>> HostedModel::Prepare(const ModelOptions& model,
                                                          const DialogueOptions& dialogue,
                                                          const EngineServiceOptions& engine) {
  std::unique_ptr<HostedModel> host(new HostedModel);
  host->model_options_ = model;
  host->model_options_.max_sequences = engine.max_running;
  host->engine_options_ = engine;
  OSCAR_ASSIGN_OR_RETURN(const auto planned, LoadedModel::Plan(host->model_options_));
  OSCAR_ASSIGN_OR_RETURN(host->dialogue_,
                         Dialogue::Load(planned->directory(), planned->config(), dialogue));
  return host;
}

Status HostedModel::Load() {
  OSCAR_ASSIGN_OR_RETURN(loaded_, LoadedModel::Load(model_options_));
  if (loaded_->device() == Device::kCuda) {
    engine_options_.step_tokens = std::max(engine_options_.step_tokens, kCudaStepTokens);
  }
  engine_options_.max_context = loaded_->max_context();
  engine_ =
      MakeEngineService(loaded_->model(), loaded_->pool(), loaded_->threads(), engine_options_);
  return {};
}

}  // namespace oscar
