// What Qwen3-Next and Qwen3.5 have in common: most layers are Gated DeltaNet, every fourth is gated
// attention with RoPE on part of a head; norms are stored around 0; experts have a shared one
// beside them that is added as far as its gate says.
#include <fmt/core.h>

#include <algorithm>

#include "arch/spec.h"
#include "base/error_text.h"

namespace oscar {

Result<ModelSpec> MakeHybridSpec(const ModelConfig& config) {
  const LinearAttentionConfig& from = config.linear;
  const auto refuse = [](std::string_view field, std::string_view value, std::string_view what) {
    return Unexpected(Unimplemented(
        fmt::format("config.json: {} {}: only {} is supported", field, Quote(value), what)));
  };
  if (!from.output_gate.empty() && from.output_gate != "swish" && from.output_gate != "silu") {
    return refuse("output_gate_type", from.output_gate, "swish");
  }
  if (!from.state_dtype.empty() && from.state_dtype != "float32") {
    return refuse("mamba_ssm_dtype", from.state_dtype, "float32");
  }
  if (config.attention_bias) {
    return Unexpected(Unimplemented(
        fmt::format("config.json: attention_bias: gated attention with biases is not supported")));
  }
  if (from.layers.size() == static_cast<size_t>(config.num_layers)) {
    return Unexpected(Unimplemented(
        "config.json: layer_types: no layer has full attention, hence there is no KV cache"));
  }
  ModelSpec spec = MakeCommonSpec(config);
  spec.norm_offset = 1.0f;
  LinearAttentionSpec linear;
  linear.key_heads = from.key_heads;
  linear.value_heads = from.value_heads;
  linear.key_dim = from.key_dim;
  linear.value_dim = from.value_dim;
  linear.conv_kernel = from.conv_kernel;
  linear.grouped_inputs = config.model_type == "qwen3_next";
  int kv_slot = 0, state_slot = 0;
  for (int i = 0; i < spec.num_layers(); ++i) {
    LayerSpec& layer = spec.layers[static_cast<size_t>(i)];
    if (std::ranges::find(from.layers, i) != from.layers.end()) {
      layer.mixer = linear;
      layer.kv_slot = -1;
      layer.state_slot = state_slot++;
    } else {
      auto& attention = std::get<AttentionSpec>(layer.mixer);
      attention.qk_norm = QkNorm::kPerHead;
      attention.has_output_gate = config.has_output_gate;
      layer.kv_slot = kv_slot++;
    }
  }
  const std::string mixer = "model.layers.{}.linear_attn.";
  spec.name(Role::kQNorm) = "model.layers.{}.self_attn.q_norm.weight";
  spec.name(Role::kKNorm) = "model.layers.{}.self_attn.k_norm.weight";
  spec.name(Role::kStateQkv) = mixer + "in_proj_qkv.weight";
  spec.name(Role::kStateZ) = mixer + "in_proj_z.weight";
  spec.name(Role::kStateB) = mixer + "in_proj_b.weight";
  spec.name(Role::kStateA) = mixer + "in_proj_a.weight";
  spec.name(Role::kStateQkvz) = mixer + "in_proj_qkvz.weight";
  spec.name(Role::kStateBa) = mixer + "in_proj_ba.weight";
  spec.name(Role::kStateConv) = mixer + "conv1d.weight";
  spec.name(Role::kStateDecay) = mixer + "A_log";
  spec.name(Role::kStateStepBias) = mixer + "dt_bias";
  spec.name(Role::kStateNorm) = mixer + "norm.weight";
  spec.name(Role::kStateOut) = mixer + "out_proj.weight";
  return spec;
}

Status AddHybridExperts(const ModelConfig& config, ModelSpec* spec) {
  OSCAR_ASSIGN_OR_RETURN(ExpertsSpec experts, MakeExpertsSpec(config));
  experts.shared_intermediate = config.experts.shared_intermediate;
  experts.has_shared_share = experts.shared_intermediate > 0;
  NameExperts("mlp", spec);
  const std::string mlp = "model.layers.{}.mlp.";
  spec->name(Role::kSharedGate) = mlp + "shared_expert.gate_proj.weight";
  spec->name(Role::kSharedUp) = mlp + "shared_expert.up_proj.weight";
  spec->name(Role::kSharedDown) = mlp + "shared_expert.down_proj.weight";
  spec->name(Role::kSharedShare) = mlp + "shared_expert_gate.weight";
  const std::vector<int>& dense = config.experts.dense_layers;
  for (int i = 0; i < spec->num_layers(); ++i) {
    if (std::ranges::find(dense, i) != dense.end()) continue;
    if ((i + 1) % config.experts.sparse_step != 0) continue;
    spec->layers[static_cast<size_t>(i)].feed_forward = experts;
  }
  return {};
}

}  // namespace oscar
