// Every model family on the GPU: tiny checkpoints against transformers, and portable passes against
// the CPU's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cuda/cuda_fixture.h"
#include "engine/tiny_model.h"

namespace oscar {
namespace {

// On the GPU, with few recorded steps: emulators take their time.
struct TinyGpu : TinyModel {
  explicit TinyGpu(const std::string& directory, const KvPlanOptions& kv = Bf16(),
                   BackendOptions options = Sized(128, 2))
      : TinyModel(directory, kv, 2, options, /*is_reference=*/false, uint64_t{1} << 26,
                  Device::kCuda) {}
};

BackendOptions Portable() {
  BackendOptions options = Sized(128, 2);
  options.portable = true;
  return options;
}

class GpuFamilyTest : public testing::TestWithParam<const char*> {
 protected:
  const Golden golden_{GetParam()};
  const TinyCheckpoint checkpoint_{ConfigOf(GetParam())};
};

TEST_P(GpuFamilyTest, MatchesTransformers) {
  TinyGpu tiny(checkpoint_.path());
  ASSERT_TRUE(tiny.status.ok()) << tiny.status.ToString();
  ExpectTransformers(golden_, tiny, GetParam());
}

// Prompts and generated tokens over sealed pages: the CPU's bits.
TEST_P(GpuFamilyTest, PortableIsTheCpus) {
  KvPlanOptions kv = SmallWindows();
  kv.prefill_cell = 64;
  TinyGpu gpu(checkpoint_.path(), kv, Portable());
  ASSERT_TRUE(gpu.status.ok()) << gpu.status.ToString();
  TinyModel cpu(checkpoint_.path(), kv, 2, Portable());
  const std::vector<int32_t> ids = SomeIds(210);
  EXPECT_EQ(gpu.Logits(ids), cpu.Logits(ids));
  EXPECT_EQ(gpu.Greedy(ids, 3), cpu.Greedy(ids, 3));
}

// What calibration sees of it.
TEST_P(GpuFamilyTest, TapIsTheCpus) {
  const std::vector<int32_t> ids = SomeIds(30);
  TinyGpu gpu(checkpoint_.path());
  TinyModel cpu(checkpoint_.path());
  ASSERT_TRUE(gpu.status.ok()) << gpu.status.ToString();
  const std::vector<float> mine = TappedRows(*gpu.model, *gpu.pool, ids);
  const std::vector<float> theirs = TappedRows(*cpu.model, *cpu.pool, ids);
  ASSERT_EQ(mine.size(), theirs.size());
  // Of the first layer, which no rounding came before.
  const size_t first = ids.size() * static_cast<size_t>(cpu.spec.attention().qkv_width());
  double squares = 0.0, error = 0.0;
  for (size_t i = 0; i < first; ++i) {
    squares += std::pow(static_cast<double>(theirs[i]), 2);
    error += std::pow(static_cast<double>(mine[i]) - theirs[i], 2);
  }
  EXPECT_LE(std::sqrt(error / squares), 0.01);
  TinyGpu portable(checkpoint_.path(), TinyModel::Bf16(), Portable());
  TinyModel exact(checkpoint_.path(), TinyModel::Bf16(), 2, Portable());
  EXPECT_EQ(TappedRows(*portable.model, *portable.pool, ids),
            TappedRows(*exact.model, *exact.pool, ids));
}

INSTANTIATE_TEST_SUITE_P(Families, GpuFamilyTest, testing::Values("qwen2", "mistral"),
                         [](const auto& item) { return std::string(item.param); });

}  // namespace
}  // namespace oscar
