#include "arch/spec.h"

#include <fmt/core.h>

#include <array>

#include "base/error_text.h"

namespace oscar {
namespace {

struct Architecture {
  std::string_view model_type;
  Result<ModelSpec> (*make)(const ModelConfig&);
};
constexpr std::array kArchitectures = {
    Architecture{"qwen3", MakeQwen3Spec},
    Architecture{"llama", MakeLlamaSpec},
};

}  // namespace

uint64_t ModelSpec::num_parameters() const {
  const auto h = static_cast<uint64_t>(hidden), d = static_cast<uint64_t>(head_dim);
  const uint64_t attention = h * d * static_cast<uint64_t>(2 * num_heads + 2 * num_kv_heads);
  const uint64_t feed_forward = 3 * h * static_cast<uint64_t>(intermediate);
  const uint64_t tables = names.head.empty() ? 1 : 2;
  return static_cast<uint64_t>(num_layers) * (attention + feed_forward + 2 * h) +
         tables * h * static_cast<uint64_t>(vocab_size) + h;
}

uint64_t ModelSpec::Fp8WeightBytes(bool rotates_v) const {
  const auto h = static_cast<uint64_t>(hidden), layers = static_cast<uint64_t>(num_layers);
  const uint64_t values_and_outputs =
      h * static_cast<uint64_t>(head_dim) * static_cast<uint64_t>(num_heads + num_kv_heads);
  const uint64_t tables =
      (names.head.empty() ? 1 : 2) * h * static_cast<uint64_t>(vocab_size) + h + 2 * h * layers;
  return num_parameters() + tables + (rotates_v ? layers * values_and_outputs : 0);
}

ModelSpec MakeCommonSpec(const ModelConfig& config) {
  ModelSpec spec;
  spec.architecture = config.model_type;
  spec.vocab_size = config.vocab_size;
  spec.hidden = config.hidden_size;
  spec.intermediate = config.intermediate_size;
  spec.num_layers = config.num_layers;
  spec.num_heads = config.num_attention_heads;
  spec.num_kv_heads = config.num_kv_heads;
  spec.head_dim = config.head_dim;
  spec.norm_eps = static_cast<float>(config.rms_norm_eps);
  spec.rope_theta = config.rope_theta;
  spec.rope_scaling = config.rope_scaling;
  spec.max_positions = config.max_position_embeddings;
  spec.stop_tokens.assign(config.eos_token_ids.begin(), config.eos_token_ids.end());
  const std::string attention = "model.layers.{}.self_attn.";
  const std::string feed_forward = "model.layers.{}.mlp.";
  TensorNames& names = spec.names;
  names.embedding = "model.embed_tokens.weight";
  names.final_norm = "model.norm.weight";
  (config.tie_word_embeddings ? names.tied_head : names.head) = "lm_head.weight";
  names.attention_norm = "model.layers.{}.input_layernorm.weight";
  names.feed_forward_norm = "model.layers.{}.post_attention_layernorm.weight";
  names.q = attention + "q_proj.weight";
  names.k = attention + "k_proj.weight";
  names.v = attention + "v_proj.weight";
  names.o = attention + "o_proj.weight";
  if (config.attention_bias) {
    names.q_bias = attention + "q_proj.bias";
    names.k_bias = attention + "k_proj.bias";
    names.v_bias = attention + "v_proj.bias";
    names.o_bias = attention + "o_proj.bias";
  }
  names.gate = feed_forward + "gate_proj.weight";
  names.up = feed_forward + "up_proj.weight";
  names.down = feed_forward + "down_proj.weight";
  return spec;
}

Result<ModelSpec> MakeModelSpec(const ModelConfig& config) {
  for (const Architecture& architecture : kArchitectures) {
    if (architecture.model_type != config.model_type) continue;
    if (config.hidden_act != "silu") {
      return Unexpected(Unimplemented(fmt::format(
          "config.json: hidden_act \"{}\": only silu is supported", config.hidden_act)));
    }
    if (config.sliding_window > 0 && config.sliding_window < config.max_position_embeddings) {
      return Unexpected(Unimplemented(fmt::format(
          "config.json: sliding_window: {}: layers that see less than the context of {} are not "
          "supported",
          config.sliding_window, config.max_position_embeddings)));
    }
    if (!config.other_layer_type.empty()) {
      return Unexpected(Unimplemented(
          fmt::format("config.json: layer_types has {}: only full_attention is supported",
                      Quote(config.other_layer_type))));
    }
    if (config.mlp_bias) {
      return Unexpected(Unimplemented(
          "config.json: mlp_bias: feed-forward layers with a bias are not supported"));
    }
    if (config.rotary_dim != config.head_dim) {
      return Unexpected(Unimplemented(fmt::format(
          "config.json: partial_rotary_factor: rotating {} of a head's {} dimensions is not "
          "supported",
          config.rotary_dim, config.head_dim)));
    }
    return architecture.make(config);
  }
  std::string known;
  for (const Architecture& architecture : kArchitectures) {
    known += fmt::format("{}{}", known.empty() ? "" : ", ", architecture.model_type);
  }
  return Unexpected(Unimplemented(
      fmt::format("config.json: model_type \"{}\" is not supported; supported are: {}",
                  config.model_type, known)));
}

}  // namespace oscar
