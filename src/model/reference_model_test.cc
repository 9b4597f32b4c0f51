// The reference forward pass against outputs of transformers (tests/data/golden).
#include "model/reference_model.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/json.h"

namespace oscar {
namespace {

class ReferenceModelTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto config = ReadModelConfig(OSCAR_DEMO_MODEL);
    ASSERT_TRUE(config.has_value()) << config.error().ToString();
    auto source = OpenCheckpointWeights(OSCAR_DEMO_MODEL);
    ASSERT_TRUE(source.has_value()) << source.error().ToString();
    auto loaded = ReferenceModel::Load(*MakeModelSpec(*config), **source);
    ASSERT_TRUE(loaded.has_value()) << loaded.error().ToString();
    model_ = new ReferenceModel(std::move(*loaded));
    auto text = ReadFile(OSCAR_TEST_DATA "/golden/golden.json", 1 << 20);
    golden_ = new nlohmann::json(*ParseJson(*text, "golden.json"));
    auto tensors = SafetensorsFile::Open(OSCAR_TEST_DATA "/golden/golden.safetensors");
    ASSERT_TRUE(tensors.has_value());
    tensors_ = new SafetensorsFile(std::move(*tensors));
  }
  static void TearDownTestSuite() {
    delete model_;
    delete golden_;
    delete tensors_;
  }
  static inline ReferenceModel* model_ = nullptr;
  static inline nlohmann::json* golden_ = nullptr;
  static inline SafetensorsFile* tensors_ = nullptr;
};

TEST_F(ReferenceModelTest, LogitsMatchTransformers) {
  const auto vocab = static_cast<size_t>(model_->spec().vocab_size);
  for (size_t i = 0; i < (*golden_)["texts"].size(); ++i) {
    const auto ids = (*golden_)["texts"][i]["ids"].get<std::vector<int32_t>>();
    const std::vector<float> expected =
        *ToFloatVector(*tensors_->Get("logits_" + std::to_string(i)));
    const std::vector<float> logits = model_->Forward(ids);
    float worst = 0.0f;
    for (size_t j = 0; j < expected.size(); ++j) {
      worst = std::max(worst, std::fabs(expected[j] - logits[logits.size() - 4 * vocab + j]));
    }
    EXPECT_LE(worst, 1e-3f) << "text " << i;
  }
}

TEST_F(ReferenceModelTest, Layer3MatchesTransformers) {
  auto ids = (*golden_)["layer3_ids"].get<std::vector<int32_t>>();
  ids.resize(150);  // positions are causal: the first rows do not depend on the rest
  const std::vector<float> q = *ToFloatVector(*tensors_->Get("layer3_q_prerope"));
  const std::vector<float> k = *ToFloatVector(*tensors_->Get("layer3_k_prerope"));
  const std::vector<float> v = *ToFloatVector(*tensors_->Get("layer3_v"));
  float worst = 0.0f;
  int rows = 0;
  model_->Forward(ids, [&](int layer, int64_t t, auto got_q, auto got_k, auto got_v) {
    if (layer != 3) return;
    ++rows;
    const auto compare = [&](std::span<const float> got, const std::vector<float>& all) {
      for (size_t d = 0; d < got.size(); ++d) {
        worst = std::max(worst, std::fabs(got[d] - all[static_cast<size_t>(t) * got.size() + d]));
      }
    };
    compare(got_q, q);
    compare(got_k, k);
    compare(got_v, v);
  });
  EXPECT_EQ(rows, 150);
  EXPECT_LE(worst, 1e-3f);
}

}  // namespace
}  // namespace oscar
