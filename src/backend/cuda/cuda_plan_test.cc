// What the GPU is asked for and would refuse, before there is one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cuda/cuda_backend.h"
#include "cuda/kv/device_pages.h"
#include "simd/block_writer.h"

namespace oscar {
namespace {

using ::testing::HasSubstr;

ModelSpec Spec() {
  ModelSpec spec;
  spec.vocab_size = 1000;
  spec.hidden = 4096;
  AttentionSpec attention;
  attention.num_heads = 32;
  attention.num_kv_heads = 8;
  attention.head_dim = attention.rotary_dims = 128;
  SetLayers({attention, DenseSpec{12288}}, 3, &spec);
  return spec;
}
// Changes the attention of every layer.
void Attention(ModelSpec* spec, int heads, int kv_heads, int head_dim) {
  for (LayerSpec& layer : spec->layers) {
    auto& attention = std::get<AttentionSpec>(layer.mixer);
    attention.num_heads = heads;
    attention.num_kv_heads = kv_heads;
    attention.head_dim = attention.rotary_dims = head_dim;
  }
}

Status Check(const ModelSpec& spec, const char* method, CodeOrder order = CodeOrder::kTensorCore) {
  KvPlanOptions options;
  options.method = method;
  options.order = order;
  const auto plan = KvPlan::Make(spec, options, simd::WriteBlock);
  EXPECT_TRUE(plan.has_value()) << plan.error().ToString();
  return CheckCudaPlan(spec, **plan);
}

TEST(CheckCudaPlan, TakesShapesThatItsKernelsHave) {
  for (const char* method : {"bf16", "oscar+", "quarot", "naive", "saw-int4", "int4"}) {
    for (const int head_dim : kHeadDims) {
      ModelSpec spec = Spec();
      Attention(&spec, 32, 8, head_dim);
      const Status status = Check(spec, method);
      EXPECT_TRUE(status.ok()) << method << " " << head_dim << ": " << status.ToString();
    }
  }
  ModelSpec spec = Spec();
  Attention(&spec, 32, 2, 128);
  EXPECT_TRUE(Check(spec, "oscar+").ok());
  spec.vocab_size = 50257;
  EXPECT_TRUE(Check(spec, "oscar+").ok());
}

// A budget taken from the card's free bytes must not ask for more of them than there are: three
// INT4 pages leave a fifth of an open page's place empty.
TEST(CudaPageBudget, FitsTheBytesItWasMadeFrom) {
  constexpr uint64_t kBytes = uint64_t{100} << 30;
  for (const char* method : {"bf16", "oscar+", "naive", "saw-int4"}) {
    KvPlanOptions options;
    options.method = method;
    options.order = CodeOrder::kTensorCore;
    const auto plan = KvPlan::Make(Spec(), options, simd::WriteBlock);
    ASSERT_TRUE(plan.has_value());
    const uint64_t budget = CudaPageBudget(**plan, kBytes);
    EXPECT_LE(cuda::DevicePages::SizesOf((*plan)->cache()).ArenaBytes(budget), kBytes) << method;
    EXPECT_GE(budget, kBytes / 4 * 3) << method;
  }
}

// --device auto goes to the CPU with these, in place of failing when half of the model is loaded.
TEST(CheckCudaPlan, RefusesWhatNoKernelTakes) {
  struct Case {
    void (*change)(ModelSpec*);
    const char* expected;
  };
  const Case cases[] = {
      {[](ModelSpec* s) { Attention(s, 32, 1, 128); }, "32 query heads on 1 KV heads"},
      {[](ModelSpec* s) { Attention(s, 20, 8, 128); }, "20 query heads on 8 KV heads"},
      {[](ModelSpec* s) { s->hidden = 18432; }, "hidden size 18432"},
      {[](ModelSpec* s) { s->hidden = 1026; }, "hidden size 1026"},
      {[](ModelSpec* s) { s->layers[2].feed_forward = DenseSpec{4098}; }, "intermediate size 4098"},
  };
  for (const Case& item : cases) {
    ModelSpec spec = Spec();
    item.change(&spec);
    const Status status = Check(spec, "oscar+");
    EXPECT_EQ(status.code(), StatusCode::kUnimplemented);
    EXPECT_THAT(status.message(), HasSubstr(item.expected));
    EXPECT_THAT(status.message(), HasSubstr("--device cpu"));
  }
  EXPECT_THAT(Check(Spec(), "kivi").message(), HasSubstr("simulated methods run on the CPU alone"));
  EXPECT_FALSE(Check(Spec(), "oscar+", CodeOrder::kCpu).ok());
}

}  // namespace
}  // namespace oscar
