// For tests: the demo model and models of any shape on the GPU, and their twins on the CPU.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "engine/demo_fixture.h"
#include "rotation/rotation_file.h"
#include "rotation/sensitivity_file.h"

namespace oscar {

struct GpuModel {
  explicit GpuModel(const KvPlanOptions& options, const BackendOptions& cuda = {},
                    WeightFormat format = WeightFormat::kCheckpoint)
      : GpuModel(DemoSpec(), *DemoWeights(DemoSpec(), format), options, cuda) {}
  GpuModel(const ModelSpec& spec, const WeightSource& source, KvPlanOptions options,
           BackendOptions cuda)
      : threads(2) {
    options.order = CodeOrder::kTensorCore;
    plan = std::move(*KvPlan::Make(spec, options, simd::WriteBlocks));
    if (cuda.kv_bytes == 0) cuda.kv_bytes = uint64_t{1} << 30;
    auto loaded = LoadModel(Device::kCuda, spec, source, *plan, threads, cuda);
    if (!loaded.has_value()) {
      ADD_FAILURE() << loaded.error().ToString();
      std::abort();  // no GPU: the whole program fails, it does not skip
    }
    model = std::move(*loaded);
    pool = std::make_unique<PagePool>(backend().page_budget(), *backend().page_memory());
  }

  Backend& backend() { return model->backend(); }

  ThreadPool threads;
  std::unique_ptr<KvPlan> plan;
  std::unique_ptr<Decoder> model;
  std::unique_ptr<PagePool> pool;
};

inline BackendOptions Sized(int tokens, int sequences) {
  BackendOptions options;
  options.max_batch_tokens = tokens;
  options.max_sequences = sequences;
  return options;
}

// Weights that are made in fp32 and rounded to BF16 where that is asked for.
class RoundedWeights : public WeightSource {
 public:
  Status LoadBf16Rows(const std::string& name, std::span<const int64_t> shape, WeightRows rows,
                      std::span<Bf16> out) const override {
    std::vector<float> values(out.size());
    OSCAR_RETURN_IF_ERROR(LoadRows(name, shape, rows, values));
    std::ranges::transform(values, out.begin(), ToBf16);
    return {};
  }
};

// Matrices of some size, norms and biases that are not all the same.
class WavyWeights : public RoundedWeights {
 public:
  Status LoadRows(const std::string& name, std::span<const int64_t> shape, WeightRows rows,
                  std::span<float> out) const override {
    if (shape.size() > 1) {
      OSCAR_RETURN_IF_ERROR(inner_->LoadRows(name, shape, rows, out));
      for (float& x : out) x *= 5.0f;
      return {};
    }
    const float middle = name.ends_with("norm.weight") ? 1.0f : 0.0f;
    for (size_t i = 0; i < out.size(); ++i) {
      const auto at = static_cast<double>(i + static_cast<size_t>(rows.first) + name.size());
      out[i] = middle + 0.4f * static_cast<float>(std::sin(0.37 * at));
    }
    return {};
  }
  bool Has(const std::string&) const override { return true; }
  uint64_t Fingerprint() const override { return 1; }

 private:
  std::unique_ptr<WeightSource> inner_ = MakeRandomWeights(11);
};

// The CPU's model of any shape and weights.
struct CpuModelOf {
  CpuModelOf(const ModelSpec& spec, const WeightSource& source, const KvPlanOptions& options,
             const BackendOptions& cpu = {})
      : plan(std::move(*KvPlan::Make(spec, options, simd::WriteBlocks))),
        model(std::move(*LoadModel(Device::kCpu, spec, source, *plan, threads, cpu))) {}
  ThreadPool threads{2};
  std::unique_ptr<KvPlan> plan;
  PagePool pool{uint64_t{1} << 30, plan->host_sealer()};
  std::unique_ptr<Model> model;
};

// The demo model under a method, in cells of 512.
struct MethodCase {
  const char* name;
  WeightFormat weights = WeightFormat::kCheckpoint;
  bool rotated = false;  // by the model's calibrated rotation
  int group_dims = 0;    // 0: the method's own
};
inline KvPlanOptions PlanOf(const MethodCase& c) {
  KvPlanOptions method = DemoModel::Method(c.name, /*cell=*/512);
  if (c.group_dims > 0) {
    // Scales of smaller groups come on top of the codes' bits.
    if (method.bits.has_value()) {
      *method.bits += 32.0 / c.group_dims - 32.0 / DemoSpec().attention().head_dim;
    }
    method.group_dims = c.group_dims;
  }
  if (c.rotated) method.rotation = *LoadRotation(OSCAR_DEMO_MODEL "/rotation");
  return method;
}

// oscar+ as `oscar` runs the demo model: with the bits that the sensitivities beside it ask for.
inline KvPlanOptions DefaultMap(int cell) {
  KvPlanOptions method = DemoModel::Method("oscar+", cell);
  const ModelSpec spec = DemoSpec();
  method.sensitivities = *MapOf(*ReadSensitivities(OSCAR_DEMO_MODEL "/rotation"), spec.kv_layers(),
                                spec.attention().num_kv_heads);
  return method;
}

// Architectures and sizes that the demo model does not have.
struct ShapeCase {
  const char *name, *model_type;
  int heads, kv_heads, head_dim, hidden, intermediate, vocab;
  bool bias, tied;
};
inline constexpr ShapeCase kShapeCases[] = {
    {"LlamaBiases", "llama", 6, 2, 64, 160, 352, 1001, true, false},
    {"LlamaAlone", "llama", 4, 4, 64, 256, 512, 515, false, true},
    {"QwenWide", "qwen3", 16, 1, 256, 192, 256, 2050, false, false}};

inline ModelSpec SpecOf(const ShapeCase& c) {
  ModelConfig config;
  config.model_type = c.model_type;
  config.vocab_size = c.vocab;
  config.hidden_size = c.hidden;
  config.intermediate_size = c.intermediate;
  config.num_layers = 2;
  config.num_attention_heads = c.heads;
  config.num_kv_heads = c.kv_heads;
  config.head_dim = config.rotary_dim = c.head_dim;
  config.rms_norm_eps = 1e-5;
  config.rope_theta = 10000.0;
  config.max_position_embeddings = 2048;
  config.attention_bias = c.bias;
  config.tie_word_embeddings = c.tied;
  auto spec = MakeModelSpec(config);
  EXPECT_TRUE(spec.has_value()) << spec.error().ToString();
  return std::move(*spec);
}

// What calibration sees of a prompt: q, k and v of every layer.
inline std::vector<float> TappedRows(Model& model, PagePool& pool,
                                     std::span<const int32_t> tokens) {
  std::vector<float> rows;
  const auto add = [&](int, size_t, std::span<const float> q, std::span<const float> k,
                       std::span<const float> v) {
    for (const auto side : {q, k, v}) rows.insert(rows.end(), side.begin(), side.end());
  };
  EXPECT_TRUE(model.SetTap(add).ok());
  SequenceCache cache(model.kv().cache(), pool);
  const ForwardItem item{&cache, tokens, true, 0};
  EXPECT_TRUE(model.Forward({&item, 1}, {}).ok());
  EXPECT_TRUE(model.SetTap({}).ok());
  return rows;
}

}  // namespace oscar
