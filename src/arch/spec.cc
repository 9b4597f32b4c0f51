#include "arch/spec.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/error_text.h"

namespace oscar {
namespace {

struct Architecture {
  std::string_view model_type;
  Result<ModelSpec> (*make)(const ModelConfig&);
  bool rotates_part = false;  // has a partial_rotary_factor
};
constexpr std::array kArchitectures = {
    Architecture{"qwen3", MakeQwen3Spec},
    Architecture{"llama", MakeLlamaSpec},
    Architecture{"qwen2", MakeQwen2Spec},
    Architecture{"mistral", MakeMistralSpec},
    Architecture{"qwen3_moe", MakeQwen3MoeSpec},
    Architecture{"glm4_moe", MakeGlm4MoeSpec, /*rotates_part=*/true},
    Architecture{"minimax_m2", MakeMiniMaxM2Spec, /*rotates_part=*/true},
    Architecture{"qwen3_next", MakeQwen3NextSpec, /*rotates_part=*/true},
    Architecture{"qwen3_5", MakeQwen35Spec, /*rotates_part=*/true},
    Architecture{"qwen3_5_moe", MakeQwen35Spec, /*rotates_part=*/true},
    Architecture{"gpt_oss", MakeGptOssSpec},
};

// Families that are known and not supported: why, by how their model_type begins.
struct Refused {
  std::string_view prefix, why;
};
constexpr std::array kRefused = {
    Refused{"gemma", "sliding windows and norms around every block"},
    Refused{"deepseek", "latent attention (MLA) or another router"},
    Refused{"kimi", "latent attention (MLA)"},
    Refused{"glm4_moe_lite", "latent attention (MLA)"},
    Refused{"longcat", "latent attention (MLA)"},
    Refused{"mixtral", "another layout of experts"},
    Refused{"qwen2_moe", "a gated shared expert"},
    Refused{"llama4", "chunked attention"},
    Refused{"mistral3", "a multimodal model"},
    Refused{"ministral", "layers with sliding windows"},
    Refused{"phi", "fused projections"},
    Refused{"glm4", "norms around every block and fused projections"},
    Refused{"minimax", "lightning attention"},
};

std::string_view NameOf(Feature feature) {
  switch (feature) {
    case Feature::kPartialRope:
      return "RoPE on part of a head";
    case Feature::kQkNormAllHeads:
      return "a norm over all heads of q and k";
    case Feature::kSlidingWindow:
      return "attention with a sliding window";
    case Feature::kSinks:
      return "attention sinks";
    case Feature::kOutputGate:
      return "gated attention";
    case Feature::kExperts:
      return "experts";
    case Feature::kLinearAttention:
      return "linear attention (Gated DeltaNet)";
    case Feature::kSharedShare:
      return "a shared expert with a gate";
    case Feature::kClampedExperts:
      return "experts with biases and clamped gates";
  }
  return "";
}

}  // namespace

std::vector<int> ModelSpec::kv_layers() const {
  std::vector<int> out;
  for (int i = 0; i < num_layers(); ++i) {
    if (layer(i).kv_slot >= 0) out.push_back(i);
  }
  return out;
}

std::vector<int> ModelSpec::history_layers() const {
  std::vector<int> out;
  for (const int i : kv_layers()) {
    if (layer(i).attention()->sliding_window == 0) out.push_back(i);
  }
  return out;
}

std::vector<bool> ModelSpec::slots_with_history() const {
  std::vector<bool> out;
  for (const int i : kv_layers()) out.push_back(layer(i).attention()->sliding_window == 0);
  return out;
}

int64_t ModelSpec::max_window() const {
  int64_t longest = 0;
  for (const LayerSpec& layer : layers) {
    if (layer.attention() != nullptr) {
      longest = std::max(longest, layer.attention()->sliding_window);
    }
  }
  return longest;
}

const AttentionSpec& ModelSpec::attention() const {
  for (const LayerSpec& layer : layers) {
    if (layer.attention() != nullptr) return *layer.attention();
  }
  OSCAR_CHECK(false, "no layer of the model has attention");
  std::abort();
}

const LinearAttentionSpec* ModelSpec::linear_attention() const {
  for (const LayerSpec& layer : layers) {
    if (layer.linear_attention() != nullptr) return layer.linear_attention();
  }
  return nullptr;
}

int ModelSpec::num_state_layers() const {
  return static_cast<int>(
      std::ranges::count_if(layers, [](const LayerSpec& layer) { return layer.state_slot >= 0; }));
}

uint64_t ModelSpec::state_bytes() const {
  const LinearAttentionSpec* linear = linear_attention();
  if (linear == nullptr) return 0;
  return static_cast<uint64_t>(num_state_layers()) * linear->state_bytes();
}

int ModelSpec::max_intermediate() const {
  int widest = 0;
  for (const LayerSpec& layer : layers) {
    widest = std::max(widest, layer.dense() != nullptr ? layer.dense()->intermediate
                                                       : layer.experts()->shared_intermediate);
  }
  return widest;
}

Status CheckFeatures(const ModelSpec& spec, std::initializer_list<Feature> supported,
                     std::string_view device) {
  Status status;
  const auto need = [&](bool has, Feature feature) {
    if (!has || !status.ok() || std::ranges::find(supported, feature) != supported.end()) return;
    status = Unimplemented(fmt::format("{}: {} is not computed on {} yet", spec.architecture,
                                       NameOf(feature), device));
  };
  for (const LayerSpec& layer : spec.layers) {
    if (const AttentionSpec* attention = layer.attention()) {
      need(attention->rotary_dims < attention->head_dim, Feature::kPartialRope);
      need(attention->qk_norm == QkNorm::kAllHeads, Feature::kQkNormAllHeads);
      need(attention->sliding_window > 0, Feature::kSlidingWindow);
      need(attention->has_sinks, Feature::kSinks);
      need(attention->has_output_gate, Feature::kOutputGate);
    }
    need(layer.linear_attention() != nullptr, Feature::kLinearAttention);
    need(layer.experts() != nullptr, Feature::kExperts);
    need(layer.experts() != nullptr && layer.experts()->has_shared_share, Feature::kSharedShare);
    need(layer.experts() != nullptr && (layer.experts()->has_biases || layer.experts()->clamped),
         Feature::kClampedExperts);
  }
  return status;
}

void SetLayers(const LayerSpec& layer, int count, ModelSpec* spec) {
  spec->layers.assign(static_cast<size_t>(count), layer);
  if (layer.attention() == nullptr) return;
  for (int i = 0; i < count; ++i) spec->layers[static_cast<size_t>(i)].kv_slot = i;
}

ModelSpec MakeCommonSpec(const ModelConfig& config) {
  ModelSpec spec;
  spec.architecture = config.model_type;
  spec.vocab_size = config.vocab_size;
  spec.hidden = config.hidden_size;
  spec.norm_eps = static_cast<float>(config.rms_norm_eps);
  spec.rope_theta = config.rope_theta;
  spec.rope_scaling = config.rope_scaling;
  spec.max_positions = config.max_position_embeddings;
  spec.stop_tokens.assign(config.eos_token_ids.begin(), config.eos_token_ids.end());
  spec.tied_head = config.tie_word_embeddings;
  AttentionSpec attention;
  attention.num_heads = config.num_attention_heads;
  attention.num_kv_heads = config.num_kv_heads;
  attention.head_dim = config.head_dim;
  attention.rotary_dims = config.rotary_dim;
  attention.qkv_bias = attention.o_bias = config.attention_bias;
  attention.softmax_scale = 1.0 / std::sqrt(static_cast<double>(config.head_dim));
  SetLayers({attention, DenseSpec{config.intermediate_size}}, config.num_layers, &spec);

  const std::string layer = "model.layers.{}.", mixer = layer + "self_attn.", mlp = layer + "mlp.";
  spec.name(Role::kEmbedding) = "model.embed_tokens.weight";
  spec.name(Role::kFinalNorm) = "model.norm.weight";
  spec.name(Role::kHead) = "lm_head.weight";
  spec.name(Role::kAttentionNorm) = layer + "input_layernorm.weight";
  spec.name(Role::kFeedForwardNorm) = layer + "post_attention_layernorm.weight";
  spec.name(Role::kQ) = mixer + "q_proj.weight";
  spec.name(Role::kK) = mixer + "k_proj.weight";
  spec.name(Role::kV) = mixer + "v_proj.weight";
  spec.name(Role::kO) = mixer + "o_proj.weight";
  spec.name(Role::kQBias) = mixer + "q_proj.bias";
  spec.name(Role::kKBias) = mixer + "k_proj.bias";
  spec.name(Role::kVBias) = mixer + "v_proj.bias";
  spec.name(Role::kOBias) = mixer + "o_proj.bias";
  spec.name(Role::kQNorm) = mixer + "q_norm.weight";
  spec.name(Role::kKNorm) = mixer + "k_norm.weight";
  spec.name(Role::kGate) = mlp + "gate_proj.weight";
  spec.name(Role::kUp) = mlp + "up_proj.weight";
  spec.name(Role::kDown) = mlp + "down_proj.weight";
  return spec;
}

Result<ExpertsSpec> MakeExpertsSpec(const ModelConfig& config) {
  const ExpertsConfig& from = config.experts;
  if (from.count == 0 || from.per_token == 0) {
    return Unexpected(DataLoss(fmt::format(
        "config.json: {} is a mixture of experts, but {} is missing or 0", config.model_type,
        from.count == 0 ? "the number of experts" : "num_experts_per_tok")));
  }
  ExpertsSpec experts;
  experts.num_experts = from.count;
  experts.experts_per_token = from.per_token;
  experts.intermediate = from.intermediate_size;
  experts.groups = from.groups;
  experts.chosen_groups = from.chosen_groups;
  if (from.groups > 1 && from.count / from.groups < 2) {
    return Unexpected(
        DataLoss(fmt::format("config.json: n_group: {} groups of {} experts: a group needs two",
                             from.groups, from.count)));
  }
  experts.normalize_weights = from.normalize_weights;
  experts.weight_scale = static_cast<float>(from.weight_scale);
  return experts;
}

void NameExperts(std::string_view block, ModelSpec* spec) {
  const std::string layer = fmt::format("model.layers.{{}}.{}.", block);
  spec->name(Role::kRouter) = layer + "gate.weight";
  spec->name(Role::kExpertGate) = layer + "experts.{}.gate_proj.weight";
  spec->name(Role::kExpertUp) = layer + "experts.{}.up_proj.weight";
  spec->name(Role::kExpertDown) = layer + "experts.{}.down_proj.weight";
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
          "supported; --max-model-len {} stays within the window",
          config.sliding_window, config.max_position_embeddings, config.sliding_window)));
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
    if (config.rotary_dim != config.head_dim && !architecture.rotates_part) {
      return Unexpected(Unimplemented(fmt::format(
          "config.json: partial_rotary_factor: {} rotates all {} dimensions of a head, not {}",
          config.model_type, config.head_dim, config.rotary_dim)));
    }
    return architecture.make(config);
  }
  std::string known;
  for (const Architecture& architecture : kArchitectures) {
    known += fmt::format("{}{}", known.empty() ? "" : ", ", architecture.model_type);
  }
  std::string why;
  for (const Refused& refused : kRefused) {
    if (why.empty() && config.model_type.starts_with(refused.prefix)) {
      why = fmt::format(" ({})", refused.why);
    }
  }
  return Unexpected(Unimplemented(
      fmt::format("config.json: model_type \"{}\" is not supported{}; supported are: {}",
                  config.model_type, why, known)));
}

}  // namespace oscar
