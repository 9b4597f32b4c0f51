// gpt-oss (20b, 120b): biases on q, k, v and o, a learned sink per head, every other layer sees a
// sliding window, experts with biases, whose gates are clamped, in every layer.
#include "arch/spec.h"

namespace oscar {

Result<ModelSpec> MakeGptOssSpec(const ModelConfig& config) {
  ModelSpec spec = MakeCommonSpec(config);
  OSCAR_ASSIGN_OR_RETURN(ExpertsSpec experts, MakeExpertsSpec(config));
  // A softmax over the chosen logits alone is that over all, divided by the sum of the chosen.
  experts.normalize_weights = true;
  experts.has_biases = experts.alternates_gate_up = true;
  constexpr float kSlope = 1.702f;  // not in the config
  experts.clamped = ClampedGate{static_cast<float>(config.experts.swiglu_limit), kSlope};
  for (int i = 0; i < spec.num_layers(); ++i) {
    LayerSpec& layer = spec.layers[static_cast<size_t>(i)];
    auto& attention = std::get<AttentionSpec>(layer.mixer);
    attention.has_sinks = true;
    const auto index = static_cast<size_t>(i);
    const bool slides = index < config.sliding_layers.size() && config.sliding_layers[index];
    attention.sliding_window = slides ? config.layer_window : 0;
    layer.feed_forward = experts;
  }
  if (spec.history_layers().empty()) {
    return Unexpected(
        Unimplemented("config.json: layer_types: a model in which every layer has a sliding window "
                      "is not supported"));
  }
  const std::string layer = "model.layers.{}.", mlp = layer + "mlp.";
  spec.name(Role::kSinks) = layer + "self_attn.sinks";
  spec.name(Role::kRouter) = mlp + "router.weight";
  spec.name(Role::kRouterLogitBias) = mlp + "router.bias";
  // Parts of tensors of all experts (weights/expert_names.h).
  spec.name(Role::kExpertGateUp) = mlp + "experts.{}.gate_up_proj";
  spec.name(Role::kExpertGateUpBias) = mlp + "experts.{}.gate_up_proj_bias";
  spec.name(Role::kExpertDown) = mlp + "experts.{}.down_proj";
  spec.name(Role::kExpertDownBias) = mlp + "experts.{}.down_proj_bias";
  return spec;
}

}  // namespace oscar
