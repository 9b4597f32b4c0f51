#include "io/hf_config.h"

#include <gtest/gtest.h>

namespace oscar {
namespace {

Result<ModelConfig> Load(const std::string& name) {
  return ReadModelConfigFile(OSCAR_TEST_DATA "/model-configs/" + name + "_config.json");
}

constexpr char kMinimal[] =
    R"({"model_type": "qwen3", "vocab_size": 8, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2)";

std::string With(const std::string& extra) {
  return std::string(kMinimal) + (extra.empty() ? "" : ", ") + extra + "}";
}

TEST(HfConfig, ReadsPublishedConfigs) {
  auto qwen = Load("Qwen--Qwen3-8B");
  ASSERT_TRUE(qwen.has_value()) << qwen.error().ToString();
  EXPECT_EQ(qwen->model_type, "qwen3");
  EXPECT_EQ(qwen->num_layers, 36);
  EXPECT_EQ(qwen->num_kv_heads, 8);
  EXPECT_EQ(qwen->head_dim, 128);
  EXPECT_FALSE(qwen->tie_word_embeddings);
  EXPECT_EQ(qwen->rope_theta, 1e6);
  EXPECT_EQ(qwen->rope_scaling.type, RopeScalingType::kNone);
  EXPECT_EQ(qwen->eos_token_ids, std::vector<int32_t>{151645});

  auto llama = Load("meta-llama--Llama-3.1-8B");
  ASSERT_TRUE(llama.has_value()) << llama.error().ToString();
  EXPECT_EQ(llama->head_dim, 128);  // hidden / heads
  EXPECT_EQ(llama->rope_scaling.type, RopeScalingType::kLlama3);
  EXPECT_EQ(llama->rope_scaling.original_max_position, 8192);
  EXPECT_EQ(llama->rope_scaling.factor, 8.0);

  auto minimax = Load("MiniMaxAI--MiniMax-M2.7");
  ASSERT_TRUE(minimax.has_value()) << minimax.error().ToString();
  EXPECT_EQ(minimax->quantization_method, "fp8");
  EXPECT_EQ(minimax->torch_dtype, "bfloat16");
}

TEST(HfConfig, GenerationConfigWins) {
  auto config =
      ParseModelConfig(With("\"eos_token_id\": 3"),
                       R"({"eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20})", "c");
  ASSERT_TRUE(config.has_value());
  EXPECT_EQ(config->eos_token_ids, (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(config->temperature, 0.6);
  EXPECT_EQ(config->top_k, 20);
}

TEST(HfConfig, NewerRopeSpelling) {
  auto config = ParseModelConfig(
      With(R"("rope_parameters": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0,
               "original_max_position_embeddings": 32768})"),
      "", "c");
  ASSERT_TRUE(config.has_value()) << config.error().ToString();
  EXPECT_EQ(config->rope_theta, 5000.0);
  EXPECT_EQ(config->rope_scaling.type, RopeScalingType::kYarn);
  EXPECT_EQ(config->rope_scaling.original_max_position, 32768);
}

TEST(HfConfig, ErrorsNameFileAndField) {
  const struct {
    std::string text, expected;
  } cases[] = {
      {"[]", "c.json: is not a JSON object"},
      {R"({"model_type": "qwen3"})", "field \"vocab_size\" is missing"},
      {With("\"head_dim\": -1"), "field \"head_dim\" is -1, must be between"},
      {With("\"head_dim\": 1.5"), "field \"head_dim\" is 1.5, must be a whole number"},
      {With("\"head_dim\": 3"), "field \"head_dim\" is odd"},
      {With("\"vocab_size\": 1e300"), "field \"vocab_size\" is 1e+300"},
      {With("\"num_key_value_heads\": 3"), "must divide num_attention_heads (4)"},
      {With("\"tie_word_embeddings\": 1"), "field \"tie_word_embeddings\" is not true or false"},
      {With("\"eos_token_id\": \"x\""), "field \"eos_token_id\" is not a token id"},
      {With(R"("rope_scaling": {"type": "longrope", "factor": 2})"),
       "\"longrope\" is not supported"},
      {With(R"("rope_scaling": {"type": "linear"})"), "field \"factor\" is missing"},
      {With(R"("rope_scaling": 4)"), "field \"rope_scaling\" is not an object"},
  };
  for (const auto& [text, expected] : cases) {
    auto config = ParseModelConfig(text, "", "c.json");
    ASSERT_FALSE(config.has_value()) << text;
    EXPECT_NE(config.error().message().find(expected), std::string::npos)
        << config.error().message() << " for " << text;
    EXPECT_EQ(config.error().message().find('\n'), std::string::npos);
  }
}

TEST(HfConfig, CommandLineScaling) {
  auto yarn = ParseRopeScaling("yarn:4", 40960);
  ASSERT_TRUE(yarn.has_value());
  EXPECT_EQ(yarn->original_max_position, 40960);
  EXPECT_EQ(ParseRopeScaling("yarn:4:32768", 40960)->original_max_position, 32768);
  EXPECT_EQ(ParseRopeScaling("none", 1)->type, RopeScalingType::kNone);
  for (const char* bad :
       {"", "yarn", "yarn:", "yarn:x", "yarn:0.5", "yarn:4:0", "dynamic:2", "a:b:c:d"}) {
    EXPECT_FALSE(ParseRopeScaling(bad, 4096).has_value()) << bad;
  }
}

}  // namespace
}  // namespace oscar
