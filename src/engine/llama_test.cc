// A tiny random Llama checkpoint (tools/make_llama_golden.py) against transformers: the second
// architecture from its files to its tokens, in every storage type.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/json.h"
#include "engine/generator.h"
#include "model/load.h"
#include "reference/reference_backend.h"
#include "simd/block_writer.h"

namespace oscar {
namespace {

constexpr char kRoot[] = OSCAR_TEST_DATA "/tiny-llama/";

struct Golden {
  std::vector<int32_t> ids, greedy;
  std::vector<size_t> positions;
  std::vector<float> logits;  // [positions, vocab]
};

Golden LoadGolden() {
  const std::string base = std::string(kRoot) + "golden";
  const auto json = *ParseJson(*ReadFile(base + ".json", 1 << 20), "golden.json");
  const auto tensors = SafetensorsFile::Open(base + ".safetensors");
  return {json["ids"].get<std::vector<int32_t>>(), json["greedy_ids"].get<std::vector<int32_t>>(),
          json["positions"].get<std::vector<size_t>>(), *ToFloatVector(*tensors->Get("logits"))};
}

ModelSpec SpecOf(const std::string& directory) {
  const auto config = ReadModelConfig(directory);
  EXPECT_TRUE(config.has_value()) << config.error().ToString();
  const auto spec = MakeModelSpec(*config);
  EXPECT_TRUE(spec.has_value()) << spec.error().ToString();
  return *spec;
}

// `logits` holds every position.
std::pair<double, double> Errors(const Golden& golden, const std::vector<float>& logits) {
  const size_t vocab = golden.logits.size() / golden.positions.size();
  double largest = 0.0, squares = 0.0;
  for (size_t i = 0; i < golden.positions.size(); ++i) {
    for (size_t j = 0; j < vocab; ++j) {
      const double e = std::fabs(static_cast<double>(golden.logits[i * vocab + j]) -
                                 logits[golden.positions[i] * vocab + j]);
      largest = std::max(largest, e);
      squares += e * e;
    }
  }
  return {largest, std::sqrt(squares / static_cast<double>(golden.logits.size()))};
}

class LlamaTest : public testing::TestWithParam<const char*> {
 protected:
  const std::string directory_ = kRoot + std::string(GetParam());
  const Golden golden_ = LoadGolden();
};

TEST_P(LlamaTest, ReferenceMatchesTransformers) {
  const ModelSpec spec = SpecOf(directory_);
  EXPECT_EQ(spec.attention().num_heads, 4);
  EXPECT_EQ(spec.attention().num_kv_heads, 2);
  EXPECT_FALSE(spec.tied_head);
  EXPECT_EQ(spec.rope_scaling.type, RopeScalingType::kLlama3);
  auto source = OpenCheckpointWeights(directory_);
  ASSERT_TRUE(source.has_value()) << source.error().ToString();
  ThreadPool threads(1);
  PagePool pool(uint64_t{1} << 26);
  KvPlanOptions options;
  options.method = "bf16";
  const auto plan = KvPlan::Make(spec, options, simd::WriteBlocks);
  auto backend = MakeReferenceBackend(spec, **source, **plan, threads);
  ASSERT_TRUE(backend.has_value()) << backend.error().ToString();
  const auto reference = Decoder::Make(std::move(*backend));
  Generator generator(**reference, pool);
  std::vector<float> logits;
  const auto count = static_cast<int64_t>(golden_.ids.size());
  const Status status = generator.Prefill(golden_.ids, count, [&](int64_t, auto part) {
    logits.insert(logits.end(), part.begin(), part.end());
  });
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_LE(Errors(golden_, logits).first, 1e-3);
}

TEST_P(LlamaTest, EngineMatchesTransformers) {
  const ModelSpec spec = SpecOf(directory_);
  auto source = OpenCheckpointWeights(directory_);
  ASSERT_TRUE(source.has_value()) << source.error().ToString();
  ThreadPool threads(2);
  PagePool pool(uint64_t{1} << 26);
  KvPlanOptions options;
  options.method = "bf16";
  const auto plan = KvPlan::Make(spec, options, simd::WriteBlocks);
  ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
  const auto model = LoadModel(Device::kCpu, spec, **source, **plan, threads);
  ASSERT_TRUE(model.has_value()) << model.error().ToString();

  Generator generator(**model, pool);
  const auto count = static_cast<int64_t>(golden_.ids.size());
  std::vector<float> logits;
  const Status status = generator.Prefill(golden_.ids, count, [&](int64_t, auto part) {
    logits.insert(logits.end(), part.begin(), part.end());
  });
  ASSERT_TRUE(status.ok()) << status.ToString();
  const auto [largest, rms] = Errors(golden_, logits);
  EXPECT_LE(largest, 8e-2);
  EXPECT_LE(rms, 1.5e-2);

  GenerateRequest request;
  request.prompt = golden_.ids;
  request.sampling.temperature = 0.0f;
  request.max_tokens = static_cast<int64_t>(golden_.greedy.size());
  const auto result = generator.Generate(request);
  ASSERT_TRUE(result.has_value()) << result.error().ToString();
  EXPECT_EQ(result->tokens, golden_.greedy);
}

INSTANTIATE_TEST_SUITE_P(Storage, LlamaTest, testing::Values("bf16", "f16-sharded", "f32"));

}  // namespace
}  // namespace oscar
