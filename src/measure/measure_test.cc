// On the demo model.
#include <gtest/gtest.h>

#include <map>

#include "engine/generator.h"
#include "measure/layer_errors.h"
#include "measure/text_metrics.h"

namespace oscar {
namespace {

ModelOptions Options(const std::string& kv) {
  ModelOptions options;
  options.model = OSCAR_DEMO_MODEL;
  options.kv = kv;
  options.prefill_cell = 64;
  options.kv_memory = uint64_t{1} << 29;
  options.num_threads = 2;
  options.device = Device::kCpu;
  return options;
}

std::vector<int32_t> Prompt(size_t count, uint32_t seed) {
  std::vector<int32_t> tokens(count);
  for (size_t i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    tokens[i] = static_cast<int32_t>((seed >> 8) % 8000);
  }
  return tokens;
}

TEST(LayerErrors, FollowTheMethods) {
  auto model = LoadedModel::Load(Options("bf16"));
  ASSERT_TRUE(model.has_value());
  const std::vector<std::vector<int32_t>> prompts = {Prompt(512, 3)};
  const auto probe = LayerErrorProbe::Capture(**model, prompts);
  ASSERT_TRUE(probe.has_value()) << probe.error().ToString();
  std::map<std::string, double> mean;
  for (const char* kv : {"bf16", "naive", "quarot", "lloyd-max", "saw-int4", "oscar+"}) {
    const auto plan = LoadedModel::Plan(Options(kv));
    ASSERT_TRUE(plan.has_value());
    const auto errors = probe->Measure((*plan)->kv());
    ASSERT_TRUE(errors.has_value());
    ASSERT_EQ(errors->size(), 8u);
    for (const auto& [k, v] : *errors) mean[kv] += (k + v) / 16;
  }
  EXPECT_EQ(mean["bf16"], 0);
  EXPECT_LT(mean["saw-int4"], 0.25 * mean["quarot"]);  // two more bits: 12 dB
  EXPECT_LT(mean["oscar+"], mean["quarot"]);
  EXPECT_LT(mean["lloyd-max"], mean["quarot"]);
  EXPECT_LT(mean["oscar+"], mean["naive"]);
}

// Against one sequence at a time with the sampler's own log-probabilities.
TEST(TextMetrics, AgreeWithASingleReading) {
  const std::vector<std::vector<int32_t>> windows = {Prompt(200, 5), Prompt(200, 6)};
  auto plain = LoadedModel::Load(Options("bf16"));
  ASSERT_TRUE(plain.has_value());
  double sum = 0;
  for (const std::vector<int32_t>& window : windows) {
    Generator generator((*plain)->model(), (*plain)->pool());
    const auto on_logits = [&](int64_t position, std::span<const float> logits) {
      const auto vocab = static_cast<size_t>((*plain)->spec().vocab_size);
      for (size_t i = 0; i * vocab < logits.size(); ++i) {
        const size_t at = static_cast<size_t>(position) + i + 1;
        if (at < 200) sum -= LogProbability(logits.subspan(i * vocab, vocab), window[at]);
      }
    };
    ASSERT_TRUE(generator.Prefill(window, 200, on_logits).ok());
  }
  ReferenceLogits reference;
  reference.stride = 3;
  const auto own = MeasureText(**plain, windows, &reference, /*fill=*/true, {});
  ASSERT_TRUE(own.has_value());
  EXPECT_EQ(own->tokens, 398);
  EXPECT_NEAR(own->nll, sum / 398, 1e-5);
  const auto again = MeasureText(**plain, windows, &reference, /*fill=*/false, {});
  EXPECT_EQ(again->nll, own->nll);
  EXPECT_EQ(again->compared, 2 * 67);
  EXPECT_NEAR(again->kl, 0, 1e-6);
  EXPECT_EQ(again->top1, 1.0);
  auto lossy = LoadedModel::Load(Options("naive"));
  ASSERT_TRUE(lossy.has_value());
  const auto worse = MeasureText(**lossy, windows, &reference, /*fill=*/false, {});
  EXPECT_GT(worse->kl, 0.01);
  EXPECT_LT(worse->top1, 1.0);
  EXPECT_EQ(ReferenceStride(1000, 1000, 4000000), 1);
  EXPECT_EQ(ReferenceStride(1000, 1000, 3999999), 2);
}

}  // namespace
}  // namespace oscar
