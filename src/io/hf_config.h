// The shape of a model, from the config.json and generation_config.json of a Hugging Face
// directory. Values are checked for range and consistency here, so that products of them cannot
// overflow 63 bits; whether an architecture or head dimension is supported is for its user to say.
// Plain values; functions are thread-safe.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/status.h"

namespace oscar {

enum class RopeScalingType : uint8_t { kNone, kLinear, kLlama3, kYarn };

std::string_view NameOf(RopeScalingType type);

// How rotary frequencies change beyond the context of pre-training. Fields that a type does not
// use keep their defaults.
struct RopeScaling {
  RopeScalingType type = RopeScalingType::kNone;
  double factor = 1.0;                // >= 1
  int64_t original_max_position = 0;  // trained context, tokens; llama3 and yarn
  double low_freq_factor = 1.0;       // llama3
  double high_freq_factor = 4.0;      // llama3; > low_freq_factor
  double attention_factor = 0.0;      // yarn; 0 means 0.1 ln(factor) + 1
  double beta_fast = 32.0;            // yarn; > beta_slow
  double beta_slow = 1.0;             // yarn
  bool truncate = true;               // yarn: the ramp begins and ends at whole dimensions
};

// Fields of mixtures of experts. What a file leaves out keeps the default of its model type.
struct ExpertsConfig {
  int count = 0;      // 0: dense
  int per_token = 0;  // <= count
  int intermediate_size = 0;
  int shared_count = 0;         // experts that every token goes through
  int shared_intermediate = 0;  // of all of them together, where stated
  bool normalize_weights = false;
  double weight_scale = 1.0;
  int groups = 1, chosen_groups = 1;  // of which experts are chosen; groups divides count
  std::string scoring;                // "softmax", "sigmoid"; empty where not stated
  bool choice_bias = true;            // MiniMax: use_routing_bias
  int first_dense_layers = 0;
  int sparse_step = 1;            // every so many layers have experts
  std::vector<int> dense_layers;  // have none, whatever the step
  int prediction_layers = 0;      // past the last layer, for speculation; not used
  double swiglu_limit = 7.0;      // gpt-oss
};

// Layers that keep a state of fixed size in place of keys and values (Gated DeltaNet).
struct LinearAttentionConfig {
  std::vector<int> layers;             // their numbers; empty: the model has none
  int conv_kernel = 0;                 // tokens seen by the convolution before the state
  int key_heads = 0, value_heads = 0;  // value_heads is a multiple of key_heads
  int key_dim = 0, value_dim = 0;      // of a head
  std::string output_gate;             // "swish"; empty where not stated
  std::string state_dtype;             // "float32"; empty where not stated
};

struct ModelConfig {
  std::string model_type;    // "qwen3", "llama", ...
  bool is_nested = false;    // in "text_config": the checkpoint has other models beside the decoder
  std::string architecture;  // first of "architectures"; may be empty
  int vocab_size = 0;
  int hidden_size = 0;
  int intermediate_size = 0;
  int num_layers = 0;
  int num_attention_heads = 0;
  int num_kv_heads = 0;  // divides num_attention_heads
  int head_dim = 0;      // explicit, or what the model type has without it
  int rotary_dim = 0;    // leading dimensions of a head that rotate; even, <= head_dim
  double rms_norm_eps = 0.0;
  double rope_theta = 0.0;
  double partial_rotary_factor = 1.0;  // rotary_dim / head_dim
  RopeScaling rope_scaling;
  int64_t max_position_embeddings = 0;
  bool tie_word_embeddings = false;
  bool attention_bias = false;  // as stated; some model types have biases without saying so
  bool mlp_bias = false;
  int sliding_window = 0;  // tokens that some layer sees, its own among them; 0: all
  // gpt-oss: what its layers of sliding_attention see, and which they are, by layer.
  int layer_window = 0;
  std::vector<bool> sliding_layers;
  std::string other_layer_type;  // first of "layer_types" that is not full attention; may be empty
  std::string hidden_act = "silu";
  std::string torch_dtype;          // "bfloat16"; empty where not stated
  std::string quantization_method;  // "fp8", "gptq", ...; empty: plain weights
  // What of the quantisation is not E4M3 weights with scales for blocks, rows or the whole; empty:
  // nothing.
  std::string quantization_problem;
  int fp8_block_rows = 128, fp8_block_columns = 128;  // where scales are for blocks
  ExpertsConfig experts;
  LinearAttentionConfig linear;
  bool has_output_gate = true;         // Qwen3.5: attention is multiplied by a gate
  std::optional<bool> use_qk_norm;     // where a model type leaves it to the config
  std::string qk_norm_type;            // MiniMax: "per_layer" is one norm over all heads
  std::vector<int32_t> eos_token_ids;  // any of them ends a text; below vocab_size, distinct
  // Defaults of generation that the model's authors ship; unset where they say nothing.
  std::optional<bool> do_sample;
  std::optional<double> temperature, top_p, min_p, repetition_penalty;
  std::optional<int> top_k;               // 0: off
  std::optional<int64_t> max_new_tokens;  // >= 1
};

// Reads config.json and, where present, generation_config.json, whose values win.
Result<ModelConfig> ReadModelConfig(const std::filesystem::path& directory);
// `path` may be a config.json itself, for models without weights.
Result<ModelConfig> ReadModelConfigFile(const std::filesystem::path& path);
// From text; `generation` may be empty. `name` stands for the path of config.json in errors.
Result<ModelConfig> ParseModelConfig(std::string_view config, std::string_view generation,
                                     std::string_view name);
// "linear:4", "yarn:4", "yarn:4:32768", "llama3:8:8192", "none": a scaling given on the command
// line. `trained_context` stands in where the text names no original context.
Result<RopeScaling> ParseRopeScaling(std::string_view text, int64_t trained_context);

}  // namespace oscar
