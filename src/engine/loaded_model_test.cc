// What a model directory and its options are made into before weights are read.
#include "engine/loaded_model.h"

#include <gtest/gtest.h>

namespace oscar {
namespace {

int64_t PositionsWith(const char* rope_scaling, int64_t max_context = 0) {
  ModelOptions options;
  options.model = OSCAR_DEMO_MODEL;
  options.device = Device::kCpu;
  options.kv_memory = uint64_t{1} << 30;
  options.rope_scaling = rope_scaling;
  options.max_context = max_context;
  const auto plan = LoadedModel::Plan(options);
  EXPECT_TRUE(plan.has_value()) << plan.error().ToString();
  EXPECT_EQ((*plan)->max_context(), max_context > 0 ? max_context : (*plan)->spec().max_positions);
  return (*plan)->spec().max_positions;
}

// Engines take their limit from the spec.
TEST(LoadedModel, StretchedPositionsAreTheModels) {
  EXPECT_EQ(PositionsWith(""), 32768);
  EXPECT_EQ(PositionsWith("yarn:4"), 131072);
  EXPECT_EQ(PositionsWith("yarn:4", 100000), 131072);
  EXPECT_EQ(PositionsWith("linear:1.5"), 49152);
  EXPECT_EQ(PositionsWith("none"), 32768);
}

}  // namespace
}  // namespace oscar
