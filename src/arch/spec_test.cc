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
      {[](ModelConfig* c) { c->rotary_dim = 32; }, "partial_rotary_factor"},
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

TEST(ModelSpec, EveryLayerHasASlotOfTheCacheWhereItHasAttention) {
  ModelSpec spec = *MakeModelSpec(Plain("qwen3"));
  ASSERT_EQ(spec.num_layers(), 2);
  EXPECT_EQ(spec.kv_layers(), (std::vector<int>{0, 1}));
  EXPECT_EQ(spec.attention().qk_norm, QkNorm::kPerHead);
  EXPECT_EQ(spec.attention().qkv_width(), 8 * 64);
  spec.layers[0].mixer = std::monostate();
  spec.layers[0].kv_slot = -1;
  spec.layers[1].kv_slot = 0;
  EXPECT_EQ(spec.kv_layers(), std::vector<int>{1});
  EXPECT_EQ(spec.attention().num_heads, 4);
}

TEST(ModelSpec, SaysWhatADeviceDoesNotCompute) {
  ModelSpec spec = *MakeModelSpec(Plain("llama"));
  EXPECT_TRUE(CheckFeatures(spec, {}, "a test").ok());
  std::get<AttentionSpec>(spec.layers[1].mixer).rotary_dims = 32;
  EXPECT_TRUE(CheckFeatures(spec, {Feature::kPartialRope}, "a test").ok());
  const Status status = CheckFeatures(spec, {Feature::kExperts}, "a test");
  EXPECT_EQ(status.code(), StatusCode::kUnimplemented);
  EXPECT_EQ(status.message(), "llama: RoPE on part of a head is not computed on a test yet");
}

}  // namespace
}  // namespace oscar
