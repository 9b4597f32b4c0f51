#include "arch/spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "arch/tensor_table.h"

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
      {[](ModelConfig* c) { c->model_type = "mixtral"; },
       "model_type \"mixtral\" is not supported (another layout"},
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

ModelSpec SpecOf(const std::string& text) {
  const auto config = ParseModelConfig(text, "", "config.json");
  EXPECT_TRUE(config.has_value()) << config.error().ToString();
  const auto spec = MakeModelSpec(*config);
  EXPECT_TRUE(spec.has_value()) << spec.error().ToString();
  return *spec;
}
std::string ErrorOf(const std::string& text) {
  const auto config = ParseModelConfig(text, "", "config.json");
  if (!config.has_value()) return config.error().message();
  const auto spec = MakeModelSpec(*config);
  return spec.has_value() ? "ok" : spec.error().message();
}
// A config with these fields besides the usual ones.
std::string Config(const std::string& type, const std::string& fields) {
  return R"({"vocab_size": 300, "hidden_size": 256, "intermediate_size": 512,
             "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
             "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "model_type": ")" +
         type + "\"" + (fields.empty() ? "" : ", ") + fields + "}";
}

TEST(Families, Qwen2HasBiasesWithoutSayingSo) {
  const ModelSpec spec = SpecOf(Config("qwen2", R"("sliding_window": 100)"));
  EXPECT_TRUE(spec.attention().qkv_bias);
  EXPECT_FALSE(spec.attention().o_bias);
  EXPECT_EQ(spec.attention().head_dim, 64);
  EXPECT_EQ(spec.attention().qk_norm, QkNorm::kNone);
  EXPECT_THAT(ErrorOf(Config("qwen2", R"("sliding_window": 100, "use_sliding_window": true,
                                         "max_window_layers": 2)")),
              HasSubstr("sliding_window: 100"));
}

TEST(Families, MistralHasAWindowWhereNothingIsSaid) {
  EXPECT_THAT(ErrorOf(Config("mistral", "")), HasSubstr("sliding_window: 4096"));
  const ModelSpec spec = SpecOf(Config("mistral", R"("sliding_window": null, "head_dim": 128)"));
  EXPECT_EQ(spec.attention().head_dim, 128);
  EXPECT_FALSE(spec.attention().qkv_bias);
  EXPECT_THAT(ErrorOf(Config("mistral", R"("sliding_window": null, "attention_bias": true)")),
              HasSubstr("attention_bias"));
}

TEST(Families, Qwen3MoeHasExpertsWhereItsStepAndListSay) {
  const std::string experts =
      R"("num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96)";
  ModelSpec spec = SpecOf(Config("qwen3_moe", experts + R"(, "norm_topk_prob": true,
                                 "decoder_sparse_step": 2, "mlp_only_layers": [3])"));
  for (const int layer : {0, 2, 3}) EXPECT_NE(spec.layer(layer).dense(), nullptr) << layer;
  const ExpertsSpec& found = *spec.layer(1).experts();
  EXPECT_EQ(found.num_experts, 8);
  EXPECT_EQ(found.experts_per_token, 2);
  EXPECT_EQ(found.intermediate, 96);
  EXPECT_EQ(found.score, RouterScore::kSoftmax);
  EXPECT_TRUE(found.normalize_weights);
  EXPECT_FALSE(found.choice_bias);
  EXPECT_EQ(spec.attention().qk_norm, QkNorm::kPerHead);
  spec = SpecOf(Config("qwen3_moe", experts));
  EXPECT_FALSE(spec.layer(0).experts()->normalize_weights);  // unless it says so
  EXPECT_THAT(ErrorOf(Config("qwen3_moe", R"("num_experts": 8)")),
              HasSubstr("num_experts_per_tok"));
  EXPECT_THAT(ErrorOf(Config("qwen3_moe", R"("num_experts": 2, "num_experts_per_tok": 3)")),
              HasSubstr("3 of 2 experts"));
}

TEST(Families, AsManyExpertsAsCanBeListed) {
  std::string text = Config("qwen3_moe", R"("num_experts": 4096, "num_experts_per_tok": 2)");
  const std::string layers = "\"num_hidden_layers\": 4";
  text.replace(text.find(layers), layers.size(), "\"num_hidden_layers\": 1000");
  EXPECT_THAT(ErrorOf(text), HasSubstr("4096 in each of 1000 layers"));
}

TEST(Families, Glm4MoeKeepsItsDefaults) {
  const std::string experts =
      R"("n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32)";
  ModelSpec spec = SpecOf(Config("glm4_moe", experts + R"(, "n_shared_experts": 2,
      "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2, "attention_bias": true)"));
  EXPECT_EQ(spec.attention().head_dim, 128);
  EXPECT_EQ(spec.attention().rotary_dims, 64);
  EXPECT_EQ(spec.attention().qk_norm, QkNorm::kNone);
  EXPECT_TRUE(spec.attention().qkv_bias);
  EXPECT_FALSE(spec.attention().o_bias);
  EXPECT_NE(spec.layer(0).dense(), nullptr);
  const ExpertsSpec& found = *spec.layer(1).experts();
  EXPECT_EQ(found.score, RouterScore::kSigmoid);
  EXPECT_TRUE(found.choice_bias && found.normalize_weights);
  EXPECT_EQ(found.weight_scale, 2.5f);
  EXPECT_EQ(found.groups, 4);
  EXPECT_EQ(found.chosen_groups, 2);
  EXPECT_EQ(found.shared_intermediate, 64);
  EXPECT_EQ(spec.name(Role::kRouterBias), "model.layers.{}.mlp.gate.e_score_correction_bias");
  EXPECT_THAT(ErrorOf(Config("glm4_moe", experts + R"(, "n_group": 3)")), HasSubstr("n_group"));
  EXPECT_THAT(ErrorOf(Config("glm4_moe", experts + R"(, "n_group": 2, "topk_group": 3)")),
              HasSubstr("topk_group"));
  EXPECT_THAT(ErrorOf(Config("glm4_moe", experts + R"(, "n_group": 8, "topk_group": 2)")),
              HasSubstr("n_group"));
  EXPECT_THAT(ErrorOf(Config("glm4_moe", R"("n_routed_experts": 8, "num_experts_per_tok": 5,
                                            "n_group": 2)")),
              HasSubstr("less than the 5"));
}

TEST(Families, MiniMaxNormsAllHeads) {
  const std::string experts = R"("num_local_experts": 8, "num_experts_per_tok": 2)";
  const ModelSpec spec = SpecOf(Config("minimax_m2", experts + R"(, "rotary_dim": 64)"));
  EXPECT_EQ(spec.attention().qk_norm, QkNorm::kAllHeads);
  EXPECT_EQ(spec.attention().rotary_dims, 64);
  EXPECT_EQ(spec.layer(0).experts()->intermediate, 512);
  EXPECT_TRUE(spec.layer(0).experts()->choice_bias);
  for (const auto& [field, expected] :
       {std::pair(R"("qk_norm_type": "per_head")", "qk_norm_type"),
        std::pair(R"("scoring_func": "softmax")", "scoring_func"),
        std::pair(R"("shared_intermediate_size": 64)", "shared_intermediate_size"),
        std::pair(R"("attn_type_list": [1, 0, 1, 1])", "attn_type_list 0")}) {
    EXPECT_THAT(ErrorOf(Config("minimax_m2", experts + ", " + field)), HasSubstr(expected));
  }
}

TEST(Families, GptOssHasSinksAndWindows) {
  const std::string experts = R"("num_local_experts": 8, "num_experts_per_tok": 2)";
  ModelSpec spec = SpecOf(Config("gpt_oss", experts));
  EXPECT_EQ(spec.attention().head_dim, 64);
  EXPECT_TRUE(spec.attention().qkv_bias && spec.attention().o_bias && spec.attention().has_sinks);
  EXPECT_EQ(spec.layer(0).attention()->sliding_window, 128);
  EXPECT_EQ(spec.layer(1).attention()->sliding_window, 0);
  EXPECT_EQ(spec.max_window(), 128);
  EXPECT_EQ(spec.kv_layers(), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(spec.history_layers(), (std::vector<int>{1, 3}));
  const ExpertsSpec& found = *spec.layer(0).experts();
  EXPECT_TRUE(found.has_biases && found.alternates_gate_up && found.normalize_weights);
  EXPECT_FALSE(found.choice_bias);
  EXPECT_EQ(found.clamped->limit, 7.0f);
  EXPECT_EQ(found.clamped->slope, 1.702f);
  EXPECT_EQ(CheckFeatures(spec, {}, "a test").message(),
            "gpt_oss: attention with a sliding window is not computed on a test yet");
  EXPECT_EQ(
      CheckFeatures(spec, {Feature::kSlidingWindow, Feature::kSinks, Feature::kExperts}, "a test")
          .message(),
      "gpt_oss: experts with biases and clamped gates is not computed on a test yet");
  spec = SpecOf(Config("gpt_oss", experts + R"(, "sliding_window": 10, "swiglu_limit": 3.5,
      "layer_types": ["full_attention", "sliding_attention", "full_attention",
                      "full_attention"])"));
  EXPECT_EQ(spec.history_layers(), (std::vector<int>{0, 2, 3}));
  EXPECT_EQ(spec.layer(1).attention()->sliding_window, 10);
  EXPECT_EQ(spec.layer(0).experts()->clamped->limit, 3.5f);
  EXPECT_THAT(ErrorOf(Config("gpt_oss", experts + R"(, "layer_types": ["full_attention",
      "sliding_attention", "chunked_attention", "full_attention"])")),
              HasSubstr("chunked_attention"));
  EXPECT_THAT(ErrorOf(Config("gpt_oss", experts + R"(, "layer_types": ["sliding_attention",
      "sliding_attention", "sliding_attention", "sliding_attention"])")),
              HasSubstr("every layer has a sliding window"));
  EXPECT_THAT(ErrorOf(Config("gpt_oss", experts + R"(, "sliding_window": 0)")),
              HasSubstr("sliding_window"));
  EXPECT_THAT(ErrorOf(Config("gpt_oss", experts + R"(, "swiglu_limit": -1)")),
              HasSubstr("swiglu_limit"));
  EXPECT_THAT(ErrorOf(Config("gpt_oss", "")), HasSubstr("number of experts"));
}

TEST(Families, OthersAreRefusedByNameAndReason) {
  for (const auto& [type, why] :
       {std::pair("deepseek_v3", "MLA"), std::pair("gemma3_text", "sliding windows"),
        std::pair("mixtral", "experts"), std::pair("glm4_moe_lite", "MLA"),
        std::pair("something_new", "supported are: qwen3, llama, qwen2, mistral")}) {
    EXPECT_THAT(ErrorOf(Config(type, "")), HasSubstr(std::string("\"") + type + "\""));
    EXPECT_THAT(ErrorOf(Config(type, "")), HasSubstr(why));
  }
  EXPECT_THAT(ErrorOf(R"({"model_type": "mistral3", "text_config": {}})"),
              testing::AllOf(HasSubstr("mistral3"), HasSubstr("multimodal")));
  EXPECT_THAT(ErrorOf(R"({"model_type": "qwen3_5", "text_config": {}})"),
              HasSubstr("text_config.vocab_size: missing"));
  EXPECT_THAT(ErrorOf(R"({"model_type": "qwen3_5", "text_config": 3})"),
              HasSubstr("text_config: must be an object"));
}

TEST(Families, HybridsHaveStatesAndGates) {
  // The text part of a multimodal config, and the same alone.
  const std::string inner = Config("qwen3_5_text", R"("head_dim": 256, "layer_types":
      ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
      "linear_num_key_heads": 4, "linear_num_value_heads": 12, "linear_key_head_dim": 16,
      "linear_value_head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7,
      "mrope_section": [11, 11, 10], "mrope_interleaved": true})");
  const ModelSpec nested = SpecOf(
      R"({"model_type": "qwen3_5", "tie_word_embeddings": true, "text_config": )" + inner + "}");
  const ModelSpec alone = SpecOf(inner);
  EXPECT_TRUE(nested.tied_head);
  EXPECT_FALSE(alone.tied_head);
  EXPECT_EQ(alone.name(Role::kStateConv), "model.layers.{}.linear_attn.conv1d.weight");
  EXPECT_EQ(nested.name(Role::kStateConv),
            "model.language_model.layers.{}.linear_attn.conv1d.weight");
  EXPECT_EQ(nested.name(Role::kEmbedding), "model.language_model.embed_tokens.weight");
  EXPECT_EQ(nested.name(Role::kHead), "lm_head.weight");
  EXPECT_EQ(nested.kv_layers(), std::vector<int>{1});
  EXPECT_EQ(nested.num_state_layers(), 3);
  EXPECT_EQ(nested.layer(3).state_slot, 2);
  EXPECT_EQ(nested.norm_offset, 1.0f);
  EXPECT_EQ(nested.rope_theta, 1e7);
  EXPECT_TRUE(nested.attention().has_output_gate);
  EXPECT_EQ(nested.attention().rotary_dims, 64);
  EXPECT_EQ(nested.attention().qkv_width(),
            2 * nested.attention().q_width() + 2 * nested.attention().kv_width());
  const LinearAttentionSpec& linear = *nested.linear_attention();
  EXPECT_EQ(linear.conv_channels(), 2 * 4 * 16 + 12 * 32);
  EXPECT_EQ(linear.state_bytes(), 4u * (12 * 16 * 32 + 3 * 512));
  EXPECT_EQ(nested.state_bytes(), 3 * linear.state_bytes());
  EXPECT_EQ(
      CheckFeatures(nested, {Feature::kPartialRope, Feature::kOutputGate}, "a test").message(),
      "qwen3_5: linear attention (Gated DeltaNet) is not computed on a test yet");

  for (const auto& [field, expected] :
       {std::pair(R"("mamba_ssm_dtype": "bfloat16")", "mamba_ssm_dtype"),
        std::pair(R"("output_gate_type": "sigmoid")", "output_gate_type"),
        std::pair(R"("attention_bias": true)", "attention_bias"),
        std::pair(R"("linear_num_key_heads": 5)", "linear_num_value_heads"),
        std::pair(R"("linear_conv_kernel_dim": 1)", "linear_conv_kernel_dim"),
        std::pair(R"("full_attention_interval": 100)", "no layer has full attention"),
        std::pair(R"("layer_types": ["full_attention", "sliding_attention", "full_attention",
                     "full_attention"])",
                  "sliding_attention")}) {
    EXPECT_THAT(ErrorOf(Config("qwen3_5_text", field)), HasSubstr(expected));
  }
}

// Every part of a row of inputs has its place, in both orders.
TEST(Families, InputsOfLinearAttentionCoverTheRow) {
  for (const bool grouped : {false, true}) {
    LinearAttentionSpec spec{.key_heads = 3,
                             .value_heads = 6,
                             .key_dim = 4,
                             .value_dim = 5,
                             .conv_kernel = 4,
                             .grouped_inputs = grouped};
    std::vector<int> seen(static_cast<size_t>(spec.input_width()));
    const auto mark = [&](int at, int count) {
      for (int i = at; i < at + count; ++i) ++seen.at(static_cast<size_t>(i));
    };
    for (int head = 0; head < 3; ++head) mark(spec.QOf(head), 4), mark(spec.KOf(head), 4);
    for (int head = 0; head < 6; ++head) {
      mark(spec.VOf(head), 5), mark(spec.ZOf(head), 5);
      mark(spec.BOf(head), 1), mark(spec.AOf(head), 1);
    }
    EXPECT_EQ(seen, std::vector<int>(seen.size(), 1)) << grouped;
    // As published: key head 1's k and the z of its second value head.
    EXPECT_EQ(spec.KOf(1), grouped ? 28 + 4 : 12 + 4);
    EXPECT_EQ(spec.ZOf(3), grouped ? 28 + 8 + 10 + 5 : 24 + 30 + 15);
  }
}

// The published models: how many layers have keys and values, and what a sequence's state takes.
TEST(Families, PublishedHybrids) {
  struct Published {
    const char* file;
    int kv_layers, state_layers;
    double state_mib, billions, active;
  };
  for (const Published& model :
       {Published{"Qwen--Qwen3.5-35B-A3B", 10, 30, 60 + 2.8125, 34.66, 3.0},
        Published{"Qwen--Qwen3-Next-80B-A3B-Instruct", 12, 36, 72 + 3.375, 79.67, 3.0}}) {
    const auto config = ReadModelConfigFile(std::string(OSCAR_TEST_DATA "/model-configs/") +
                                            model.file + "_config.json");
    ASSERT_TRUE(config.has_value()) << config.error().ToString();
    const auto spec = MakeModelSpec(*config);
    ASSERT_TRUE(spec.has_value()) << spec.error().ToString();
    EXPECT_EQ(spec->num_kv_layers(), model.kv_layers);
    EXPECT_EQ(spec->num_state_layers(), model.state_layers);
    EXPECT_DOUBLE_EQ(static_cast<double>(spec->state_bytes()) / (1 << 20), model.state_mib);
    EXPECT_TRUE(spec->layer(0).experts()->has_shared_share);
    EXPECT_TRUE(spec->layer(0).experts()->normalize_weights);
    const TensorTable table(*spec);
    EXPECT_NEAR(static_cast<double>(table.num_parameters()) / 1e9, model.billions, 0.1);
    EXPECT_NEAR(static_cast<double>(table.num_active_parameters()) / 1e9, model.active, 0.9);
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
