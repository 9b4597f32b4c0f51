// For tests: the demo model under any method, ready to generate.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "engine/generator.h"
#include "simd/page_writer.h"

namespace oscar {

// The demo model's weights, as they are or quantised.
inline std::unique_ptr<WeightSource> DemoWeights(const ModelSpec& spec, WeightFormat format) {
  auto source = std::move(*OpenCheckpointWeights(OSCAR_DEMO_MODEL));
  return format == WeightFormat::kFp8 ? QuantizeWeights(std::move(source), spec)
                                      : std::move(source);
}

struct DemoModel {
  explicit DemoModel(const KvPlanOptions& options, int num_threads = 2,
                     uint64_t budget = uint64_t{1} << 30,
                     WeightFormat format = WeightFormat::kCheckpoint)
      : threads(num_threads), pool(budget) {
    const auto config = ReadModelConfig(OSCAR_DEMO_MODEL);
    const auto spec = MakeModelSpec(*config);
    const auto source = DemoWeights(*spec, format);
    auto made = KvPlan::Make(*spec, options, simd::WritePage);
    if (!made.has_value()) ADD_FAILURE() << made.error().ToString();
    plan = std::move(*made);
    auto loaded = LoadCpuModel(*spec, *source, *plan, threads, {});
    if (!loaded.has_value()) ADD_FAILURE() << loaded.error().ToString();
    model = std::move(*loaded);
  }

  static KvPlanOptions Method(std::string name, int cell = 4096) {
    KvPlanOptions options;
    options.method = std::move(name);
    options.prefill_cell = cell;
    return options;
  }

  ThreadPool threads;
  BlockPool pool;
  std::unique_ptr<KvPlan> plan;
  std::unique_ptr<Model> model;
};

// Logits of the last `count` tokens of a prompt.
inline std::vector<float> LogitsOf(Model& model, BlockPool& pool, std::span<const int32_t> tokens,
                                   int64_t count, int chunk = 0) {
  Generator generator(model, pool, 0, chunk);
  std::vector<float> all;
  const Status status =
      generator.Prefill(tokens, count, [&](int64_t, std::span<const float> logits) {
        all.insert(all.end(), logits.begin(), logits.end());
      });
  EXPECT_TRUE(status.ok()) << status.ToString();
  return all;
}
inline std::vector<float> LogitsOf(DemoModel& demo, std::span<const int32_t> tokens, int64_t count,
                                   int chunk = 0) {
  return LogitsOf(*demo.model, demo.pool, tokens, count, chunk);
}

struct Difference {
  double max = 0.0, rms = 0.0;
};
inline Difference Compare(std::span<const float> a, std::span<const float> b) {
  EXPECT_EQ(a.size(), b.size());
  Difference difference;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double d = std::fabs(static_cast<double>(a[i]) - b[i]);
    difference.max = std::isnan(d) ? 1e9 : std::max(difference.max, d);
    difference.rms += d * d;
  }
  difference.rms = std::sqrt(difference.rms / static_cast<double>(a.size()));
  return difference;
}

inline nlohmann::json LoadGoldenJson() {
  return *ParseJson(*ReadFile(OSCAR_TEST_DATA "/golden/golden.json", 1 << 20), "golden.json");
}

// Tokens of no meaning but with the repetitions that make attention look far back.
inline std::vector<int32_t> SomeTokens(size_t count, int vocab = 8192) {
  std::vector<int32_t> tokens(count);
  uint32_t state = 12345;
  for (size_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    tokens[i] = i > 100 && (state >> 28) < 6
                    ? tokens[i - 97]
                    : static_cast<int32_t>((state >> 8) % static_cast<uint32_t>(vocab));
  }
  return tokens;
}

}  // namespace oscar
