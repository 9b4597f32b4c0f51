#include "io/hf_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "io/test_util.h"

namespace oscar {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

const std::filesystem::path kConfigs = std::filesystem::path(OSCAR_TEST_DATA) / "model-configs";

ModelConfig Load(const std::string& name) {
  auto config = ReadModelConfigFile(kConfigs / (name + ".json"));
  EXPECT_TRUE(config.has_value()) << MessageOf(config);
  return config.value_or(ModelConfig{});
}

json Valid() {
  return json::parse(R"({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 4096})");
}

Result<ModelConfig> Parse(const json& config) {
  return ParseModelConfig(config.dump(), "", "c.json");
}

std::string ErrorWith(const std::string& key, const json& value) {
  json config = Valid();
  config[key] = value;
  const auto parsed = Parse(config);
  if (!parsed) ExpectOneLineNaming(parsed.error(), "c.json: ");
  return MessageOf(parsed);
}

// Expected numbers from the models' cards: layers, hidden, heads, KV heads, head dim, vocabulary.
TEST(HfConfig, ReadsEveryPublishedConfig) {
  struct Row {
    const char* file;
    const char* type;
    int64_t layers, hidden, heads, kv_heads, head_dim, rotary_dim, vocab, experts;
  };
  const Row kRows[] = {
      {"Qwen--Qwen3-0.6B_config", "qwen3", 28, 1024, 16, 8, 128, 128, 151936, 0},
      {"Qwen--Qwen3-1.7B_config", "qwen3", 28, 2048, 16, 8, 128, 128, 151936, 0},
      {"Qwen--Qwen3-4B_config", "qwen3", 36, 2560, 32, 8, 128, 128, 151936, 0},
      {"Qwen--Qwen3-4B-2507_config", "qwen3", 36, 2560, 32, 8, 128, 128, 151936, 0},
      {"Qwen--Qwen3-8B_config", "qwen3", 36, 4096, 32, 8, 128, 128, 151936, 0},
      {"Qwen--Qwen3-14B_config", "qwen3", 40, 5120, 40, 8, 128, 128, 151936, 0},
      {"Qwen--Qwen3-32B_config", "qwen3", 64, 5120, 64, 8, 128, 128, 151936, 0},
      {"Qwen--Qwen3-30B-A3B_config", "qwen3_moe", 48, 2048, 32, 4, 128, 128, 151936, 128},
      {"meta-llama--Llama-3.1-8B_config", "llama", 32, 4096, 32, 8, 128, 128, 128256, 0},
      {"meta-llama--Meta-Llama-3.1-70B_config", "llama", 80, 8192, 64, 8, 128, 128, 128256, 0},
      {"meta-llama--Meta-Llama-3.1-405B_config", "llama", 126, 16384, 128, 8, 128, 128, 128256, 0},
      {"MiniMaxAI--MiniMax-M2.5_config", "minimax_m2", 62, 3072, 48, 8, 128, 64, 200064, 256},
      {"MiniMaxAI--MiniMax-M2.7_config", "minimax_m2", 62, 3072, 48, 8, 128, 64, 200064, 256},
      {"zai-org--GLM-4.7_config.RECONSTRUCTED", "glm4_moe", 92, 5120, 96, 8, 128, 64, 151552, 160},
  };
  for (const Row& row : kRows) {
    SCOPED_TRACE(row.file);
    const ModelConfig config = Load(row.file);
    EXPECT_EQ(config.model_type, row.type);
    EXPECT_EQ(config.num_layers, row.layers);
    EXPECT_EQ(config.hidden_size, row.hidden);
    EXPECT_EQ(config.num_attention_heads, row.heads);
    EXPECT_EQ(config.num_kv_heads, row.kv_heads);
    EXPECT_EQ(config.head_dim, row.head_dim);
    EXPECT_EQ(config.rotary_dim, row.rotary_dim);
    EXPECT_EQ(config.vocab_size, row.vocab);
    EXPECT_EQ(config.experts.count, row.experts);
    EXPECT_EQ(config.sliding_window, 0);
    EXPECT_EQ(config.hidden_act, "silu");
  }
}

TEST(HfConfig, ReadsDetails) {
  const ModelConfig qwen = Load("Qwen--Qwen3-4B-2507_config");
  EXPECT_EQ(qwen.architecture, "Qwen3ForCausalLM");
  EXPECT_EQ(qwen.rope_theta, 5e6);
  EXPECT_EQ(qwen.rope_scaling.type, RopeScalingType::kNone);
  EXPECT_EQ(qwen.max_position_embeddings, 262144);
  EXPECT_EQ(qwen.intermediate_size, 9728);
  EXPECT_EQ(qwen.rms_norm_eps, 1e-6);
  EXPECT_TRUE(qwen.tie_word_embeddings);
  EXPECT_EQ(qwen.torch_dtype, "bfloat16");
  EXPECT_THAT(qwen.eos_token_ids, ElementsAre(151645));
  EXPECT_THAT(qwen.quantization_method, IsEmpty());

  const ModelConfig llama = Load("meta-llama--Llama-3.1-8B_config");
  EXPECT_EQ(llama.rope_scaling.type, RopeScalingType::kLlama3);
  EXPECT_EQ(llama.rope_scaling.factor, 8);
  EXPECT_EQ(llama.rope_scaling.low_freq_factor, 1);
  EXPECT_EQ(llama.rope_scaling.high_freq_factor, 4);
  EXPECT_EQ(llama.rope_scaling.original_max_position, 8192);
  EXPECT_FALSE(llama.tie_word_embeddings);

  const ModelConfig glm = Load("zai-org--GLM-4.7_config.RECONSTRUCTED");
  EXPECT_THAT(glm.eos_token_ids, ElementsAre(151329, 151336, 151338));
  EXPECT_TRUE(glm.attention_bias);
  EXPECT_EQ(glm.torch_dtype, "bfloat16");  // spelled "dtype"
  const ModelConfig minimax = Load("MiniMaxAI--MiniMax-M2.5_config");
  EXPECT_EQ(minimax.quantization_method, "fp8");
  EXPECT_THAT(minimax.quantization_problem, IsEmpty());
  EXPECT_EQ(minimax.fp8_block_rows, 128);
  EXPECT_EQ(minimax.fp8_block_columns, 128);
}

TEST(HfConfig, Quantization) {
  const auto problem = [](const json& quantization) {
    json config = Valid();
    config["quantization_config"] = quantization;
    const auto parsed = Parse(config);
    return parsed.has_value() ? parsed->quantization_problem : "error: " + MessageOf(parsed);
  };
  const auto group = [](const json& weights) {
    return json{{"quant_method", "compressed-tensors"},
                {"config_groups", {{"group_0", {{"weights", weights}}}}}};
  };
  EXPECT_EQ(problem({{"quant_method", "fp8"}}), "");
  EXPECT_EQ(problem({{"quant_method", "fp8"}, {"weight_block_size", {64, 128}}}), "");
  EXPECT_EQ(problem({{"quant_method", "fbgemm_fp8"}}), "");
  EXPECT_EQ(problem(group({{"num_bits", 8}, {"type", "float"}, {"strategy", "channel"}})), "");
  EXPECT_EQ(problem(group({{"num_bits", 8},
                           {"type", "float"},
                           {"strategy", "block"},
                           {"block_structure", {128, 128}}})),
            "");
  EXPECT_EQ(problem(group({{"num_bits", 4}, {"type", "int"}, {"strategy", "group"}})),
            "weights of 4 bits, type int");
  EXPECT_EQ(problem(group({{"num_bits", 8}, {"type", "float"}, {"strategy", "group"}})),
            "scales by group");
  EXPECT_EQ(problem({{"quant_method", "compressed-tensors"}}), "no config_groups");
  EXPECT_EQ(problem({{"quant_method", "fp8"}, {"fmt", "e5m2"}}), "format e5m2");
  EXPECT_EQ(problem({{"quant_method", "gptq"}, {"bits", 4}}), "only FP8 E4M3 weights are read");
  for (const json& block : {json(128), json{128}, json{0, 128}, json{-1, 1}, json{1 << 20, 1}}) {
    EXPECT_THAT(problem({{"quant_method", "fp8"}, {"weight_block_size", block}}),
                HasSubstr("weight_block_size: must be two sizes"));
  }
}

TEST(HfConfig, DefaultsOfOlderConfigs) {
  json config = Valid();
  config.erase("num_key_value_heads");
  config["head_dim"] = nullptr;
  const auto parsed = Parse(config);
  ASSERT_TRUE(parsed.has_value()) << MessageOf(parsed);
  EXPECT_EQ(parsed->num_kv_heads, 8);
  EXPECT_EQ(parsed->head_dim, 128);  // a Qwen3 config without one means 128
  EXPECT_EQ(parsed->rope_theta, 10000);
  EXPECT_THAT(parsed->eos_token_ids, IsEmpty());
}

TEST(HfConfig, HeadDimOfLlama) {
  json config = Valid();
  config["model_type"] = "llama";
  config.erase("head_dim");
  EXPECT_EQ(Parse(config)->head_dim, 8);
  config["hidden_size"] = 65;
  EXPECT_THAT(MessageOf(Parse(config)), HasSubstr("c.json: head_dim: missing"));
}

TEST(HfConfig, MinusOneIsNoToken) {
  json config = Valid();
  config["eos_token_id"] = {1, -1};
  const auto parsed = Parse(config);
  ASSERT_TRUE(parsed.has_value()) << MessageOf(parsed);
  EXPECT_THAT(parsed->eos_token_ids, ElementsAre(1));
}

// Checkpoints name padding that their embedding has no row for.
TEST(HfConfig, TokensThatNothingUsesAreNotLookedAt) {
  json config = Valid();
  config["pad_token_id"] = config["vocab_size"];
  config["bos_token_id"] = config["vocab_size"];
  const auto parsed = Parse(config);
  EXPECT_TRUE(parsed.has_value()) << MessageOf(parsed);
}

TEST(HfConfig, BothSpellingsOfRope) {
  const json yarn = {{"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 1024}};
  json old_style = Valid();
  old_style["rope_theta"] = 5000.0;
  old_style["rope_scaling"] = yarn;
  json new_style = Valid();
  new_style["rope_parameters"] = yarn;
  new_style["rope_parameters"].erase("type");
  new_style["rope_parameters"]["rope_type"] = "yarn";
  new_style["rope_parameters"]["rope_theta"] = 5000.0;
  for (const json& config : {old_style, new_style}) {
    const auto parsed = Parse(config);
    ASSERT_TRUE(parsed.has_value()) << MessageOf(parsed);
    EXPECT_EQ(parsed->rope_theta, 5000);
    EXPECT_EQ(parsed->rope_scaling.type, RopeScalingType::kYarn);
    EXPECT_EQ(parsed->rope_scaling.factor, 4);
    EXPECT_EQ(parsed->rope_scaling.original_max_position, 1024);
    EXPECT_EQ(parsed->rope_scaling.beta_fast, 32);
    EXPECT_EQ(parsed->rope_scaling.beta_slow, 1);
    EXPECT_EQ(parsed->rope_scaling.attention_factor, 0);
  }
  new_style["rope_parameters"] = {
      {"rope_type", "default"}, {"rope_theta", 7000}, {"partial_rotary_factor", 0.5}};
  EXPECT_EQ(Parse(new_style)->rope_theta, 7000);
  EXPECT_EQ(Parse(new_style)->rotary_dim, 4);
  EXPECT_EQ(Parse(new_style)->rope_scaling.type, RopeScalingType::kNone);
}

TEST(HfConfig, RopeScalingStandsForRopeParametersWhereBothAreThere) {
  json config = Valid();
  config["rope_parameters"] = {
      {"rope_type", "default"}, {"rope_theta", 7000}, {"partial_rotary_factor", 0.5}};
  config["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 3.0}};
  auto parsed = Parse(config);
  ASSERT_TRUE(parsed.has_value()) << MessageOf(parsed);
  EXPECT_EQ(parsed->rope_scaling.type, RopeScalingType::kLinear);
  EXPECT_EQ(parsed->rope_scaling.factor, 3);
  // Nothing of rope_parameters is left, its theta included: as transformers reads the file.
  EXPECT_EQ(parsed->rope_theta, 10000);
  EXPECT_EQ(parsed->rotary_dim, 8);
  config["rope_theta"] = 6000.0;
  EXPECT_EQ(Parse(config)->rope_theta, 6000);
  config["rope_scaling"]["rope_theta"] = 5000.0;
  EXPECT_EQ(Parse(config)->rope_theta, 5000);
  config["rope_scaling"] = {{"type", "yarn"}, {"factor", 4.0}};
  EXPECT_EQ(Parse(config)->rope_scaling.type, RopeScalingType::kYarn);
  for (const json& absent : {json(nullptr), json::object()}) {
    config["rope_scaling"] = absent;
    EXPECT_EQ(Parse(config)->rope_scaling.type, RopeScalingType::kNone);
    EXPECT_EQ(Parse(config)->rope_theta, 7000);
    EXPECT_EQ(Parse(config)->rotary_dim, 4);
  }
  for (const json& bad :
       {json{{"rope_type", "longrope"}}, json{{"rope_type", "yarn"}, {"factor", -2}}, json("yarn"),
        json{1}, json::array(), json(""), json(0), json(false)}) {
    config["rope_scaling"] = bad;
    EXPECT_THAT(MessageOf(Parse(config)), HasSubstr("c.json: rope_scaling")) << bad;
  }
}

TEST(HfConfig, RopeErrorsNameTheField) {
  EXPECT_THAT(
      ErrorWith("rope_scaling", {{"type", "longrope"}}),
      HasSubstr("c.json: rope_scaling.type: RoPE scaling type 'longrope' is not supported"));
  EXPECT_THAT(ErrorWith("rope_parameters", {{"rope_type", "dynamic\n"}}),
              HasSubstr("c.json: rope_parameters.rope_type: RoPE scaling type 'dynamic\\x0a'"));
  EXPECT_EQ(ErrorWith("rope_scaling", {{"type", "linear"}}),
            "c.json: rope_scaling.factor: missing");
  EXPECT_THAT(ErrorWith("rope_scaling", {{"type", "linear"}, {"factor", 0.5}}),
              HasSubstr("rope_scaling.factor: 0.5 is not between 1"));
  EXPECT_THAT(ErrorWith("rope_scaling", {{"rope_type", "llama3"},
                                         {"factor", 8},
                                         {"original_max_position_embeddings", 8192},
                                         {"low_freq_factor", 4},
                                         {"high_freq_factor", 4}}),
              HasSubstr("high_freq_factor: 4 is not above low_freq_factor 4"));
  EXPECT_THAT(ErrorWith("rope_scaling", {1, 2}), HasSubstr("rope_scaling: must be an object"));
  EXPECT_THAT(ErrorWith("rope_theta", "x"), HasSubstr("rope_theta: must be a number"));
  EXPECT_THAT(ErrorWith("head_dim", 7), HasSubstr("needs an even dimension"));
}

TEST(HfConfig, MissingFieldsAreNamed) {
  for (const char* key :
       {"model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "rms_norm_eps", "max_position_embeddings"}) {
    json config = Valid();
    config.erase(key);
    EXPECT_EQ(MessageOf(Parse(config)).find("c.json: " + std::string(key) + ": missing"), 0u);
  }
}

TEST(HfConfig, AbsurdValuesAreRefused) {
  for (const char* key :
       {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"}) {
    for (const json& value : std::vector<json>{0, -1, INT64_MAX, UINT64_MAX, INT64_MIN}) {
      EXPECT_THAT(ErrorWith(key, value),
                  HasSubstr(std::string(key) + ": " + value.dump() + " is not"));
    }
    for (const json& value : std::vector<json>{1.5, "8", true, json::array(), 1e300}) {
      EXPECT_EQ(ErrorWith(key, value), "c.json: " + std::string(key) + ": must be an integer");
    }
  }
  EXPECT_THAT(ErrorWith("num_key_value_heads", 3),
              HasSubstr("3 does not divide num_attention_heads 8"));
  EXPECT_THAT(ErrorWith("rms_norm_eps", 0), HasSubstr("rms_norm_eps: 0 is not between"));
  EXPECT_THAT(ErrorWith("tie_word_embeddings", 1), HasSubstr("must be true or false"));
  EXPECT_THAT(ErrorWith("eos_token_id", 1000),
              HasSubstr("eos_token_id: 1000 is not between 0 and 999"));
  EXPECT_THAT(ErrorWith("eos_token_id", {1, -2}), HasSubstr("eos_token_id: -2"));
  EXPECT_THAT(ErrorWith("layer_types", "full"), HasSubstr("must be a list of names"));
  EXPECT_THAT(ErrorWith("architectures", "x"), HasSubstr("must be a list of names"));
  EXPECT_THAT(ErrorWith("quantization_config", 4),
              HasSubstr("quantization_config: must be an object"));
}

// Settings that change the mathematics and that RopeScaling cannot express.
TEST(HfConfig, UnknownYarnSettingsAreNotIgnored) {
  const json yarn = {{"type", "yarn"}, {"factor", 4}};
  for (const auto& [key, value] :
       std::map<std::string, json>{{"mscale", 1.0}, {"mscale_all_dim", 1.0}}) {
    json changed = yarn;
    changed[key] = value;
    EXPECT_THAT(ErrorWith("rope_scaling", changed), HasSubstr("rope_scaling." + key + ": "));
  }
  EXPECT_EQ(ErrorWith("rope_scaling", yarn), "ok");
  json config = Valid();
  config["rope_scaling"] = {{"type", "yarn"}, {"factor", 4}, {"truncate", false}};
  EXPECT_FALSE(Parse(config)->rope_scaling.truncate);
}

TEST(HfConfig, CommandLineScaling) {
  const auto yarn = ParseRopeScaling("yarn:4", 40960);
  ASSERT_TRUE(yarn.has_value());
  EXPECT_EQ(yarn->original_max_position, 40960);
  EXPECT_EQ(ParseRopeScaling("yarn:4:32768", 40960)->original_max_position, 32768);
  EXPECT_EQ(ParseRopeScaling("none", 1)->type, RopeScalingType::kNone);
  for (const char* bad :
       {"", "yarn", "yarn:", "yarn:x", "yarn:0.5", "yarn:nan", "yarn:inf", "yarn:4:0", "yarn:4:1.5",
        "yarn:4:1e30", "dynamic:2", "a:b:c:d", "linear:2:3:4", "yarn:4:"}) {
    const auto scaling = ParseRopeScaling(bad, 4096);
    ASSERT_FALSE(scaling.has_value()) << bad;
    ExpectOneLineNaming(scaling.error(), "--rope-scaling: ");
  }
}

// As transformers decides which layers slide.
TEST(HfConfig, SlidingWindow) {
  json config = Valid();
  config["sliding_window"] = 512;
  config["max_window_layers"] = 1;
  EXPECT_EQ(Parse(config)->sliding_window, 0);  // Qwen: off unless switched on
  config["use_sliding_window"] = true;
  EXPECT_EQ(Parse(config)->sliding_window, 512);
  config["max_window_layers"] = 2;  // the layers from there on: none of two
  EXPECT_EQ(Parse(config)->sliding_window, 0);
  config.erase("max_window_layers");  // 28
  EXPECT_EQ(Parse(config)->sliding_window, 0);
  config["num_hidden_layers"] = 29;
  EXPECT_EQ(Parse(config)->sliding_window, 512);
  config.erase("sliding_window");
  EXPECT_EQ(Parse(config)->sliding_window, 4096);
  config["sliding_window"] = nullptr;
  EXPECT_EQ(Parse(config)->sliding_window, 0);
}

TEST(HfConfig, SlidingWindowOfOtherTypes) {
  for (const char* type : {"llama", "mistral"}) {
    json config = Valid();
    config["model_type"] = type;
    // Mistral's files state a null where they mean none.
    EXPECT_EQ(Parse(config)->sliding_window, type == std::string("mistral") ? 4096 : 0);
    config["sliding_window"] = nullptr;
    EXPECT_EQ(Parse(config)->sliding_window, 0);
    config["sliding_window"] = 512;
    config["max_window_layers"] = 2;  // means nothing to them
    EXPECT_EQ(Parse(config)->sliding_window, 512);
    config["use_sliding_window"] = false;
    EXPECT_EQ(Parse(config)->sliding_window, 0);
  }
}

TEST(HfConfig, LayerTypes) {
  json config = Valid();
  config["layer_types"] = {"full_attention", "full_attention"};
  EXPECT_EQ(Parse(config)->other_layer_type, "");
  // They decide, not the window.
  config["sliding_window"] = 512;
  config["use_sliding_window"] = true;
  config["max_window_layers"] = 0;
  EXPECT_EQ(Parse(config)->sliding_window, 0);
  config["model_type"] = "llama";
  EXPECT_EQ(Parse(config)->sliding_window, 0);
  config["layer_types"] = {"linear_attention", "sliding_attention"};
  EXPECT_EQ(Parse(config)->other_layer_type, "linear_attention");
  EXPECT_THAT(ErrorWith("layer_types", {"full_attention"}),
              HasSubstr("layer_types: 1 names for 2 layers"));
  EXPECT_THAT(ErrorWith("layer_types", "full_attention"), HasSubstr("must be a list of names"));
}

TEST(HfConfig, NotAConfig) {
  EXPECT_THAT(MessageOf(ParseModelConfig("[]", "", "c.json")),
              HasSubstr("c.json: not a JSON object"));
  EXPECT_THAT(MessageOf(ParseModelConfig("{", "", "c.json")), HasSubstr("c.json: invalid JSON"));
  EXPECT_THAT(MessageOf(ParseModelConfig(R"({"hidden_size":1,"hidden_size":2})", "", "c.json")),
              HasSubstr("duplicate key 'hidden_size'"));
  EXPECT_THAT(MessageOf(ParseModelConfig(R"({"model_type":"x","text_config":{}})", "", "c.json")),
              HasSubstr("is multimodal"));
}

using HfConfigDirectory = TempDirTest;

TEST_F(HfConfigDirectory, GenerationConfigWins) {
  json config = Valid();
  config["eos_token_id"] = 1;
  config["temperature"] = 0.5;
  Spill(directory_ / "config.json", config.dump());
  auto parsed = ReadModelConfig(directory_);
  ASSERT_TRUE(parsed.has_value()) << MessageOf(parsed);
  EXPECT_THAT(parsed->eos_token_ids, ElementsAre(1));

  Spill(directory_ / "generation_config.json",
        R"({"eos_token_id": [2, 0, 2], "top_k": 20, "top_p": 0.95, "do_sample": true,
            "max_new_tokens": 512})");
  parsed = ReadModelConfig(directory_);
  ASSERT_TRUE(parsed.has_value()) << MessageOf(parsed);
  EXPECT_THAT(parsed->eos_token_ids, ElementsAre(2, 0));
  EXPECT_EQ(parsed->top_k, 20);
  EXPECT_EQ(parsed->top_p, 0.95);
  EXPECT_EQ(parsed->do_sample, true);
  EXPECT_EQ(parsed->max_new_tokens, 512);
  EXPECT_EQ(parsed->temperature, 0.5);

  // Both ways to write "off".
  for (const char* off : {R"({"top_k": -1})", R"({"top_k": 0})"}) {
    Spill(directory_ / "generation_config.json", off);
    parsed = ReadModelConfig(directory_);
    ASSERT_TRUE(parsed.has_value()) << MessageOf(parsed);
    EXPECT_EQ(parsed->top_k, 0);
  }
  Spill(directory_ / "generation_config.json", R"({"max_new_tokens": 0})");
  EXPECT_THAT(ReadModelConfig(directory_).error().message(), HasSubstr("max_new_tokens: 0 is not"));
  Spill(directory_ / "generation_config.json", R"({"top_k": -2})");
  EXPECT_THAT(MessageOf(ReadModelConfig(directory_)),
              HasSubstr("generation_config.json: top_k: -2 is not between -1 and"));

  Spill(directory_ / "generation_config.json", R"({"eos_token_id": "end"})");
  EXPECT_THAT(MessageOf(ReadModelConfig(directory_)),
              HasSubstr("generation_config.json: eos_token_id: must be an integer"));
}

TEST_F(HfConfigDirectory, MissingConfigIsNotFound) {
  const auto parsed = ReadModelConfig(directory_);
  ASSERT_FALSE(parsed.has_value());
  EXPECT_EQ(parsed.error().code(), StatusCode::kNotFound);
  EXPECT_THAT(parsed.error().message(), HasSubstr("config.json: cannot open"));
}

}  // namespace
}  // namespace oscar
