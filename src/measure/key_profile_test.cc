#include "measure/key_profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "text/tokenizer.h"

namespace oscar {
namespace {

using testing::HasSubstr;

TEST(ShapeOfKeysTest, SeesChannelsAndTokensThatStandOut) {
  constexpr size_t kDim = 8, kTokens = 64;
  std::vector<float> rows(kDim * kTokens, 1.0f);
  const KeyShape even = ShapeOfKeys(rows, kDim);
  EXPECT_DOUBLE_EQ(even.channel_outlier, 1.0);
  EXPECT_DOUBLE_EQ(even.norm_imbalance, 1.0);
  // One channel ten times the others.
  for (size_t t = 0; t < kTokens; ++t) rows[t * kDim + 3] = -10.0f;
  const KeyShape channel = ShapeOfKeys(rows, kDim);
  EXPECT_DOUBLE_EQ(channel.channel_outlier, 10.0);
  EXPECT_DOUBLE_EQ(channel.channel_rms[3], 10.0);
  EXPECT_DOUBLE_EQ(channel.norm_imbalance, 1.0);
  // One token of the first group a quarter of the others: (4 + 1) / 2.
  for (size_t d = 0; d < kDim; ++d) rows[5 * kDim + d] /= 4;
  EXPECT_DOUBLE_EQ(ShapeOfKeys(rows, kDim).norm_imbalance, 2.5);
  EXPECT_EQ(ShapeOfKeys(rows, kDim).token_norms.size(), kTokens);
}

class KeyProfileTest : public testing::Test {
 protected:
  KeyProfileTest() {
    options_.model = OSCAR_DEMO_MODEL;
    options_.kv = "bf16";
    options_.device = Device::kCpu;
    options_.kv_memory = uint64_t{64} << 20;
    model_ = std::move(*LoadedModel::Load(options_));
    const Tokenizer tokenizer = *Tokenizer::Load(OSCAR_DEMO_MODEL);
    std::string text;
    for (int i = 0; i < 40; ++i) text += "The sea was calm and the boats came home late. ";
    prompt_ = *tokenizer.Encode(text);
  }
  Result<KeyProfile> Measure(const char* method, int layer = -1, int head = -1) {
    ModelOptions options = options_;
    options.kv = method;
    const auto plan = LoadedModel::Plan(options);
    EXPECT_TRUE(plan.has_value());
    return MeasureKeys(*model_, (*plan)->kv(), prompt_, layer, head);
  }
  ModelOptions options_;
  std::unique_ptr<LoadedModel> model_;
  std::vector<int32_t> prompt_;
};

TEST_F(KeyProfileTest, StagesAreTheMethodsOwn) {
  const auto stages = [&](const char* method) {
    std::vector<std::string> names;
    const auto profile = Measure(method);
    for (const KeyStage& stage : profile->stages) names.push_back(stage.name);
    return names;
  };
  EXPECT_EQ(stages("kivi"), std::vector<std::string>{"as computed"});
  EXPECT_EQ(stages("oscar+"), (std::vector<std::string>{"as computed", "rotated"}));
  EXPECT_EQ(stages("oscar-su"),
            (std::vector<std::string>{"as computed", "rotated", "divided by token norms"}));
  EXPECT_EQ(stages("oscar-su:rotation=off"),
            (std::vector<std::string>{"as computed", "divided by token norms"}));
}

TEST_F(KeyProfileTest, RotationKeepsNormsAndNormsBecomeOne) {
  const auto profile = Measure("oscar-su");
  ASSERT_TRUE(profile.has_value()) << profile.error().ToString();
  const auto heads = profile->stages[0].shapes[0].size();
  for (size_t layer = 0; layer < profile->layers.size(); ++layer) {
    for (int64_t t = 0; t < profile->tokens; ++t) {
      double all = 0;
      for (size_t h = 0; h < heads; ++h) {
        const auto at = [&](size_t stage) {
          return profile->stages[stage].shapes[layer][h].token_norms[static_cast<size_t>(t)];
        };
        EXPECT_NEAR(at(1), at(0), 1e-4 * at(0));
        all += at(2) * at(2);
      }
      EXPECT_NEAR(all, 1, 1e-5);
    }
  }
  // Per head: each one's norms are 1.
  const auto by_head = Measure("oscar-su:norm=head", 0, 0);
  for (const double norm : by_head->stages[2].shapes[0][0].token_norms) EXPECT_NEAR(norm, 1, 1e-5);
  EXPECT_NEAR(by_head->stages[2].shapes[0][0].norm_imbalance, 1, 1e-4);
}

TEST_F(KeyProfileTest, ChoosesTheHeadThatStandsOutMost) {
  const auto profile = Measure("oscar+");
  double most = 0;
  for (size_t i = 0; i < profile->layers.size(); ++i) {
    for (size_t h = 0; h < profile->stages[0].shapes[i].size(); ++h) {
      const double outlier = profile->stages[0].shapes[i][h].channel_outlier;
      if (profile->layers[i] == profile->layer && static_cast<int>(h) == profile->kv_head) {
        EXPECT_GE(outlier, most);
      }
      most = std::max(most, outlier);
    }
  }
  EXPECT_EQ(std::ssize(profile->stages[0].magnitudes), profile->tokens);
  const auto own = Measure("oscar+", 2, 1);
  EXPECT_EQ(own->layer, 2);
  EXPECT_EQ(own->kv_head, 1);
  EXPECT_THAT(Measure("oscar+", 99).error().message(), HasSubstr("--layer 99"));
  EXPECT_THAT(Measure("oscar+", 0, 9).error().message(), HasSubstr("--head 9"));
  prompt_.resize(31);
  EXPECT_THAT(Measure("oscar+").error().message(), HasSubstr("31 tokens"));
}

}  // namespace
}  // namespace oscar
