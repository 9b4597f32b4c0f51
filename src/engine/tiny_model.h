// For tests: tiny checkpoints on any backend, and what transformers makes of them.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
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
    auto made = KvPlan::Make(spec, ordered, simd::WriteBlocks);
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
  // So does a cache, in part: rows that follow were seen to be off four times as much (rms 0.01
  // before, 0.04 after).
  const double after = tiny.model->portable() ? 6e-3 : 4 * 6e-3;
  double router = 6e-3;
  for (size_t i = 0; i < golden.greedy.size(); ++i) {
    if (remembers && golden.router_gaps[i] <= 6e-3) break;
    if (golden.router_gaps[i] <= 6e-3) router = after;
    if (golden.top_gaps[i] <= budget.gap || golden.router_gaps[i] <= router) continue;
    ++compared;
    const float* row = all.data() + (golden.ids.size() - 1 + i) * vocab;
    EXPECT_EQ(std::max_element(row, row + vocab) - row, golden.greedy[i]) << "token " << i;
  }
  EXPECT_GE(compared, remembers ? 0 : golden.greedy.size() / 4);
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

// Shapes that no golden has.
struct TinyShape {
  const char* family;
  int hidden, heads, kv_heads, dim, experts, chosen, width, groups, kept, shared;
};

inline std::string ConfigFor(const TinyShape& shape) {
  auto json = nlohmann::json::parse(ConfigOf(shape.family));
  json["hidden_size"] = shape.hidden;
  json["num_attention_heads"] = shape.heads;
  json["num_key_value_heads"] = shape.kv_heads;
  json["head_dim"] = shape.dim;
  json["num_experts_per_tok"] = shape.chosen;
  if (json.contains("experts_per_token")) json["experts_per_token"] = shape.chosen;
  if (json.contains("rotary_dim")) json["rotary_dim"] = shape.dim / 2;
  for (const char* key : {"num_experts", "n_routed_experts", "num_local_experts"}) {
    if (json.contains(key)) json[key] = shape.experts;
  }
  const bool is_minimax = json["model_type"] == "minimax_m2";
  const bool is_gpt_oss = json["model_type"] == "gpt_oss";
  json[is_minimax || is_gpt_oss ? "intermediate_size" : "moe_intermediate_size"] = shape.width;
  if (json["model_type"] == "glm4_moe") {
    json["n_group"] = shape.groups;
    json["topk_group"] = shape.kept;
    json["n_shared_experts"] = shape.shared;
  }
  return json.dump();
}

inline constexpr TinyShape kTinyShapes[] = {{"qwen3_moe", 64, 2, 1, 128, 5, 1, 31, 1, 1, 0},
                                            {"qwen3_moe", 96, 2, 2, 256, 16, 8, 40, 1, 1, 0},
                                            {"qwen3_moe", 128, 8, 2, 64, 3, 3, 200, 1, 1, 0},
                                            {"qwen3_moe_fp8", 200, 2, 1, 64, 6, 2, 130, 1, 1, 0},
                                            {"qwen3_moe_fp8", 256, 2, 1, 128, 4, 4, 128, 1, 1, 0},
                                            {"qwen3_moe_fp8", 64, 2, 1, 64, 4, 2, 33, 1, 1, 0},
                                            {"glm4_moe", 64, 4, 1, 128, 12, 3, 24, 4, 2, 1},
                                            {"glm4_moe", 80, 4, 4, 64, 6, 6, 17, 1, 1, 0},
                                            {"glm4_moe", 64, 2, 1, 256, 9, 2, 48, 3, 1, 3},
                                            {"glm4_moe_fp8", 72, 4, 2, 64, 8, 4, 37, 2, 2, 1},
                                            {"glm4_moe_fp8", 64, 2, 2, 128, 4, 1, 64, 1, 1, 2},
                                            {"minimax_m2", 64, 4, 4, 64, 7, 2, 29, 1, 1, 0},
                                            {"minimax_m2", 96, 2, 1, 256, 32, 8, 16, 1, 1, 0},
                                            {"minimax_m2_fp8", 160, 4, 2, 128, 4, 2, 144, 1, 1, 0},
                                            {"gpt_oss", 80, 6, 3, 64, 5, 1, 31, 1, 1, 0},
                                            {"gpt_oss", 64, 8, 1, 128, 16, 4, 40, 1, 1, 0},
                                            {"gpt_oss_mxfp4", 64, 2, 2, 256, 32, 4, 96, 1, 1, 0},
                                            {"gpt_oss_mxfp4", 160, 16, 2, 64, 3, 3, 32, 1, 1, 0}};
inline std::string NameOfShape(const testing::TestParamInfo<TinyShape>& item) {
  return std::string(item.param.family) + "_" + std::to_string(item.index);
}

// What is wrong with a checkpoint is said by name.
inline void ExpectNamedFaults(Device device) {
  using ::testing::HasSubstr;

  struct Fault {
    const char* family;
    std::function<void(TinyTensors*)> change;
    std::vector<const char*> expected;
  };
  const auto cut = [](const char* name, std::vector<int64_t> shape) {
    return [name, shape](TinyTensors* tensors) {
      TinyTensor& tensor = tensors->at(name);
      const size_t each = tensor.dtype == "F32" ? 4 : tensor.dtype == "BF16" ? 2 : 1;
      size_t count = each;
      for (const int64_t extent : shape) count *= static_cast<size_t>(extent);
      tensor.shape = shape;
      tensor.bytes.resize(count);
    };
  };
  const std::vector<Fault> faults = {
      {"qwen3_moe",
       [](TinyTensors* t) { t->erase("model.layers.2.mlp.experts.7.up_proj.weight"); },
       {"model.layers.2.mlp.experts.7.up_proj.weight"}},
      {"minimax_m2",
       [](TinyTensors* t) { t->erase("model.layers.1.block_sparse_moe.experts.3.w2.weight"); },
       {"model.layers.1.block_sparse_moe.experts.3.w2.weight"}},
      {"qwen3_moe",
       [](TinyTensors* t) { t->erase("model.layers.0.mlp.gate.weight"); },
       {"model.layers.0.mlp.gate.weight"}},
      {"qwen3_moe_fp8",
       cut("model.layers.0.mlp.experts.1.gate_proj.weight_scale_inv", {1, 1}),
       {}},  // one scale for all is a form that there is
      {"qwen3_moe_fp8",
       cut("model.layers.0.mlp.experts.1.gate_proj.weight_scale_inv", {3, 2}),
       {"model.layers.0.mlp.experts.1.gate_proj.weight_scale_inv", "[3, 2]", "[2, 2]"}},
      {"qwen3_moe_fp8",
       [](TinyTensors* t) { t->erase("model.layers.0.mlp.experts.1.gate_proj.weight_scale_inv"); },
       {"model.layers.0.mlp.experts.1.gate_proj.weight", "_scale_inv"}},
      {"glm4_moe_fp8",
       cut("model.layers.1.mlp.experts.0.down_proj.weight_scale", {95, 1}),
       {"model.layers.1.mlp.experts.0.down_proj.weight_scale", "[95, 1]"}},
      {"glm4_moe",
       cut("model.layers.1.mlp.gate.e_score_correction_bias", {7}),
       {"model.layers.1.mlp.gate.e_score_correction_bias", "[7]", "[8]"}},
      {"glm4_moe",
       [](TinyTensors* t) {
         std::string& bytes = t->at("model.layers.1.mlp.gate.e_score_correction_bias").bytes;
         const float nan = NAN;
         std::memcpy(bytes.data() + 8, &nan, 4);
       },
       {"model.layers.1.mlp.gate.e_score_correction_bias", "not a finite number at element 2"}},
      {"glm4_moe",
       [](TinyTensors* t) {
         t->at("model.layers.1.mlp.gate.e_score_correction_bias").dtype = "I32";
       },
       {"model.layers.1.mlp.gate.e_score_correction_bias", "I32"}},
      {"minimax_m2",
       cut("model.layers.0.self_attn.q_norm.weight", {64}),
       {"model.layers.0.self_attn.q_norm.weight", "[64]", "[384]"}},
      {"qwen3_moe_fp8",
       [](TinyTensors* t) {
         t->at("model.layers.0.mlp.experts.2.down_proj.weight").bytes[5] = '\x7f';
       },
       {"model.layers.0.mlp.experts.2.down_proj.weight", "not a number at element 5"}},
      {"gpt_oss",
       cut("model.layers.2.self_attn.sinks", {3}),
       {"model.layers.2.self_attn.sinks", "[3]", "[4]"}},
      {"gpt_oss",
       [](TinyTensors* t) { t->erase("model.layers.1.self_attn.sinks"); },
       {"model.layers.1.self_attn.sinks"}},
      {"gpt_oss",
       [](TinyTensors* t) {
         const uint16_t nan = 0x7fc0;
         std::memcpy(t->at("model.layers.0.self_attn.sinks").bytes.data() + 2, &nan, 2);
       },
       {"model.layers.0.self_attn.sinks", "not a finite number at element 1"}},
      {"gpt_oss",
       [](TinyTensors* t) { t->erase("model.layers.1.self_attn.o_proj.bias"); },
       {"model.layers.1.self_attn.o_proj.bias"}},
      {"gpt_oss",
       [](TinyTensors* t) { t->erase("model.layers.1.mlp.router.bias"); },
       {"model.layers.1.mlp.router.bias"}},
      {"gpt_oss",
       [](TinyTensors* t) { t->erase("model.layers.1.mlp.experts.gate_up_proj_bias"); },
       {"model.layers.1.mlp.experts.gate_up_proj_bias"}},
      {"gpt_oss",
       cut("model.layers.1.mlp.experts.down_proj_bias", {6, 95}),
       {"model.layers.1.mlp.experts.down_proj_bias", "[95]", "[96]"}},
      {"gpt_oss",
       cut("model.layers.1.mlp.experts.down_proj", {5, 64, 96}),
       {"model.layers.1.mlp.experts.down_proj", "[5, 64, 96]", "expert 5"}},
      {"gpt_oss",
       [](TinyTensors* t) {
         t->at("model.layers.1.mlp.experts.down_proj").shape = {6, 96, 64};
       },
       {"model.layers.1.mlp.experts.down_proj", "[96, 64]", "[64, 96]"}},
      {"gpt_oss",
       [](TinyTensors* t) { t->erase("model.layers.2.mlp.experts.gate_up_proj"); },
       {"model.layers.2.mlp.experts.gate_up_proj"}},
      {"gpt_oss_mxfp4",
       [](TinyTensors* t) { t->erase("model.layers.2.mlp.experts.gate_up_proj_scales"); },
       {"model.layers.2.mlp.experts.gate_up_proj_scales"}},
      {"gpt_oss_mxfp4",
       cut("model.layers.2.mlp.experts.gate_up_proj_scales", {6, 128, 2}),
       {"model.layers.2.mlp.experts.gate_up_proj_scales", "[128, 2]", "[128, 3]"}},
      {"gpt_oss_mxfp4",
       cut("model.layers.0.mlp.experts.down_proj_blocks", {6, 96, 2, 8}),
       {"model.layers.0.mlp.experts.down_proj_blocks", "[96, 2, 8]", "[96, 2, 16]"}},
      {"gpt_oss_mxfp4",
       [](TinyTensors* t) { t->at("model.layers.0.mlp.experts.down_proj_blocks").dtype = "I8"; },
       {"model.layers.0.mlp.experts.down_proj_blocks", "I8", "U8"}},
      {"gpt_oss_mxfp4",
       [](TinyTensors* t) {
         t->at("model.layers.2.mlp.experts.down_proj_scales").bytes[5] = '\xff';
       },
       {"model.layers.2.mlp.experts.down_proj_scales", "255", "element 5", "not a number"}},
      {"gpt_oss_mxfp4",
       [](TinyTensors* t) {
         t->at("model.layers.2.mlp.experts.down_proj_scales").bytes[7] = '\x01';
       },
       {"model.layers.2.mlp.experts.down_proj_scales", "block scale 1 ", "out of range"}},
      {"qwen2",
       [](TinyTensors* t) { t->erase("model.layers.1.self_attn.k_proj.bias"); },
       {"model.layers.1.self_attn.k_proj.bias"}},
      {"qwen3_5",
       [](TinyTensors* t) { t->erase("model.language_model.layers.2.linear_attn.A_log"); },
       {"model.language_model.layers.2.linear_attn.A_log"}},
      {"qwen3_5",
       cut("model.language_model.layers.0.linear_attn.conv1d.weight", {224, 1, 3}),
       {"model.language_model.layers.0.linear_attn.conv1d.weight", "[224, 1, 3]", "[224, 1, 4]"}},
      {"qwen3_5",
       cut("model.language_model.layers.0.linear_attn.dt_bias", {3}),
       {"model.language_model.layers.0.linear_attn.dt_bias", "[3]", "[4]"}},
      {"qwen3_5",
       cut("model.language_model.layers.3.linear_attn.in_proj_qkv.weight", {128, 96}),
       {"model.language_model.layers.3.linear_attn.in_proj_qkv.weight", "[128, 96]", "[224, 96]"}},
      {"qwen3_5",
       cut("model.language_model.layers.1.self_attn.q_proj.weight", {512, 96}),  // without gates
       {"model.language_model.layers.1.self_attn.q_proj.weight", "[512, 96]", "[1024, 96]"}},
      {"qwen3_5_moe",
       [](TinyTensors* t) {
         t->erase("model.language_model.layers.1.mlp.shared_expert_gate.weight");
       },
       {"model.language_model.layers.1.mlp.shared_expert_gate.weight"}},
      {"qwen3_5_moe",
       [](TinyTensors* t) {
         const float infinity = INFINITY;
         std::memcpy(t->at("model.language_model.layers.0.linear_attn.A_log").bytes.data(),
                     &infinity, 4);
       },
       {"model.language_model.layers.0.linear_attn.A_log", "not a finite number at element 0"}},
      {"qwen3_next",
       cut("model.layers.0.linear_attn.norm.weight", {39}),
       {"model.layers.0.linear_attn.norm.weight", "[39]", "[40]"}},
      {"qwen3_next",
       [](TinyTensors* t) { t->erase("model.layers.1.linear_attn.in_proj_ba.weight"); },
       {"model.layers.1.linear_attn.in_proj_ba.weight"}},
  };
  for (const Fault& fault : faults) {
    const TinyCheckpoint checkpoint(ConfigOf(fault.family), fault.change);
    BackendOptions options;
    options.max_batch_tokens = 32;
    options.max_sequences = 1;
    TinyModel tiny(checkpoint.path(), TinyModel::Bf16(), 2, options, false, uint64_t{1} << 26,
                   device);
    if (!CheckDeviceFeatures(device, tiny.spec).ok()) continue;  // that is what it says
    EXPECT_EQ(tiny.status.ok(), fault.expected.empty()) << tiny.status.ToString();
    for (const char* expected : fault.expected) {
      EXPECT_THAT(tiny.status.message(), HasSubstr(expected));
    }
  }
}

}  // namespace oscar
