// ModelConfig: config.json and generation_config.json of a Hugging Face model directory, checked.
// Errors name the file and the field. Fields that no supported architecture uses are ignored; what
// changes the mathematics (RoPE scaling, quantisation) is never ignored. A plain value.
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

struct RopeScaling {
  RopeScalingType type = RopeScalingType::kNone;
  double factor = 1.0;
  int64_t original_max_position = 0;  // trained context, tokens; llama3 and yarn
  double low_freq_factor = 1.0;       // llama3
  double high_freq_factor = 4.0;      // llama3
  double attention_factor = 0.0;      // yarn; 0 means 0.1 ln(factor) + 1
  double beta_fast = 32.0;            // yarn
  double beta_slow = 1.0;             // yarn
};

struct ModelConfig {
  std::string model_type;    // "qwen3", "llama", ...
  std::string architecture;  // first of "architectures"; may be empty
  int vocab_size = 0;
  int hidden_size = 0;
  int intermediate_size = 0;
  int num_layers = 0;
  int num_attention_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;  // explicit, or hidden_size / num_attention_heads
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000.0;
  double partial_rotary_factor = 1.0;
  RopeScaling rope_scaling;
  int64_t max_position_embeddings = 0;
  bool tie_word_embeddings = false;
  bool attention_bias = false;
  bool mlp_bias = false;
  bool uses_sliding_window = false;
  std::string hidden_act = "silu";
  std::string torch_dtype;          // may be empty
  std::string quantization_method;  // empty: plain weights
  std::optional<int32_t> bos_token_id;
  std::vector<int32_t> eos_token_ids;  // generation_config.json wins
  // Sampling defaults of generation_config.json, where it has them.
  std::optional<bool> do_sample;
  std::optional<double> temperature, top_p;
  std::optional<int> top_k;
};

// Reads config.json and, where present, generation_config.json.
Result<ModelConfig> ReadModelConfig(const std::filesystem::path& directory);
// `path` may be a config.json itself, for models without weights.
Result<ModelConfig> ReadModelConfigFile(const std::filesystem::path& path);
// From text; `generation` may be empty. `name` stands for the file in errors.
Result<ModelConfig> ParseModelConfig(std::string_view config, std::string_view generation,
                                     std::string_view name);
// "linear:4", "yarn:4", "yarn:4:32768", "llama3:8:8192", "none": a scaling given on the command
// line. `trained_context` stands in where the text names no original context.
Result<RopeScaling> ParseRopeScaling(std::string_view text, int64_t trained_context);

}  // namespace oscar
