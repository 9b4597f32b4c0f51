#include "arch/tensor_table.h"

#include <gtest/gtest.h>

#include <set>

namespace oscar {
namespace {

ModelSpec Spec(bool tied) {
  ModelConfig config;
  config.model_type = "qwen3";
  config.vocab_size = 100;
  config.hidden_size = 64;
  config.intermediate_size = 128;
  config.num_layers = 2;
  config.num_attention_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = config.rotary_dim = 64;
  config.tie_word_embeddings = tied;
  return *MakeModelSpec(config);
}

TEST(TensorTable, ListsWhatTheSpecNeeds) {
  const TensorTable table(Spec(/*tied=*/true));
  // Embedding and final norm; two norms, two norms of heads and seven matrices per layer.
  EXPECT_EQ(table.tensors().size(), 2u + 2 * 11);
  EXPECT_EQ(table.Find(Role::kHead), nullptr);
  EXPECT_EQ(table.Find(Role::kQBias, 0), nullptr);
  const TensorDecl& k = table.Get(Role::kK, 1);
  EXPECT_EQ(k.name, "model.layers.1.self_attn.k_proj.weight");
  EXPECT_EQ(k.shape, (std::vector<int64_t>{128, 64}));
  EXPECT_EQ(k.split, TensorSplit::kRows);
  EXPECT_EQ(table.Get(Role::kO, 1).split, TensorSplit::kColumns);
  EXPECT_EQ(table.Get(Role::kKNorm, 0).shape, std::vector<int64_t>{64});
  std::set<std::string> names;
  for (const TensorDecl& tensor : table.tensors()) {
    EXPECT_TRUE(names.insert(tensor.name).second) << tensor.name;
  }
}

TEST(TensorTable, FollowsTheLayers) {
  ModelSpec spec = Spec(/*tied=*/false);
  std::get<AttentionSpec>(spec.layers[0].mixer).qkv_bias = true;
  std::get<AttentionSpec>(spec.layers[0].mixer).qk_norm = QkNorm::kAllHeads;
  spec.layers[1].mixer = std::monostate();
  ExpertsSpec experts{3, 2, 32};
  experts.choice_bias = true;
  experts.shared_intermediate = 16;
  spec.layers[1].feed_forward = experts;
  NameExperts("mlp", &spec);
  const TensorTable table(spec);
  EXPECT_NE(table.Find(Role::kHead), nullptr);
  EXPECT_EQ(table.Get(Role::kVBias, 0).shape, std::vector<int64_t>{128});
  EXPECT_EQ(table.Get(Role::kQNorm, 0).shape, std::vector<int64_t>{256});
  EXPECT_EQ(table.Find(Role::kQ, 1), nullptr);
  EXPECT_EQ(table.Find(Role::kAttentionNorm, 1), nullptr);
  EXPECT_EQ(table.Get(Role::kRouter, 1).shape, (std::vector<int64_t>{3, 64}));
  EXPECT_EQ(table.Get(Role::kRouterBias, 1).shape, std::vector<int64_t>{3});
  EXPECT_EQ(table.Get(Role::kExpertUp, 1, 2).name, "model.layers.1.mlp.experts.2.up_proj.weight");
  EXPECT_EQ(table.Get(Role::kExpertDown, 1, 2).shape, (std::vector<int64_t>{64, 32}));
  EXPECT_EQ(table.Get(Role::kSharedDown, 1).shape, (std::vector<int64_t>{64, 16}));
  EXPECT_EQ(table.Find(Role::kUp, 1), nullptr);
  EXPECT_EQ(table.Find(Role::kUp, 0) != nullptr, true);
  // One token passes two of three experts.
  EXPECT_EQ(table.num_parameters() - table.num_active_parameters(), 3u * 32 * 64);
}

TEST(TensorTable, CountsBytes) {
  using Fp8 = TensorTable::Fp8;
  // Two layers of q 256 x 64, k and v 128 x 64, o 64 x 256 and three of 64 x 128; two norms of 64
  // and two of heads each.
  const uint64_t value_and_output = 2 * (64 * 128 + 64 * 256), norms = 2 * 4 * 64 + 64;
  const uint64_t matrices = value_and_output + 2 * (64 * 256 + 64 * 128 + 3 * 64 * 128);
  for (const uint64_t tables : {1, 2}) {
    const TensorTable table(Spec(/*tied=*/tables == 1));
    const uint64_t words = tables * 64 * 100 + norms;
    EXPECT_EQ(table.num_parameters(), matrices + words);
    EXPECT_EQ(table.Bytes(Fp8::kNone, /*rotates_v=*/true), 2 * (matrices + words));
    EXPECT_EQ(table.Bytes(Fp8::kAll, /*rotates_v=*/false), matrices + 2 * words);
    EXPECT_EQ(table.Bytes(Fp8::kAll, /*rotates_v=*/true), matrices + value_and_output + 2 * words);
  }
}

}  // namespace
}  // namespace oscar
