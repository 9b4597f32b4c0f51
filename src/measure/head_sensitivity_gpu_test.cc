// The proxy read on a GPU against the one read on the CPU. On demand only: ctest -L gpu.
#include <gtest/gtest.h>

#include "base/rng.h"
#include "measure/head_sensitivity.h"

namespace oscar {
namespace {

TEST(MeasureSensitivities, ProxyOfAGpuIsTheCpus) {
  std::vector<std::vector<int32_t>> texts(3);
  const Philox random(11, 0);
  for (uint64_t s = 0; s < texts.size(); ++s) {
    for (uint64_t i = 0; i < 700 + 600 * s; ++i) {
      texts[s].push_back(static_cast<int32_t>(10 + random.Below(s * 10000 + i, 2000)));
    }
  }
  SensitivityOptions options;
  options.model.model = OSCAR_DEMO_MODEL;
  options.use_proxy = true;
  options.show_progress = false;
  options.model.device = Device::kCpu;
  const auto cpu = MeasureSensitivities(options, texts);
  ASSERT_TRUE(cpu.has_value()) << cpu.error().ToString();
  options.model.device = Device::kCuda;
  const auto gpu = MeasureSensitivities(options, texts);
  ASSERT_TRUE(gpu.has_value()) << gpu.error().ToString();
  ASSERT_EQ(gpu->sensitivities.layers.size(), cpu->sensitivities.layers.size());
  EXPECT_EQ(gpu->sensitivities.model_fingerprint, cpu->sensitivities.model_fingerprint);
  for (const auto& [id, heads] : cpu->sensitivities.layers) {
    const auto& mine = gpu->sensitivities.layers.at(id);
    for (size_t h = 0; h < heads.size(); ++h) {
      EXPECT_NEAR(mine[h].k, heads[h].k, 0.03 * heads[h].k) << "layer " << id << ", head " << h;
      EXPECT_NEAR(mine[h].v, heads[h].v, 0.03 * heads[h].v) << "layer " << id << ", head " << h;
    }
  }
  EXPECT_GT(RankCorrelation(gpu->sensitivities, cpu->sensitivities), 0.98);
}

}  // namespace
}  // namespace oscar
