// Portable passes on the GPU against the CPU's: the same bits.
#include <gtest/gtest.h>

#include "cuda/cuda_fixture.h"

namespace oscar {
namespace {

BackendOptions PortableCpu() {
  BackendOptions options;
  options.portable = true;
  return options;
}
BackendOptions PortableGpu(int tokens, int sequences) {
  BackendOptions options = Sized(tokens, sequences);
  options.portable = true;
  return options;
}

void ExpectSame(const Followed& f) {
  EXPECT_EQ(f.worst_max, 0.0);
  EXPECT_EQ(f.diverged, 0);
  EXPECT_EQ(f.sealed_pages[0], f.sealed_pages[1]);
}

class PortableMethodTest : public testing::TestWithParam<MethodCase> {};

// History in every form, then generated tokens across several seals.
TEST_P(PortableMethodTest, LogitsAreTheCpus) {
  const char* const name = GetParam().name;
  const WeightFormat weights = GetParam().weights;
  const KvPlanOptions method = PlanOf(GetParam());
  DemoModel cpu(method, 8, uint64_t{1} << 30, weights, PortableCpu());
  GpuModel gpu(method, PortableGpu(512, 8), weights);
  const Followed f =
      Follow(*cpu.model, cpu.pool, *gpu.model, *gpu.pool, SomeTokens(1900), /*steps=*/200);
  std::printf("%s: max %g, %d of 200 greedy ids diverged\n", name, f.worst_max, f.diverged);
  ExpectSame(f);
}
INSTANTIATE_TEST_SUITE_P(
    All, PortableMethodTest,
    testing::Values(MethodCase{"bf16"}, MethodCase{"oscar+"}, MethodCase{"oscar+ mixed"},
                    MethodCase{"oscar+ mixed", WeightFormat::kCheckpoint, false, 32},
                    MethodCase{"oscar+", WeightFormat::kFp8}, MethodCase{"saw-int4"},
                    MethodCase{"quarot"}, MethodCase{"naive"},
                    MethodCase{"oscar", WeightFormat::kCheckpoint, true},
                    MethodCase{"oscar+", WeightFormat::kCheckpoint, true, 32},
                    MethodCase{"saw-int4", WeightFormat::kCheckpoint, false, 64}));

// Short enough for a machine that has no GPU and emulates one.
TEST(Portable, TheDefaultMapGivesTheCpusTokens) {
  for (const bool mixed : {false, true}) {
    KvPlanOptions method = mixed ? DemoModel::Method("oscar+ mixed", 64) : DefaultMap(64);
    method.sink = 64;
    method.recent = 64;
    DemoModel cpu(method, 2, uint64_t{1} << 30, WeightFormat::kCheckpoint, PortableCpu());
    GpuModel gpu(method, PortableGpu(64, 2));
    EXPECT_FALSE(gpu.plan->cache().sealed.is_uniform());
    const Followed f =
        Follow(*cpu.model, cpu.pool, *gpu.model, *gpu.pool, SomeTokens(320), /*steps=*/3);
    ExpectSame(f);
    EXPECT_GE(f.sealed_pages[1], 3);
  }
}

class PortableShapeTest : public testing::TestWithParam<ShapeCase> {};

TEST_P(PortableShapeTest, LogitsAreTheCpus) {
  const ModelSpec spec = SpecOf(GetParam());
  const WavyWeights source;
  for (const char* method : {"bf16", "oscar+"}) {
    const KvPlanOptions options = DemoModel::Method(method, /*cell=*/256);
    CpuModelOf cpu(spec, source, options, PortableCpu());
    GpuModel gpu(spec, source, options, PortableGpu(256, 4));
    const Followed f = Follow(*cpu.model, cpu.pool, *gpu.model, *gpu.pool,
                              SomeTokens(600, GetParam().vocab), /*steps=*/80);
    std::printf("%s: max %g, %d of 80 diverged\n", method, f.worst_max, f.diverged);
    ExpectSame(f);
  }
}
INSTANTIATE_TEST_SUITE_P(All, PortableShapeTest, testing::ValuesIn(kShapeCases),
                         [](const auto& shape) { return std::string(shape.param.name); });

TEST(Portable, CalibrationSeesTheCpusRows) {
  DemoModel cpu(DemoModel::Method("bf16"), 2, uint64_t{1} << 30, WeightFormat::kCheckpoint,
                PortableCpu());
  GpuModel gpu(DemoModel::Method("bf16"), PortableGpu(128, 4));
  const auto tokens = SomeTokens(100);
  EXPECT_EQ(TappedRows(*gpu.model, *gpu.pool, tokens), TappedRows(*cpu.model, cpu.pool, tokens));
}

// Prompts in other chunks and beside other sequences: the same bits again.
TEST(Portable, ChunksAndBatchesDoNotShow) {
  GpuModel gpu(DemoModel::Method("oscar+", /*cell=*/512), PortableGpu(512, 8));
  const auto prompt = SomeTokens(1000);
  const std::vector<float> whole = LogitsOf(*gpu.model, *gpu.pool, prompt, 3);
  EXPECT_EQ(LogitsOf(*gpu.model, *gpu.pool, prompt, 3, /*chunk=*/97), whole);
  const auto vocab = static_cast<size_t>(gpu.model->spec().vocab_size);
  std::vector<SequenceCache> caches;
  for (int i = 0; i < 3; ++i) caches.emplace_back(gpu.plan->cache(), *gpu.pool);
  std::vector<float> together(3 * vocab), alone(vocab);
  const auto read = [&](SequenceCache& cache, size_t tokens) {
    while (cache.length() < static_cast<int64_t>(tokens)) {
      const auto at = static_cast<size_t>(cache.length());
      const ForwardItem item{
          &cache, std::span(prompt).subspan(at, std::min({tokens - at, 512 - at % 512})), true, 0};
      ASSERT_TRUE(gpu.model->Forward({&item, 1}, {}).ok());
    }
  };
  const size_t lengths[] = {300, 700, 513};
  for (size_t i = 0; i < 3; ++i) read(caches[i], lengths[i]);
  std::vector<ForwardItem> items;
  for (size_t i = 0; i < 3; ++i) {
    items.push_back(
        {&caches[i], std::span(prompt).subspan(lengths[i], i == 2 ? 20 : 1), i == 2, 1});
  }
  ASSERT_TRUE(gpu.model->Forward(items, together).ok());
  for (size_t i = 0; i < 3; ++i) {
    SequenceCache cache(gpu.plan->cache(), *gpu.pool);
    read(cache, lengths[i]);
    const ForwardItem item{&cache, items[i].tokens, items[i].is_prompt, 1};
    ASSERT_TRUE(gpu.model->Forward({&item, 1}, alone).ok());
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(),
                           together.begin() + static_cast<std::ptrdiff_t>(i * vocab)));
  }
}

}  // namespace
}  // namespace oscar
