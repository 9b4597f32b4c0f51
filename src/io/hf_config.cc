#include "io/hf_config.h"

#include <fmt/core.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/json.h"

namespace oscar {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxConfigBytes = 16 << 20;
// Bounds that no real model passes and that keep every product below within 63 bits.
constexpr double kMaxInt = 1 << 28;
constexpr double kMaxPositions = double{int64_t{1} << 40};

// Reads fields of one JSON object; the first error sticks and later reads return defaults.
class Fields {
 public:
  Fields(const json& object, std::string name) : object_(object), name_(std::move(name)) {}

  Status status() const { return status_; }
  bool Has(const char* key) const { return object_.contains(key) && !object_[key].is_null(); }

  double Number(const char* key, std::optional<double> fallback, double low, double high) {
    if (!Has(key)) {
      if (!fallback.has_value()) Fail(key, "is missing");
      return fallback.value_or(0.0);
    }
    const json& value = object_[key];
    if (!value.is_number()) {
      Fail(key, "is not a number");
      return 0.0;
    }
    const double number = value.get<double>();
    if (!(number >= low && number <= high)) {
      Fail(key, fmt::format("is {}, must be between {} and {}", value.dump(), low, high));
      return fallback.value_or(low);
    }
    return number;
  }
  int Int(const char* key, std::optional<double> fallback, double low = 1, double high = kMaxInt) {
    const double number = Number(key, fallback, low, high);
    if (number != std::floor(number))
      Fail(key, fmt::format("is {}, must be a whole number", number));
    return static_cast<int>(number);
  }
  bool Bool(const char* key, bool fallback) {
    if (!Has(key)) return fallback;
    if (!object_[key].is_boolean()) {
      Fail(key, "is not true or false");
      return fallback;
    }
    return object_[key].get<bool>();
  }
  std::string String(const char* key, std::optional<std::string> fallback) {
    if (!Has(key)) {
      if (!fallback.has_value()) Fail(key, "is missing");
      return fallback.value_or("");
    }
    if (!object_[key].is_string()) {
      Fail(key, "is not a string");
      return "";
    }
    return object_[key].get<std::string>();
  }
  // An id or a list of ids.
  std::vector<int32_t> Ids(const char* key) {
    std::vector<int32_t> ids;
    if (!Has(key)) return ids;
    const json& value = object_[key];
    for (const json& id : value.is_array() ? value : json::array({value})) {
      if (!id.is_number_integer() || id.get<double>() < 0 || id.get<double>() > kMaxInt) {
        Fail(key, "is not a token id or a list of token ids");
        return {};
      }
      ids.push_back(id.get<int32_t>());
    }
    return ids;
  }
  void Fail(const char* key, std::string_view why) {
    if (status_.ok())
      status_ = InvalidArgument(fmt::format("{}: field \"{}\" {}", name_, key, why));
  }
  const json& object() const { return object_; }
  const std::string& name() const { return name_; }

 private:
  const json& object_;
  std::string name_;
  Status status_;
};

Status CheckScaling(const RopeScaling& s, std::string_view name) {
  if (s.type == RopeScalingType::kNone) return {};
  if (!(s.factor >= 1.0 && s.factor <= 1e6)) {
    return InvalidArgument(
        fmt::format("{}: RoPE scaling factor {} must be at least 1", name, s.factor));
  }
  if (s.type != RopeScalingType::kLinear && s.original_max_position <= 0) {
    return InvalidArgument(fmt::format("{}: RoPE scaling {} needs original_max_position_embeddings",
                                       name, NameOf(s.type)));
  }
  if (s.type == RopeScalingType::kLlama3 && !(s.high_freq_factor > s.low_freq_factor)) {
    return InvalidArgument(
        fmt::format("{}: RoPE scaling llama3 needs high_freq_factor > low_freq_factor", name));
  }
  return {};
}

Result<RopeScalingType> ScalingType(std::string_view text, std::string_view name) {
  for (RopeScalingType type : {RopeScalingType::kNone, RopeScalingType::kLinear,
                               RopeScalingType::kLlama3, RopeScalingType::kYarn}) {
    if (text == NameOf(type)) return type;
  }
  if (text == "default") return RopeScalingType::kNone;
  return Unexpected(Unimplemented(fmt::format(
      "{}: RoPE scaling type \"{}\" is not supported; supported are none, linear, llama3, yarn",
      name, text)));
}

// "rope_scaling" beside "rope_theta", or "rope_parameters" that holds both (newer files).
Status ReadRope(const json& root, const std::string& name, ModelConfig* config) {
  Fields top(root, name);
  config->rope_theta = top.Number("rope_theta", 10000.0, 1.0, 1e12);
  OSCAR_RETURN_IF_ERROR(top.status());
  const char* key = top.Has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  if (!top.Has(key)) return {};
  if (!root[key].is_object()) {
    top.Fail(key, "is not an object");
    return top.status();
  }
  const std::string inner_name = fmt::format("{}: {}", name, key);
  Fields inner(root[key], inner_name);
  if (inner.Has("rope_theta")) {
    config->rope_theta = inner.Number("rope_theta", std::nullopt, 1.0, 1e12);
  }
  RopeScaling& s = config->rope_scaling;
  OSCAR_ASSIGN_OR_RETURN(
      s.type, ScalingType(inner.String("rope_type", inner.String("type", "default")), name));
  if (s.type != RopeScalingType::kNone) {
    s.factor = inner.Number("factor", std::nullopt, 1.0, 1e6);
    s.original_max_position = static_cast<int64_t>(
        inner.Number("original_max_position_embeddings",
                     static_cast<double>(config->max_position_embeddings), 1.0, kMaxPositions));
    s.low_freq_factor = inner.Number("low_freq_factor", 1.0, 1e-6, 1e6);
    s.high_freq_factor = inner.Number("high_freq_factor", 4.0, 1e-6, 1e6);
    s.attention_factor = inner.Number("attention_factor", 0.0, 0.0, 1e3);
    s.beta_fast = inner.Number("beta_fast", 32.0, 1e-6, 1e6);
    s.beta_slow = inner.Number("beta_slow", 1.0, 1e-6, 1e6);
    if (inner.Has("mscale") || inner.Has("mscale_all_dim")) {
      return Unimplemented(fmt::format("{}: mscale is not supported", inner_name));
    }
  }
  OSCAR_RETURN_IF_ERROR(inner.status());
  return CheckScaling(s, name);
}

}  // namespace

std::string_view NameOf(RopeScalingType type) {
  switch (type) {
    case RopeScalingType::kNone:
      return "none";
    case RopeScalingType::kLinear:
      return "linear";
    case RopeScalingType::kLlama3:
      return "llama3";
    case RopeScalingType::kYarn:
      return "yarn";
  }
  return "";
}

Result<ModelConfig> ParseModelConfig(std::string_view config_text, std::string_view generation_text,
                                     std::string_view name) {
  OSCAR_ASSIGN_OR_RETURN(const json root, ParseJson(config_text, name));
  if (!root.is_object()) {
    return Unexpected(DataLoss(fmt::format("{}: is not a JSON object", name)));
  }
  Fields f(root, std::string(name));
  ModelConfig config;
  config.model_type = f.String("model_type", std::nullopt);
  if (root.contains("architectures") && root["architectures"].is_array() &&
      !root["architectures"].empty() && root["architectures"][0].is_string()) {
    config.architecture = root["architectures"][0].get<std::string>();
  }
  config.vocab_size = f.Int("vocab_size", std::nullopt);
  config.hidden_size = f.Int("hidden_size", std::nullopt);
  config.intermediate_size = f.Int("intermediate_size", std::nullopt);
  config.num_layers = f.Int("num_hidden_layers", std::nullopt, 1, 4096);
  config.num_attention_heads = f.Int("num_attention_heads", std::nullopt, 1, 1 << 16);
  config.num_kv_heads = f.Int("num_key_value_heads", config.num_attention_heads, 1, 1 << 16);
  OSCAR_RETURN_IF_ERROR(f.status());
  config.head_dim =
      f.Int("head_dim", std::max(1, config.hidden_size / config.num_attention_heads), 1, 1 << 16);
  config.rms_norm_eps = f.Number("rms_norm_eps", 1e-6, 0.0, 1.0);
  config.partial_rotary_factor = f.Number("partial_rotary_factor", 1.0, 0.0, 1.0);
  config.max_position_embeddings =
      static_cast<int64_t>(f.Number("max_position_embeddings", 2048.0, 1.0, kMaxPositions));
  config.tie_word_embeddings = f.Bool("tie_word_embeddings", false);
  config.attention_bias = f.Bool("attention_bias", false);
  config.mlp_bias = f.Bool("mlp_bias", false);
  config.uses_sliding_window = f.Bool("use_sliding_window", false);
  config.hidden_act = f.String("hidden_act", "silu");
  config.torch_dtype = f.String("torch_dtype", f.String("dtype", ""));
  if (f.Has("quantization_config")) {
    config.quantization_method = "unknown";
    if (root["quantization_config"].is_object()) {
      Fields quantization(root["quantization_config"], std::string(name));
      config.quantization_method = quantization.String("quant_method", "unknown");
      OSCAR_RETURN_IF_ERROR(quantization.status());
    }
  }
  if (f.Has("bos_token_id")) {
    const std::vector<int32_t> bos = f.Ids("bos_token_id");
    if (!bos.empty()) config.bos_token_id = bos.front();
  }
  config.eos_token_ids = f.Ids("eos_token_id");
  OSCAR_RETURN_IF_ERROR(f.status());
  if (config.num_attention_heads % config.num_kv_heads != 0) {
    f.Fail("num_key_value_heads", fmt::format("is {}, must divide num_attention_heads ({})",
                                              config.num_kv_heads, config.num_attention_heads));
  }
  if (config.head_dim % 2 != 0) f.Fail("head_dim", "is odd; RoPE needs pairs");
  OSCAR_RETURN_IF_ERROR(f.status());
  OSCAR_RETURN_IF_ERROR(ReadRope(root, std::string(name), &config));

  if (!generation_text.empty()) {
    OSCAR_ASSIGN_OR_RETURN(const json generation,
                           ParseJson(generation_text, "generation_config.json"));
    if (!generation.is_object()) {
      return Unexpected(DataLoss("generation_config.json: is not a JSON object"));
    }
    Fields g(generation, "generation_config.json");
    if (g.Has("eos_token_id")) config.eos_token_ids = g.Ids("eos_token_id");
    if (g.Has("do_sample")) config.do_sample = g.Bool("do_sample", false);
    if (g.Has("temperature")) config.temperature = g.Number("temperature", 1.0, 0.0, 100.0);
    if (g.Has("top_p")) config.top_p = g.Number("top_p", 1.0, 0.0, 1.0);
    if (g.Has("top_k")) config.top_k = g.Int("top_k", 0, 0);
    OSCAR_RETURN_IF_ERROR(g.status());
  }
  return config;
}

Result<ModelConfig> ReadModelConfigFile(const std::filesystem::path& path) {
  OSCAR_ASSIGN_OR_RETURN(const std::string config, ReadFile(path, kMaxConfigBytes));
  std::string generation;
  const std::filesystem::path beside = path.parent_path() / "generation_config.json";
  if (std::filesystem::exists(beside)) {
    OSCAR_ASSIGN_OR_RETURN(generation, ReadFile(beside, kMaxConfigBytes));
  }
  return ParseModelConfig(config, generation, path.string());
}

Result<ModelConfig> ReadModelConfig(const std::filesystem::path& directory) {
  std::error_code error;
  if (!std::filesystem::is_directory(directory, error)) {
    return Unexpected(NotFound(fmt::format("{}: no such model directory", directory.string())));
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
  OSCAR_ASSIGN_OR_RETURN(scaling.type, ScalingType(parts[0], kName));
  if (scaling.type == RopeScalingType::kNone) return scaling;
  const auto number = [&](size_t index) {
    char* end = nullptr;
    const double value = std::strtod(parts[index].c_str(), &end);
    return parts[index].empty() || *end != '\0' ? std::nan("") : value;
  };
  if (parts.size() < 2 || parts.size() > 3) {
    return Unexpected(InvalidArgument(
        fmt::format("{}: \"{}\" is not TYPE:FACTOR or TYPE:FACTOR:TRAINED_CONTEXT", kName, text)));
  }
  scaling.factor = number(1);
  scaling.original_max_position = trained_context;
  if (parts.size() == 3) {
    const double context = number(2);
    scaling.original_max_position =
        context >= 1 && context <= kMaxPositions ? static_cast<int64_t>(context) : 0;
  }
  OSCAR_RETURN_IF_ERROR(CheckScaling(scaling, kName));
  return scaling;
}

}  // namespace oscar
