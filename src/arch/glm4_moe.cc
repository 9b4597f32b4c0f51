// GLM-4.5, 4.6, 4.7: biases on q, k and v by the config, a norm per head of q and k by the config,
// RoPE on half of a head; after some dense layers, experts behind a sigmoid router beside a shared
// one. Layers past the last one predict further tokens and are not read.
#include <fmt/core.h>

#include "arch/spec.h"

namespace oscar {

Result<ModelSpec> MakeGlm4MoeSpec(const ModelConfig& config) {
  ModelSpec spec = MakeCommonSpec(config);
  OSCAR_ASSIGN_OR_RETURN(ExpertsSpec experts, MakeExpertsSpec(config));
  experts.score = RouterScore::kSigmoid;
  experts.choice_bias = true;
  const int64_t shared =
      static_cast<int64_t>(config.experts.shared_count) * config.experts.intermediate_size;
  if (shared > (int64_t{1} << 24)) {
    return Unexpected(
        DataLoss(fmt::format("config.json: n_shared_experts: {} of width {}",
                             config.experts.shared_count, config.experts.intermediate_size)));
  }
  experts.shared_intermediate = static_cast<int>(shared);
  NameExperts("mlp", &spec);
  const std::string mlp = "model.layers.{}.mlp.";
  spec.name(Role::kRouterBias) = mlp + "gate.e_score_correction_bias";
  spec.name(Role::kSharedGate) = mlp + "shared_experts.gate_proj.weight";
  spec.name(Role::kSharedUp) = mlp + "shared_experts.up_proj.weight";
  spec.name(Role::kSharedDown) = mlp + "shared_experts.down_proj.weight";
  for (int i = 0; i < spec.num_layers(); ++i) {
    LayerSpec& layer = spec.layers[static_cast<size_t>(i)];
    auto& attention = std::get<AttentionSpec>(layer.mixer);
    attention.o_bias = false;
    if (config.use_qk_norm.value_or(false)) attention.qk_norm = QkNorm::kPerHead;
    if (i >= config.experts.first_dense_layers) layer.feed_forward = experts;
  }
  return spec;
}

}  // namespace oscar
