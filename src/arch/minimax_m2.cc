// MiniMax-M2, M2.5, M2.7: one norm over all heads of q and one over those of k, RoPE on part of a
// head, experts behind a sigmoid router in every layer.
#include <fmt/core.h>

#include "arch/spec.h"
#include "base/error_text.h"

namespace oscar {

Result<ModelSpec> MakeMiniMaxM2Spec(const ModelConfig& config) {
  const auto refuse = [](std::string_view what) {
    return Unexpected(Unimplemented(fmt::format("config.json: {}", what)));
  };
  if (config.attention_bias) return refuse("attention_bias: minimax_m2 has no biases");
  if (!config.qk_norm_type.empty() && config.qk_norm_type != "per_layer") {
    return refuse(
        fmt::format("qk_norm_type {}: only per_layer is supported", Quote(config.qk_norm_type)));
  }
  if (!config.experts.scoring.empty() && config.experts.scoring != "sigmoid") {
    return refuse(
        fmt::format("scoring_func {}: only sigmoid is supported", Quote(config.experts.scoring)));
  }
  if (config.experts.shared_intermediate > 0) {
    return refuse("shared_intermediate_size: minimax_m2 with a shared expert is not supported");
  }
  ModelSpec spec = MakeCommonSpec(config);
  OSCAR_ASSIGN_OR_RETURN(ExpertsSpec experts, MakeExpertsSpec(config));
  experts.score = RouterScore::kSigmoid;
  experts.choice_bias = config.experts.choice_bias;
  experts.normalize_weights = true;
  NameExperts("block_sparse_moe", &spec);
  const std::string block = "model.layers.{}.block_sparse_moe.";
  spec.name(Role::kRouterBias) = block + "e_score_correction_bias";
  spec.name(Role::kExpertGate) = block + "experts.{}.w1.weight";
  spec.name(Role::kExpertUp) = block + "experts.{}.w3.weight";
  spec.name(Role::kExpertDown) = block + "experts.{}.w2.weight";
  for (LayerSpec& layer : spec.layers) {
    if (config.use_qk_norm.value_or(true)) {
      std::get<AttentionSpec>(layer.mixer).qk_norm = QkNorm::kAllHeads;
    }
    layer.feed_forward = experts;
  }
  constexpr int32_t kEndOfTurn = 200020;  // published configs leave it to their generation_config
  if (spec.stop_tokens.empty() && spec.vocab_size > kEndOfTurn) spec.stop_tokens = {kEndOfTurn};
  return spec;
}

}  // namespace oscar
