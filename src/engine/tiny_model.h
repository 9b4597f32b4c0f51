// For tests: tiny checkpoints on any backend, and what transformers makes of them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend/error_budgets.h"
#include "base/file.h"
#include "base/json.h"
#include "base/rng.h"
#include "devices/devices.h"
#include "engine/generator.h"
#include "engine/tiny_checkpoint.h"
#include "io/safetensors.h"
#include "model/load.h"
#include "reference/reference_backend.h"
#include "simd/block_writer.h"

namespace oscar {

inline constexpr char kTinyModels[] = OSCAR_TEST_DATA "/tiny-models/";

inline std::string ConfigOf(const std::string& name) {
  return *ReadFile(kTinyModels + name + "/config.json", 1 << 20);
}

// A checkpoint on a backend.
struct TinyModel {
  explicit TinyModel(const std::string& directory, const KvPlanOptions& kv = Bf16(),
                     int num_threads = 2, const BackendOptions& options = {},
                     bool is_reference = false, uint64_t budget = uint64_t{1} << 28,
                     Device device = Device::kCpu)
      : threads(num_threads) {
    const auto config = ReadModelConfig(directory);
    spec = *MakeModelSpec(*config);
    auto source =
        OpenCheckpointWeights(directory, {config->fp8_block_rows, config->fp8_block_columns});
    if (!source.has_value()) {
      status = source.error();
      return;
    }
    KvPlanOptions ordered = kv;
    ordered.order = OrderOf(device);
    auto made = KvPlan::Make(spec, ordered, simd::WriteBlock);
    if (!made.has_value()) {
      status = made.error();
      return;
    }
    plan = std::move(*made);
    pool = std::make_unique<PagePool>(budget, plan->host_sealer());
    BackendOptions sized = options;
    if (device == Device::kCuda) sized.kv_bytes = budget;
    if (is_reference) {
      auto backend = MakeReferenceBackend(spec, **source, *plan, threads);
      if (!backend.has_value()) {
        status = backend.error();
        return;
      }
      model = std::move(*Decoder::Make(std::move(*backend)));
      return;
    }
    auto loaded = LoadModel(device, spec, **source, *plan, threads, sized);
    if (!loaded.has_value()) {
      status = loaded.error();
      return;
    }
    model = std::move(*loaded);
    if (PageMemory* memory = model->backend().page_memory()) {
      pool = std::make_unique<PagePool>(model->backend().page_budget(), *memory);
    }
  }

  static KvPlanOptions Bf16() {
    KvPlanOptions options;
    options.method = "bf16";
    return options;
  }

  std::vector<float> Logits(std::span<const int32_t> ids, int chunk = 0) {
    Generator generator(*model, *pool, 0, chunk);
    std::vector<float> logits;
    const Status read = generator.Prefill(ids, static_cast<int64_t>(ids.size()),
                                          [&](int64_t, std::span<const float> part) {
                                            logits.insert(logits.end(), part.begin(), part.end());
                                          });
    EXPECT_TRUE(read.ok()) << read.ToString();
    return logits;
  }
  std::vector<int32_t> Greedy(const std::vector<int32_t>& ids, int64_t count) {
    Generator generator(*model, *pool);
    GenerateRequest request;
    request.prompt = ids;
    request.sampling.temperature = 0.0f;
    request.max_tokens = count;
    const auto result = generator.Generate(request);
    EXPECT_TRUE(result.has_value()) << result.error().ToString();
    return result.has_value() ? result->tokens : std::vector<int32_t>{};
  }

  ThreadPool threads;
  ModelSpec spec;
  Status status;
  std::unique_ptr<KvPlan> plan;
  std::unique_ptr<Decoder> model;
  std::unique_ptr<PagePool> pool;  // goes before the device's memory
};

struct Golden {
  std::vector<int32_t> ids, greedy;
  std::vector<size_t> positions;
  std::vector<double> top_gaps, router_gaps;
  std::vector<float> logits;

  explicit Golden(const std::string& name) {
    const auto json =
        *ParseJson(*ReadFile(kTinyModels + std::string("golden.json"), 1 << 20), "golden");
    const auto& item = json["cases"][name];
    ids = item["ids"].get<std::vector<int32_t>>();
    greedy = item["greedy_ids"].get<std::vector<int32_t>>();
    positions = item["positions"].get<std::vector<size_t>>();
    top_gaps = item["top_gaps"].get<std::vector<double>>();
    router_gaps = item["router_gaps"].get<std::vector<double>>();
    const auto file = SafetensorsFile::Open(kTinyModels + std::string("golden.safetensors"));
    logits = *ToFloatVector(*file->Get(name));
  }
  // The largest error and the largest root mean square of a row.
  std::pair<double, double> Errors(const std::vector<float>& all) const {
    const size_t vocab = logits.size() / positions.size();
    double largest = 0.0, worst = 0.0;
    for (size_t i = 0; i < positions.size(); ++i) {
      double squares = 0.0;
      for (size_t j = 0; j < vocab; ++j) {
        const double e =
            std::fabs(static_cast<double>(logits[i * vocab + j]) - all[positions[i] * vocab + j]);
        largest = std::max(largest, e);
        squares += e * e;
      }
      worst = std::max(worst, std::sqrt(squares / static_cast<double>(vocab)));
    }
    return {largest, worst};
  }
  // How many greedy tokens there are up to the first that rounding may decide otherwise.
  size_t Certain(double top, double router) const {
    size_t count = 0;
    while (count < greedy.size() && top_gaps[count] > top && router_gaps[count] > router) ++count;
    return count;
  }
};

// The backend's budgets against transformers' logits, and its greedy tokens.
inline void ExpectTransformers(const Golden& golden, TinyModel& tiny, const std::string& name) {
  SamenessBudget budget = BudgetOf("bf16");
  // The delta rule writes differences of values that are close, so that rounding to BF16 on the way
  // (of activations; of FP8 weights that are multiplied out) shows about twice as much.
  const bool has_state = tiny.spec.num_state_layers() > 0;
  if (has_state) budget.rms *= 2, budget.gap *= 2;
  const auto [largest, rms] = golden.Errors(tiny.Logits(golden.ids));
  EXPECT_LE(rms, budget.rms);
  EXPECT_LE(largest, budget.gap);
  std::printf("%s: logits differ by at most %.4f, rms %.4f\n", name.c_str(), largest, rms);
  // Token by token behind transformers' own: equal unless the gap is below the budget, or other
  // experts were nearly chosen.
  std::vector<int32_t> ids = golden.ids;
  ids.insert(ids.end(), golden.greedy.begin(), golden.greedy.end());
  const std::vector<float> all = tiny.Logits(ids);
  const auto vocab = static_cast<size_t>(tiny.spec.vocab_size);
  size_t compared = 0;
  // A state remembers that other experts were chosen: then what follows says nothing.
  const bool remembers = has_state && !tiny.model->portable();
  for (size_t i = 0; i < golden.greedy.size(); ++i) {
    if (remembers && golden.router_gaps[i] <= 6e-3) break;
    if (golden.top_gaps[i] <= budget.gap || golden.router_gaps[i] <= 6e-3) continue;
    ++compared;
    const float* row = all.data() + (golden.ids.size() - 1 + i) * vocab;
    EXPECT_EQ(std::max_element(row, row + vocab) - row, golden.greedy[i]) << "token " << i;
  }
  EXPECT_GE(compared, remembers ? 0 : golden.greedy.size() / 3);
  std::vector<int32_t> expected = golden.greedy;
  expected.resize(golden.Certain(budget.gap, 6e-3));
  if (expected.empty()) return;
  EXPECT_EQ(tiny.Greedy(golden.ids, static_cast<int64_t>(expected.size())), expected);
}

inline std::vector<int32_t> SomeIds(size_t count, uint64_t seed = 5) {
  const Philox rng(seed, 0);
  std::vector<int32_t> ids(count);
  for (size_t i = 0; i < count; ++i) ids[i] = 2 + static_cast<int32_t>(rng.Below(i, 150));
  return ids;
}

inline KvPlanOptions SmallWindows() {
  KvPlanOptions options;
  options.method = "oscar+";
  options.prefill_cell = 128;
  options.recent = 64;
  return options;
}

}  // namespace oscar
