#include "arch/router.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace oscar {
namespace {

std::vector<ExpertChoice> Route(const ExpertsSpec& spec, const std::vector<float>& scores,
                                const std::vector<float>& bias = {}) {
  std::vector<ExpertChoice> out(static_cast<size_t>(spec.experts_per_token));
  RouteToken(spec, scores, bias, out);
  return out;
}

std::vector<int32_t> Ids(const std::vector<ExpertChoice>& choices) {
  std::vector<int32_t> ids;
  for (const ExpertChoice& choice : choices) ids.push_back(choice.expert);
  return ids;
}

TEST(RouteToken, TheBiasChoosesAndDoesNotWeigh) {
  ExpertsSpec spec{3, 2, 8};
  spec.normalize_weights = true;
  const auto chosen = Route(spec, {0.9f, 0.6f, 0.5f}, {0.0f, 0.0f, 0.3f});
  EXPECT_EQ(Ids(chosen), (std::vector<int32_t>{0, 2}));
  EXPECT_FLOAT_EQ(chosen[0].weight, 0.9f / 1.4f);
  EXPECT_FLOAT_EQ(chosen[1].weight, 0.5f / 1.4f);
}

TEST(RouteToken, WeightsAreScaledAfterTheirSum) {
  ExpertsSpec spec{4, 2, 8};
  spec.weight_scale = 2.5f;
  auto chosen = Route(spec, {0.1f, 0.4f, 0.2f, 0.3f});
  EXPECT_EQ(Ids(chosen), (std::vector<int32_t>{1, 3}));
  EXPECT_FLOAT_EQ(chosen[0].weight, 1.0f);
  spec.normalize_weights = true;
  chosen = Route(spec, {0.1f, 0.4f, 0.2f, 0.3f});
  EXPECT_FLOAT_EQ(chosen[0].weight, 2.5f * 0.4f / 0.7f);
}

TEST(RouteToken, EqualsGoToTheLowerNumber) {
  const ExpertsSpec spec{5, 3, 8};
  EXPECT_EQ(Ids(Route(spec, {0.2f, 0.2f, 0.2f, 0.2f, 0.2f})), (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(Ids(Route(spec, {0.1f, 0.2f, 0.1f, 0.2f, 0.1f})), (std::vector<int32_t>{1, 3, 0}));
}

TEST(RouteToken, GroupsCountAsTheirTwoLargest) {
  ExpertsSpec spec{6, 2, 8};
  spec.groups = 2;
  spec.chosen_groups = 1;
  // The best expert of all is in the group whose two best are less together.
  EXPECT_EQ(Ids(Route(spec, {0.9f, 0.0f, 0.0f, 0.5f, 0.6f, 0.1f})), (std::vector<int32_t>{4, 3}));
  spec.chosen_groups = 2;
  EXPECT_EQ(Ids(Route(spec, {0.9f, 0.0f, 0.0f, 0.5f, 0.6f, 0.1f})), (std::vector<int32_t>{0, 4}));
  // The bias counts in the choice of groups, too.
  spec.chosen_groups = 1;
  EXPECT_EQ(Ids(Route(spec, {0.9f, 0.0f, 0.0f, 0.5f, 0.6f, 0.1f}, {0, 1.0f, 0, 0, 0, 0})),
            (std::vector<int32_t>{1, 0}));
}

TEST(RouteToken, BrokenScoresChooseWithinBounds) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  ExpertsSpec spec{4, 4, 8};
  auto chosen = Route(spec, {nan, 0.5f, nan, 0.25f});
  EXPECT_EQ(Ids(chosen), (std::vector<int32_t>{1, 3, 0, 2}));
  EXPECT_TRUE(std::isnan(chosen[2].weight));
  spec.groups = 2;
  spec.chosen_groups = 1;
  spec.experts_per_token = 2;
  EXPECT_EQ(Ids(Route(spec, {nan, nan, nan, nan})), (std::vector<int32_t>{0, 1}));
}

TEST(RouteToken, AllExpertsMayBeChosen) {
  ExpertsSpec spec{3, 3, 8};
  spec.normalize_weights = true;
  const auto chosen = Route(spec, {0.2f, 0.3f, 0.5f});
  float sum = 0.0f;
  for (const ExpertChoice& choice : chosen) sum += choice.weight;
  EXPECT_FLOAT_EQ(sum, 1.0f);
}

}  // namespace
}  // namespace oscar
