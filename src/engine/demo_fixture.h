// For tests: the demo model under any method, ready to generate.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "backend/error_budgets.h"
#include "base/file.h"
#include "base/json.h"
#include "engine/generator.h"
#include "engine/sampler.h"
#include "io/safetensors.h"
#include "model/load.h"
#include "simd/block_writer.h"

namespace oscar {

// The demo model's weights, as they are or quantised.
inline std::unique_ptr<WeightSource> DemoWeights(const ModelSpec& spec, WeightFormat format) {
  auto source = std::move(*OpenCheckpointWeights(OSCAR_DEMO_MODEL));
  return format == WeightFormat::kFp8 ? QuantizeWeights(std::move(source), spec)
                                      : std::move(source);
}

inline ModelSpec DemoSpec() { return *MakeModelSpec(*ReadModelConfig(OSCAR_DEMO_MODEL)); }

struct DemoModel {
  explicit DemoModel(const KvPlanOptions& options, int num_threads = 2,
                     uint64_t budget = uint64_t{1} << 30,
                     WeightFormat format = WeightFormat::kCheckpoint,
                     const BackendOptions& cpu = {})
      : threads(num_threads), plan(PlanOf(options)), pool(budget, plan->host_sealer()) {
    const ModelSpec spec = DemoSpec();
    const auto source = DemoWeights(spec, format);
    auto loaded = LoadModel(Device::kCpu, spec, *source, *plan, threads, cpu);
    if (!loaded.has_value()) ADD_FAILURE() << loaded.error().ToString();
    model = std::move(*loaded);
  }

  static std::unique_ptr<KvPlan> PlanOf(const KvPlanOptions& options) {
    auto made = KvPlan::Make(DemoSpec(), options, simd::WriteBlocks);
    if (!made.has_value()) ADD_FAILURE() << made.error().ToString();
    return std::move(*made);
  }
  // A `--kv` name, or "oscar+ mixed": 2.75 bits over sides of 2, 3 and 4.
  static KvPlanOptions Method(std::string name, int cell = 4096) {
    KvPlanOptions options;
    if (name == "oscar+ mixed") {
      name = "oscar+";
      options.bits = 2.75;
      SensitivityMap& map = options.sensitivities.emplace();
      for (int slot = 0; slot < DemoSpec().num_kv_layers(); ++slot) {
        auto& layer = map.emplace_back();
        for (int h = 0; h < DemoSpec().attention().num_kv_heads; ++h) {
          layer.push_back({1.0 / (1 + (5 * slot + 3 * h) % 7), 1.0 / (2 + (3 * slot + h) % 5)});
        }
      }
    }
    options.method = std::move(name);
    options.prefill_cell = cell;
    return options;
  }

  ThreadPool threads;
  std::unique_ptr<KvPlan> plan;
  PagePool pool;
  std::unique_ptr<Model> model;
};

// Logits of the last `count` tokens of a prompt.
inline std::vector<float> LogitsOf(Model& model, PagePool& pool, std::span<const int32_t> tokens,
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

// The logits of transformers, to the BF16 budget.
inline void ExpectGoldenLogits(Model& model, PagePool& pool) {
  const auto golden = LoadGoldenJson();
  auto tensors = SafetensorsFile::Open(OSCAR_TEST_DATA "/golden/golden.safetensors");
  ASSERT_TRUE(tensors.has_value());
  for (size_t i = 0; i < golden["texts"].size(); ++i) {
    const auto ids = golden["texts"][i]["ids"].get<std::vector<int32_t>>();
    const auto expected = *ToFloatVector(*tensors->Get("logits_" + std::to_string(i)));
    const Difference d = Compare(LogitsOf(model, pool, ids, 4), expected);
    std::printf("text %zu: max %.4f rms %.5f\n", i, d.max, d.rms);
    EXPECT_LE(d.max, 8e-2) << "text " << i;
    EXPECT_LE(d.rms, 1.5e-2) << "text " << i;
  }
}

// Greedy answers, token by token.
inline void ExpectGoldenChats(Model& model, PagePool& pool) {
  const auto golden = LoadGoldenJson();
  ASSERT_EQ(golden["chats"].size(), 4u);
  for (const auto& chat : golden["chats"]) {
    Generator generator(model, pool);
    GenerateRequest request;
    request.prompt = chat["prompt_ids"].get<std::vector<int32_t>>();
    request.sampling.temperature = 0.0f;
    request.stop_tokens = model.spec().stop_tokens;
    const auto result = generator.Generate(request);
    ASSERT_TRUE(result.has_value()) << result.error().ToString();
    EXPECT_EQ(result->tokens, chat["greedy_ids"].get<std::vector<int32_t>>()) << chat["user"];
    EXPECT_EQ(result->reason, FinishReason::kStop);
  }
}

// Two models over a prompt and then over `steps` generated tokens, both fed the first one's
// choices.
struct Followed {
  double worst_max = 0.0, worst_rms = 0.0;  // of a row of logits
  int diverged = 0;                         // steps at which the second would have chosen otherwise
  double widest_gap = 0.0;                  // of the first's two largest logits at such steps
  int64_t sealed_pages[2] = {};
};
inline Followed Follow(Model& first, PagePool& first_pool, Model& second, PagePool& second_pool,
                       std::span<const int32_t> prompt, int steps) {
  Followed out;
  Generator generators[2] = {Generator(first, first_pool), Generator(second, second_pool)};
  std::vector<float> logits[2];
  for (int i = 0; i < 2; ++i) {
    const Status status = generators[i].Prefill(
        prompt, 1,
        [&](int64_t, std::span<const float> row) { logits[i].assign(row.begin(), row.end()); });
    EXPECT_TRUE(status.ok()) << status.ToString();
    if (!status.ok()) return out;
  }
  for (int step = 0; step < steps; ++step) {
    const Difference d = Compare(logits[1], logits[0]);
    out.worst_max = std::max(out.worst_max, d.max);
    out.worst_rms = std::max(out.worst_rms, d.rms);
    const auto top = TopLogprobs(logits[0], 2);
    if (TopLogprobs(logits[1], 1)[0].token != top[0].token) {
      ++out.diverged;
      out.widest_gap = std::max(out.widest_gap, double{top[0].logprob} - top[1].logprob);
    }
    for (int i = 0; i < 2; ++i) {
      const auto next = generators[i].Step(top[0].token);
      EXPECT_TRUE(next.has_value());
      if (!next.has_value()) return out;
      logits[i].assign(next->begin(), next->end());
    }
  }
  for (int i = 0; i < 2; ++i) out.sealed_pages[i] = generators[i].cache().Usage().sealed_pages;
  return out;
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
