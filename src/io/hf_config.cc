#include "io/hf_config.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/error_text.h"
#include "base/file.h"
#include "base/json.h"

namespace oscar {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kGenerationName = "generation_config.json";
constexpr uint64_t kMaxConfigBytes = 16 << 20;

// Bounds far above any model, chosen so that the bytes of a full cache (4 x positions x layers x
// heads x head_dim) and of all weights (layers x experts x width x width) fit 63 bits.
constexpr int kMaxVocab = 1 << 24;
constexpr int kMaxWidth = 1 << 20;
constexpr int kMaxLayers = 1 << 10;
constexpr int kMaxHeads = 1 << 12;
constexpr int kMaxHeadDim = 1 << 12;
constexpr int kMaxPositions = 1 << 26;
constexpr int kMaxStateDim = 1 << 10;  // of a head of linear attention, keys or values
constexpr int kMaxExperts = 1 << 12;
constexpr int kMaxExpertsOfAllLayers = 1 << 18;  // whose tensors are listed
constexpr double kMaxTheta = 1e12;
constexpr double kMaxFactor = 1e6;

// Typed access to one JSON object. The first failure is kept, with the file and the field, and
// later reads return defaults, so that a parser reads straight through and checks once.
class Fields {
 public:
  Fields(const Json& object, std::string prefix, Status* status)
      : object_(object), prefix_(std::move(prefix)), status_(status) {}

  // Null where the key is absent or its value is null: configs write both for "unset".
  const Json* Find(const char* key) const {
    const auto at = object_.find(key);
    return at == object_.end() || at->is_null() ? nullptr : &*at;
  }

  // Where "unset" and null are not the same.
  bool Has(const char* key) const { return object_.contains(key); }

  void Fail(std::string_view key, std::string_view message) const {
    if (status_->ok()) *status_ = DataLoss(fmt::format("{}{}: {}", prefix_, key, message));
  }
  void FailUnsupported(std::string_view key, std::string_view message) const {
    if (status_->ok()) *status_ = Unimplemented(fmt::format("{}{}: {}", prefix_, key, message));
  }

  std::optional<int> Int(const char* key, int low, int high) const {
    const Json* value = Find(key);
    if (value == nullptr) return std::nullopt;
    return IntOf(*value, key, low, high);
  }
  int RequiredInt(const char* key, int low, int high) const {
    if (Find(key) == nullptr) Fail(key, "missing");
    return Int(key, low, high).value_or(low);
  }

  std::optional<double> Real(const char* key, double low, double high) const {
    const Json* value = Find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number()) {
      Fail(key, "must be a number");
      return std::nullopt;
    }
    const double number = value->get<double>();
    if (!(number >= low && number <= high)) {
      Fail(key, fmt::format("{} is not between {} and {}", number, low, high));
      return std::nullopt;
    }
    return number;
  }
  double RequiredReal(const char* key, double low, double high) const {
    if (Find(key) == nullptr) Fail(key, "missing");
    return Real(key, low, high).value_or(low);
  }

  std::optional<bool> Bool(const char* key) const {
    const Json* value = Find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_boolean()) {
      Fail(key, "must be true or false");
      return std::nullopt;
    }
    return value->get<bool>();
  }

  std::optional<std::string> Text(const char* key) const {
    const Json* value = Find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_string()) {
      Fail(key, "must be a string");
      return std::nullopt;
    }
    return value->get<std::string>();
  }

  std::vector<int> Ints(const char* key, int low, int high) const {
    std::vector<int> out;
    const Json* value = Find(key);
    if (value == nullptr) return out;
    if (!value->is_array() || value->size() > static_cast<size_t>(kMaxLayers)) {
      Fail(key, fmt::format("must be a list of at most {} integers", kMaxLayers));
      return out;
    }
    for (const Json& item : *value) out.push_back(IntOf(item, key, low, high).value_or(low));
    return out;
  }

  // One id or a list of them; -1, which some configs write for "none", is left out.
  std::vector<int32_t> TokenIds(const char* key, int vocab_size) const {
    std::vector<int32_t> ids;
    const Json* value = Find(key);
    if (value == nullptr) return ids;
    constexpr size_t kMaxIds = 1024;
    if (!value->is_array()) {
      if (*value == -1) return ids;
      if (const auto id = IntOf(*value, key, 0, vocab_size - 1)) ids.push_back(*id);
      return ids;
    }
    if (value->size() > kMaxIds) {
      Fail(key, fmt::format("{} ids, more than the limit of {}", value->size(), kMaxIds));
      return ids;
    }
    for (const Json& item : *value) {
      if (item == -1) continue;
      const auto id = IntOf(item, key, 0, vocab_size - 1);
      if (id && std::find(ids.begin(), ids.end(), *id) == ids.end()) ids.push_back(*id);
    }
    return ids;
  }

 private:
  std::optional<int> IntOf(const Json& value, std::string_view key, int low, int high) const {
    if (!value.is_number_integer()) {
      Fail(key, "must be an integer");
      return std::nullopt;
    }
    const bool fits =
        !value.is_number_unsigned() || value.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX);
    if (!fits || value.get<int64_t>() < low || value.get<int64_t>() > high) {
      Fail(key, fmt::format("{} is not between {} and {}", value.dump(), low, high));
      return std::nullopt;
    }
    return static_cast<int>(value.get<int64_t>());
  }

  const Json& object_;
  std::string prefix_;
  Status* status_;
};

// Qwen3-Next and Qwen3.5, whose layers are linear attention for the most part.
bool IsHybrid(const ModelConfig& config) {
  constexpr std::array kHybrids = {"qwen3_next", "qwen3_5", "qwen3_5_moe"};
  return std::ranges::find(kHybrids, config.model_type) != kHybrids.end();
}

Result<RopeScalingType> ScalingTypeOf(std::string_view text) {
  for (const RopeScalingType type : {RopeScalingType::kNone, RopeScalingType::kLinear,
                                     RopeScalingType::kLlama3, RopeScalingType::kYarn}) {
    if (text == NameOf(type)) return type;
  }
  if (text == "default") return RopeScalingType::kNone;
  return Unexpected(Unimplemented(fmt::format(
      "RoPE scaling type {} is not supported; supported are none, linear, llama3 and yarn",
      Quote(text))));
}

void ReadRopeScaling(const Fields& rope, ModelConfig* config) {
  const char* type_key = rope.Find("rope_type") != nullptr ? "rope_type" : "type";
  const auto type = ScalingTypeOf(rope.Text(type_key).value_or("default"));
  if (!type) {
    rope.FailUnsupported(type_key, type.error().message());
    return;
  }
  RopeScaling& scaling = config->rope_scaling;
  scaling.type = *type;
  if (scaling.type == RopeScalingType::kNone) return;
  scaling.factor = rope.RequiredReal("factor", 1, kMaxFactor);
  if (scaling.type == RopeScalingType::kLlama3) {
    scaling.original_max_position =
        rope.RequiredInt("original_max_position_embeddings", 1, kMaxPositions);
    scaling.low_freq_factor = rope.RequiredReal("low_freq_factor", 1e-6, kMaxFactor);
    scaling.high_freq_factor = rope.RequiredReal("high_freq_factor", 1e-6, kMaxFactor);
    if (scaling.high_freq_factor <= scaling.low_freq_factor) {
      rope.Fail("high_freq_factor", fmt::format("{} is not above low_freq_factor {}",
                                                scaling.high_freq_factor, scaling.low_freq_factor));
    }
  } else if (scaling.type == RopeScalingType::kYarn) {
    scaling.original_max_position = rope.Int("original_max_position_embeddings", 1, kMaxPositions)
                                        .value_or(config->max_position_embeddings);
    scaling.attention_factor = rope.Real("attention_factor", 1e-6, kMaxFactor).value_or(0);
    scaling.beta_fast = rope.Real("beta_fast", 1e-6, kMaxFactor).value_or(scaling.beta_fast);
    scaling.beta_slow = rope.Real("beta_slow", 1e-6, kMaxFactor).value_or(scaling.beta_slow);
    if (scaling.beta_fast <= scaling.beta_slow) {
      rope.Fail("beta_fast",
                fmt::format("{} is not above beta_slow {}", scaling.beta_fast, scaling.beta_slow));
    }
    for (const char* key : {"mscale", "mscale_all_dim"}) {
      if (rope.Find(key) != nullptr) rope.FailUnsupported(key, "is not supported");
    }
    scaling.truncate = rope.Bool("truncate").value_or(true);
  }
}

// Rotary settings stand at the top level and in rope_scaling, or all together in rope_parameters.
// Where a file has both, rope_scaling stands for the whole of rope_parameters unless it is empty:
// what its author added to a saved config, and what transformers makes of the two.
void ReadRope(const Fields& fields, std::string_view what, ModelConfig* config, Status* status) {
  static const Json kEmpty = Json::object();
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const Json* value = fields.Find(key);
    if (value != nullptr && !value->is_object()) {
      fields.Fail(key, "must be an object");
      return;
    }
  }
  const Json* scaling_json = fields.Find("rope_scaling");
  const bool by_scaling = scaling_json != nullptr && !scaling_json->empty();
  const char* rope_key = by_scaling ? "rope_scaling" : "rope_parameters";
  const Json* rope_json = fields.Find(rope_key);
  const Fields rope(rope_json != nullptr ? *rope_json : kEmpty,
                    fmt::format("{}: {}.", what, rope_key), status);
  const Fields& theta_home = rope.Find("rope_theta") != nullptr ? rope : fields;
  config->rope_theta = theta_home.Real("rope_theta", 1, kMaxTheta).value_or(10000);
  if (rope_json != nullptr) ReadRopeScaling(rope, config);

  const Fields& partial_home = rope.Find("partial_rotary_factor") != nullptr ? rope : fields;
  const double unstated = config->model_type == "glm4_moe" ? 0.5 : IsHybrid(*config) ? 0.25 : 1.0;
  const double factor = partial_home.Real("partial_rotary_factor", 1e-3, 1).value_or(unstated);
  config->rotary_dim = static_cast<int>(config->head_dim * factor);
  if (const auto dim = fields.Int("rotary_dim", 2, std::max(2, config->head_dim))) {
    config->rotary_dim = *dim;
  }
  config->partial_rotary_factor = static_cast<double>(config->rotary_dim) / config->head_dim;
  if (config->rotary_dim < 2 || config->rotary_dim % 2 != 0) {
    fields.Fail("head_dim", fmt::format("rotary embedding needs an even dimension, not {} of {}",
                                        config->rotary_dim, config->head_dim));
  }
}

void ReadExperts(const Fields& fields, ModelConfig* config) {
  ExpertsConfig& experts = config->experts;
  for (const char* key : {"num_experts", "num_local_experts", "n_routed_experts"}) {
    if (const auto count = fields.Int(key, 0, kMaxExperts)) experts.count = *count;
  }
  config->use_qk_norm = fields.Bool("use_qk_norm");
  config->qk_norm_type = fields.Text("qk_norm_type").value_or("");
  if (experts.count == 0) return;
  if (experts.count * config->num_layers > kMaxExpertsOfAllLayers) {
    fields.Fail("num_experts",
                fmt::format("{} in each of {} layers are more than the limit of {}", experts.count,
                            config->num_layers, kMaxExpertsOfAllLayers));
    return;
  }
  for (const char* key : {"num_experts_per_tok", "experts_per_token"}) {
    if (const auto count = fields.Int(key, 1, kMaxExperts)) experts.per_token = *count;
  }
  if (experts.per_token > experts.count) {
    fields.Fail("num_experts_per_tok",
                fmt::format("{} of {} experts", experts.per_token, experts.count));
  }
  experts.intermediate_size =
      fields.Int("moe_intermediate_size", 1, kMaxWidth).value_or(config->intermediate_size);
  experts.shared_count = fields.Int("n_shared_experts", 0, kMaxExperts).value_or(0);
  for (const char* key : {"shared_expert_intermediate_size", "shared_intermediate_size"}) {
    if (const auto width = fields.Int(key, 0, kMaxWidth)) experts.shared_intermediate = *width;
  }
  const bool is_glm = config->model_type == "glm4_moe";
  experts.normalize_weights = fields.Bool("norm_topk_prob").value_or(is_glm || IsHybrid(*config));
  experts.weight_scale = fields.Real("routed_scaling_factor", 1e-6, 1e6).value_or(1.0);
  experts.groups = fields.Int("n_group", 1, kMaxExperts).value_or(1);
  experts.chosen_groups = fields.Int("topk_group", 1, kMaxExperts).value_or(1);
  if (experts.count % experts.groups != 0) {
    fields.Fail("n_group", fmt::format("{} groups of {} experts", experts.groups, experts.count));
  } else if (experts.chosen_groups > experts.groups) {
    fields.Fail("topk_group",
                fmt::format("{} of {} groups", experts.chosen_groups, experts.groups));
  } else if (experts.count / experts.groups * experts.chosen_groups < experts.per_token) {
    fields.Fail("topk_group", fmt::format("{} groups of {} experts hold less than the {} to choose",
                                          experts.chosen_groups, experts.count / experts.groups,
                                          experts.per_token));
  }
  experts.scoring = fields.Text("scoring_func").value_or("");
  experts.choice_bias = fields.Bool("use_routing_bias").value_or(true);
  experts.first_dense_layers =
      fields.Int("first_k_dense_replace", 0, kMaxLayers).value_or(is_glm ? 1 : 0);
  experts.sparse_step = fields.Int("decoder_sparse_step", 1, kMaxLayers).value_or(1);
  experts.dense_layers = fields.Ints("mlp_only_layers", 0, kMaxLayers);
  experts.swiglu_limit = fields.Real("swiglu_limit", 1e-3, 1e6).value_or(7.0);
  experts.prediction_layers = fields.Int("num_nextn_predict_layers", 0, kMaxLayers).value_or(0);
}

// Which layers are linear attention: by name, or all but every so many.
void ReadLinearAttention(const Fields& fields, ModelConfig* config) {
  LinearAttentionConfig& linear = config->linear;
  constexpr int kMaxKernel = 16;
  linear.conv_kernel = fields.Int("linear_conv_kernel_dim", 2, kMaxKernel).value_or(4);
  linear.key_heads = fields.Int("linear_num_key_heads", 1, kMaxHeads).value_or(16);
  linear.value_heads = fields.Int("linear_num_value_heads", 1, kMaxHeads).value_or(32);
  linear.key_dim = fields.Int("linear_key_head_dim", 1, kMaxStateDim).value_or(128);
  linear.value_dim = fields.Int("linear_value_head_dim", 1, kMaxStateDim).value_or(128);
  if (linear.value_heads % linear.key_heads != 0) {
    fields.Fail("linear_num_value_heads",
                fmt::format("{} is not a multiple of linear_num_key_heads {}", linear.value_heads,
                            linear.key_heads));
  }
  linear.output_gate = fields.Text("output_gate_type").value_or("");
  linear.state_dtype = fields.Text("mamba_ssm_dtype").value_or("");
  config->has_output_gate = fields.Bool("attn_output_gate").value_or(true);
  const Json* types = fields.Find("layer_types");
  const int interval = fields.Int("full_attention_interval", 1, kMaxLayers).value_or(4);
  for (int i = 0; i < config->num_layers; ++i) {
    const bool is_linear = types == nullptr
                               ? (i + 1) % interval != 0
                               : types->is_array() && std::cmp_less(i, types->size()) &&
                                     (*types)[static_cast<size_t>(i)] == "linear_attention";
    if (is_linear) linear.layers.push_back(i);
  }
}

void ReadShape(const Fields& fields, ModelConfig* config) {
  if (!config->is_nested && fields.Find("text_config") != nullptr &&
      fields.Find("hidden_size") == nullptr) {
    fields.FailUnsupported(
        "text_config", fmt::format("model_type {} is multimodal: its language model is nested in "
                                   "here, which is not read yet; take a text-only checkpoint",
                                   Quote(config->model_type)));
    return;
  }
  config->vocab_size = fields.RequiredInt("vocab_size", 1, kMaxVocab);
  config->hidden_size = fields.RequiredInt("hidden_size", 1, kMaxWidth);
  // Qwen3.5 leaves it out where every layer has experts.
  const bool has_dense = config->model_type != "qwen3_5_moe";
  config->intermediate_size = has_dense || fields.Find("intermediate_size") != nullptr
                                  ? fields.RequiredInt("intermediate_size", 1, kMaxWidth)
                                  : fields.RequiredInt("moe_intermediate_size", 1, kMaxWidth);
  config->num_layers = fields.RequiredInt("num_hidden_layers", 1, kMaxLayers);
  config->num_attention_heads = fields.RequiredInt("num_attention_heads", 1, kMaxHeads);
  config->num_kv_heads =
      fields.Int("num_key_value_heads", 1, kMaxHeads).value_or(config->num_attention_heads);
  if (config->num_attention_heads % config->num_kv_heads != 0) {
    fields.Fail("num_key_value_heads",
                fmt::format("{} does not divide num_attention_heads {}", config->num_kv_heads,
                            config->num_attention_heads));
  }
  auto head_dim = fields.Int("head_dim", 1, kMaxHeadDim);
  // Whatever the hidden size.
  constexpr std::array kHeadsOf128 = {"qwen3", "glm4_moe", "minimax_m2"};
  if (!head_dim && config->model_type == "gpt_oss") head_dim = 64;
  if (!head_dim && std::ranges::find(kHeadsOf128, config->model_type) != kHeadsOf128.end()) {
    head_dim = 128;
  }
  if (!head_dim && IsHybrid(*config)) head_dim = 256;
  if (!head_dim && config->hidden_size % config->num_attention_heads != 0) {
    fields.Fail("head_dim", fmt::format("missing, and num_attention_heads {} does not divide "
                                        "hidden_size {}",
                                        config->num_attention_heads, config->hidden_size));
  }
  config->head_dim = head_dim.value_or(config->hidden_size / config->num_attention_heads);
  config->rms_norm_eps = fields.RequiredReal("rms_norm_eps", 1e-20, 1);
  config->max_position_embeddings = fields.RequiredInt("max_position_embeddings", 1, kMaxPositions);
  ReadExperts(fields, config);
  if (IsHybrid(*config)) ReadLinearAttention(fields, config);
}

// Which layers slide is for layer_types to say, where a config has it. Without, Qwen configs carry
// a window that is off unless use_sliding_window says otherwise, and then for the layers from
// max_window_layers on alone; others mean what they state.
void ReadSlidingWindow(const Fields& fields, ModelConfig* config) {
  const bool alternates = config->model_type == "gpt_oss";
  if (alternates) {
    constexpr int kUnstatedLayerWindow = 128;
    config->layer_window =
        fields.Int("sliding_window", 1, kMaxPositions).value_or(kUnstatedLayerWindow);
    for (int i = 0; i < config->num_layers; ++i) config->sliding_layers.push_back(i % 2 == 0);
  }
  if (const Json* types = fields.Find("layer_types")) {
    if (!types->is_array()) return fields.Fail("layer_types", "must be a list of names");
    if (std::cmp_not_equal(types->size(), config->num_layers)) {
      return fields.Fail("layer_types",
                         fmt::format("{} names for {} layers", types->size(), config->num_layers));
    }
    for (size_t i = 0; i < types->size(); ++i) {
      const Json& type = (*types)[i];
      if (alternates) {
        config->sliding_layers[i] = type == "sliding_attention";
        if (config->sliding_layers[i]) continue;
      }
      if (!config->other_layer_type.empty() || type == "full_attention") continue;
      if (type == "linear_attention" && IsHybrid(*config)) continue;
      config->other_layer_type = type.is_string() ? type.get<std::string>() : type.dump();
    }
    return;
  }
  // MiniMax: by number, 1 is full attention.
  for (const int type : fields.Ints("attn_type_list", 0, std::numeric_limits<int>::max())) {
    if (type != 1) config->other_layer_type = fmt::format("attn_type_list {}", type);
  }
  const bool is_qwen = config->model_type.rfind("qwen", 0) == 0;
  const bool used = fields.Bool("use_sliding_window").value_or(!is_qwen);
  if (alternates) return;
  constexpr int kUnstatedWindow = 4096, kQwenFullLayers = 28;  // where nothing is stated
  const bool has_default = is_qwen || config->model_type == "mistral";
  const int unstated = has_default && !fields.Has("sliding_window") ? kUnstatedWindow : 0;
  const int window = fields.Int("sliding_window", 0, kMaxPositions).value_or(unstated);
  if (!used) return;
  if (config->model_type == "qwen2" || config->model_type == "qwen3") {
    const int full = fields.Int("max_window_layers", 0, std::numeric_limits<int>::max())
                         .value_or(kQwenFullLayers);
    if (full >= config->num_layers) return;
  }
  config->sliding_window = window;
}

void ReadGeneration(const Fields& fields, ModelConfig* config) {
  const auto take = [](auto* setting, auto value) {
    if (value) *setting = value;
  };
  take(&config->do_sample, fields.Bool("do_sample"));
  take(&config->temperature, fields.Real("temperature", 0, 100));
  take(&config->top_p, fields.Real("top_p", 0, 1));
  take(&config->min_p, fields.Real("min_p", 0, 1));
  if (const auto top_k = fields.Int("top_k", -1, kMaxVocab)) {
    config->top_k = std::max(*top_k, 0);  // -1 is off, as vLLM has it
  }
  take(&config->max_new_tokens, fields.Int("max_new_tokens", 1, std::numeric_limits<int>::max()));
  take(&config->repetition_penalty, fields.Real("repetition_penalty", 1e-6, 100));
  if (auto ids = fields.TokenIds("eos_token_id", config->vocab_size); !ids.empty()) {
    config->eos_token_ids = std::move(ids);
  }
}

Result<Json> ParseObject(std::string_view text, std::string_view what) {
  OSCAR_ASSIGN_OR_RETURN(Json json, ParseStrictJson(text, what));
  if (!json.is_object()) return Unexpected(DataLoss(fmt::format("{}: not a JSON object", what)));
  return json;
}

// "[128, 128]": weights that share a scale.
void ReadBlock(const Fields& fields, const char* key, const Json& value, ModelConfig* config) {
  constexpr int64_t kMaxBlock = 1 << 16;
  const auto is_side = [](const Json& side) {
    return side.is_number_unsigned() && side.get<uint64_t>() >= 1 &&
           side.get<uint64_t>() <= kMaxBlock;
  };
  if (!value.is_array() || value.size() != 2 || !is_side(value[0]) || !is_side(value[1])) {
    fields.Fail(key, "must be two sizes between 1 and 65536");
    return;
  }
  config->fp8_block_rows = value[0].get<int>();
  config->fp8_block_columns = value[1].get<int>();
}

// One group of a compressed-tensors quantisation: why its weights are not E4M3 with scales.
std::string GroupProblem(const Fields& group, const Json* weights, Status* status,
                         ModelConfig* config) {
  if (weights == nullptr || !weights->is_object()) return "a group without weights";
  const Fields fields(*weights, "quantization_config: weights.", status);
  const std::string type = fields.Text("type").value_or("");
  const int bits = fields.Int("num_bits", 1, 64).value_or(0);
  const std::string strategy = fields.Text("strategy").value_or("");
  if (type != "float" || bits != 8) return fmt::format("weights of {} bits, type {}", bits, type);
  if (strategy != "tensor" && strategy != "channel" && strategy != "block") {
    return fmt::format("scales by {}", strategy.empty() ? "no stated strategy" : strategy);
  }
  if (const Json* block = fields.Find("block_structure"); block != nullptr && strategy == "block") {
    ReadBlock(group, "block_structure", *block, config);
  }
  return "";
}

void ReadQuantization(const Fields& fields, Status* status, ModelConfig* config) {
  config->quantization_method = fields.Text("quant_method").value_or("unknown");
  const std::string& method = config->quantization_method;
  std::string& problem = config->quantization_problem;
  if (method == "fp8" || method == "fbgemm_fp8") {
    const std::string format = fields.Text("fmt").value_or("e4m3");
    if (format != "e4m3" && format != "float8_e4m3fn") problem = fmt::format("format {}", format);
    if (const Json* block = fields.Find("weight_block_size")) {
      ReadBlock(fields, "weight_block_size", *block, config);
    }
  } else if (method == "compressed-tensors") {
    const Json* groups = fields.Find("config_groups");
    if (groups == nullptr || !groups->is_object() || groups->empty()) {
      problem = "no config_groups";
      return;
    }
    for (const auto& [key, group] : groups->items()) {
      const Json* weights =
          group.is_object() && group.contains("weights") ? &group["weights"] : nullptr;
      if (problem.empty()) problem = GroupProblem(fields, weights, status, config);
    }
  } else if (method == "mxfp4" && config->model_type == "gpt_oss") {
    // Experts; their tensors say so.
  } else {
    problem = "only FP8 E4M3 weights are read";
  }
}

}  // namespace

std::string_view NameOf(RopeScalingType type) {
  switch (type) {
    case RopeScalingType::kLinear:
      return "linear";
    case RopeScalingType::kLlama3:
      return "llama3";
    case RopeScalingType::kYarn:
      return "yarn";
    case RopeScalingType::kNone:
      break;
  }
  return "none";
}

Result<ModelConfig> ParseModelConfig(std::string_view config_text, std::string_view generation_text,
                                     std::string_view name) {
  OSCAR_ASSIGN_OR_RETURN(const Json json, ParseObject(config_text, name));
  Status status;
  const Fields fields(json, fmt::format("{}: ", name), &status);
  ModelConfig config;
  if (const auto type = fields.Text("model_type")) {
    config.model_type = *type;
  } else {
    fields.Fail("model_type", "missing; is this a model's config.json?");
  }
  if (const Json* architectures = fields.Find("architectures")) {
    if (!architectures->is_array() || architectures->empty() || !(*architectures)[0].is_string()) {
      fields.Fail("architectures", "must be a list of names");
    } else {
      config.architecture = (*architectures)[0].get<std::string>();
    }
  }
  // "qwen3_5_text" is the decoder of "qwen3_5" alone.
  constexpr std::string_view kText = "_text";
  if (config.model_type.starts_with("qwen3_5") && config.model_type.ends_with(kText)) {
    config.model_type.resize(config.model_type.size() - kText.size());
  }
  const Json* nested = fields.Find("text_config");
  config.is_nested = IsHybrid(config) && nested != nullptr && fields.Find("hidden_size") == nullptr;
  if (config.is_nested && !nested->is_object()) {
    fields.Fail("text_config", "must be an object");
    return Unexpected(status);
  }
  // What describes the decoder. Some of it may stand outside: the outer word counts.
  const Fields text(config.is_nested ? *nested : json,
                    fmt::format("{}: {}", name, config.is_nested ? "text_config." : ""), &status);
  const auto home = [&](const char* key) { return fields.Find(key) != nullptr ? fields : text; };
  ReadShape(text, &config);
  if (!status.ok()) return Unexpected(status);  // what follows relies on the shape
  ReadRope(text, name, &config, &status);
  ReadSlidingWindow(text, &config);
  config.tie_word_embeddings =
      home("tie_word_embeddings").Bool("tie_word_embeddings").value_or(false);
  config.attention_bias = text.Bool("attention_bias").value_or(config.model_type == "gpt_oss");
  config.mlp_bias = text.Bool("mlp_bias").value_or(false);
  config.hidden_act = text.Text("hidden_act").value_or("silu");
  const char* dtype_key = text.Find("dtype") != nullptr ? "dtype" : "torch_dtype";
  config.torch_dtype = text.Text(dtype_key).value_or("");
  if (const Json* quantization = home("quantization_config").Find("quantization_config")) {
    if (quantization->is_object()) {
      const Fields inner(*quantization, fmt::format("{}: quantization_config.", name), &status);
      ReadQuantization(inner, &status, &config);
    } else {
      fields.Fail("quantization_config", "must be an object");
    }
  }
  if (config.is_nested) ReadGeneration(text, &config);
  ReadGeneration(fields, &config);
  if (!generation_text.empty()) {
    const std::string generation_name =
        (std::filesystem::path(name).parent_path() / kGenerationName).string();
    OSCAR_ASSIGN_OR_RETURN(const Json generation, ParseObject(generation_text, generation_name));
    ReadGeneration(Fields(generation, fmt::format("{}: ", generation_name), &status), &config);
  }
  if (!status.ok()) return Unexpected(status);
  return config;
}

Result<ModelConfig> ReadModelConfigFile(const std::filesystem::path& path) {
  OSCAR_ASSIGN_OR_RETURN(const std::string config, ReadFile(path, kMaxConfigBytes));
  const std::filesystem::path beside = path.parent_path() / kGenerationName;
  std::string generation;
  if (IsThere(beside)) {
    OSCAR_ASSIGN_OR_RETURN(generation, ReadFile(beside, kMaxConfigBytes));
    if (generation.empty()) return Unexpected(DataLoss(beside.string() + ": empty file"));
  }
  return ParseModelConfig(config, generation, path.string());
}

Result<ModelConfig> ReadModelConfig(const std::filesystem::path& directory) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(directory, ignored)) {
    return Unexpected(
        NotFound(fmt::format("{}: no such file or model directory", directory.string())));
  }
  return ReadModelConfigFile(directory / "config.json");
}

Result<RopeScaling> ParseRopeScaling(std::string_view text, int64_t trained_context) {
  constexpr std::string_view kName = "--rope-scaling";
  std::vector<std::string> parts;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(':', at), text.size());
    parts.emplace_back(text.substr(at, end - at));
    at = end + 1;
  }
  RopeScaling scaling;
  const auto type = ScalingTypeOf(parts[0]);
  if (!type) return Unexpected(type.error().WithContext(kName));
  scaling.type = *type;
  if (scaling.type == RopeScalingType::kNone) return scaling;
  const auto number = [&](size_t index) {
    char* end = nullptr;
    const double value = std::strtod(parts[index].c_str(), &end);
    return parts[index].empty() || *end != '\0' ? std::nan("") : value;
  };
  if (parts.size() < 2 || parts.size() > 3) {
    return Unexpected(InvalidArgument(fmt::format(
        "{}: {} is not TYPE:FACTOR or TYPE:FACTOR:TRAINED_CONTEXT", kName, Quote(text))));
  }
  scaling.factor = number(1);
  if (!(scaling.factor >= 1 && scaling.factor <= kMaxFactor)) {
    return Unexpected(InvalidArgument(
        fmt::format("{}: factor {} is not between 1 and {}", kName, Quote(parts[1]), kMaxFactor)));
  }
  scaling.original_max_position = trained_context;
  if (parts.size() == 3) {
    const double context = number(2);
    if (!(context >= 1 && context <= kMaxPositions) || context != std::floor(context)) {
      return Unexpected(
          InvalidArgument(fmt::format("{}: trained context {} is not between 1 and {} tokens",
                                      kName, Quote(parts[2]), kMaxPositions)));
    }
    scaling.original_max_position = static_cast<int64_t>(context);
  }
  return scaling;
}

}  // namespace oscar
