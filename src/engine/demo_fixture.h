// For tests: the demo model under any method, ready to generate.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "engine/generator.h"
#include "simd/page_writer.h"

namespace oscar {

struct DemoModel {
  explicit DemoModel(const KvPlanOptions& options, int num_threads = 2,
                     uint64_t budget = uint64_t{1} << 30)
      : threads(num_threads), pool(budget) {
    const auto config = ReadModelConfig(OSCAR_DEMO_MODEL);
    const auto spec = MakeModelSpec(*config);
    auto source = OpenCheckpointWeights(OSCAR_DEMO_MODEL);
    auto made = KvPlan::Make(*spec, options, simd::WritePage);
    if (!made.has_value()) ADD_FAILURE() << made.error().ToString();
    plan = std::move(*made);
    auto loaded = LoadCpuModel(*spec, **source, *plan, threads, {});
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
