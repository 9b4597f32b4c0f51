#include "arch/spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace oscar {
namespace {

using ::testing::HasSubstr;

ModelConfig Plain(const char* model_type) {
  ModelConfig config;
  config.model_type = model_type;
  config.vocab_size = 100;
  config.hidden_size = 64;
  config.intermediate_size = 128;
  config.num_layers = 2;
  config.num_attention_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = config.rotary_dim = 64;
  config.rms_norm_eps = 1e-6;
  config.max_position_embeddings = 4096;
  return config;
}

// What a config states and the layers do not do must not be left out in silence.
TEST(ModelSpec, RefusesWhatItWouldIgnore) {
  struct Case {
    void (*change)(ModelConfig*);
    const char* expected;
  };
  const Case cases[] = {
      {[](ModelConfig* c) { c->mlp_bias = true; }, "mlp_bias"},
      {[](ModelConfig* c) { c->rotary_dim = 32; }, "partial_rotary_factor: rotating 32 of"},
      {[](ModelConfig* c) { c->other_layer_type = "linear_attention"; },
       "layer_types has 'linear_attention'"},
      {[](ModelConfig* c) { c->sliding_window = 4095; }, "sliding_window: 4095"},
      {[](ModelConfig* c) { c->hidden_act = "gelu"; }, "only silu"},
      {[](ModelConfig* c) { c->model_type = "qwen3_moe"; }, "model_type \"qwen3_moe\""},
  };
  for (const char* model_type : {"qwen3", "llama"}) {
    ASSERT_TRUE(MakeModelSpec(Plain(model_type)).has_value());
    for (const Case& item : cases) {
      ModelConfig config = Plain(model_type);
      item.change(&config);
      const auto spec = MakeModelSpec(config);
      ASSERT_FALSE(spec.has_value()) << item.expected;
      EXPECT_THAT(spec.error().message(), HasSubstr(item.expected));
    }
  }
}

TEST(ModelSpec, AWindowAsLongAsTheContextIsNone) {
  ModelConfig config = Plain("llama");
  config.sliding_window = 4096;
  EXPECT_TRUE(MakeModelSpec(config).has_value());
}

TEST(ModelSpec, CountsItsBytes) {
  ModelConfig config = Plain("qwen3");
  config.tie_word_embeddings = true;
  // Two layers of q 64 x 256, k and v 64 x 128, o 256 x 64, three of 64 x 128; two norms of 64
  // each.
  const uint64_t value_and_output = 2 * (64 * 128 + 64 * 256), norms = 2 * 2 * 64 + 64;
  const uint64_t matrices = value_and_output + 2 * (64 * 256 + 64 * 128 + 3 * 64 * 128);
  for (const uint64_t tables : {1, 2}) {
    config.tie_word_embeddings = tables == 1;
    const ModelSpec spec = *MakeModelSpec(config);
    const uint64_t words = tables * 64 * 100 + norms;
    EXPECT_EQ(spec.num_parameters(), matrices + words);
    EXPECT_EQ(spec.Fp8WeightBytes(/*rotates_v=*/false), matrices + 2 * words);
    EXPECT_EQ(spec.Fp8WeightBytes(/*rotates_v=*/true), matrices + value_and_output + 2 * words);
  }
}

}  // namespace
}  // namespace oscar
