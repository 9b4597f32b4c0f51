// What the GPU is asked for and would refuse, before there is one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cuda/attention/head_blocks.h"
#include "cuda/attention/mixed_split.h"
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
  const auto plan = KvPlan::Make(spec, options, simd::WriteBlocks);
  EXPECT_TRUE(plan.has_value()) << plan.error().ToString();
  return CheckCudaPlan(spec, **plan);
}

TEST(CheckCudaPlan, TakesShapesThatItsKernelsHave) {
  for (const char* method :
       {"bf16", "oscar+", "quarot", "naive", "naive-sym", "lloyd-max", "saw-int4", "int4", "kivi",
        "kivi-sink", "oscar-su", "oscar-su:k=token", "kitty", "turboquant", "turboquant-skip"}) {
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

// gpt-oss: half of the layers have a window and no history.
TEST(CheckCudaPlan, TakesSinksAndWindows) {
  ModelSpec spec = Spec();
  Attention(&spec, 64, 8, 64);
  for (int i = 0; i < spec.num_layers(); ++i) {
    auto& attention = std::get<AttentionSpec>(spec.layers[static_cast<size_t>(i)].mixer);
    attention.has_sinks = true;
    attention.sliding_window = i % 2 == 0 ? 128 : 0;
  }
  for (const char* method : {"bf16", "oscar+"}) {
    const Status status = Check(spec, method);
    EXPECT_TRUE(status.ok()) << method << ": " << status.ToString();
  }
  // What it has no kernels for.
  ModelSpec other = spec;
  Attention(&other, 64, 8, 128);
  EXPECT_THAT(Check(other, "oscar+").message(), HasSubstr("head dim 64 alone"));
  other = spec;
  std::get<AttentionSpec>(other.layers[0].mixer).has_sinks = false;
  EXPECT_THAT(Check(other, "oscar+").message(), HasSubstr("sliding window"));
  other = spec;
  std::get<AttentionSpec>(other.layers[2].mixer).sliding_window = 64;
  EXPECT_THAT(Check(other, "oscar+").message(), HasSubstr("different lengths"));
}

// Every head may have other bits.
TEST(CheckCudaPlan, TakesMapsOfBits) {
  ModelSpec spec = Spec();
  KvPlanOptions options;
  options.order = CodeOrder::kTensorCore;
  options.bits = 2.75;
  SensitivityMap& map = options.sensitivities.emplace(3);
  for (int layer = 0; layer < 3; ++layer) {
    for (int h = 0; h < 8; ++h) {
      map[static_cast<size_t>(layer)].push_back({1.0 / (1 + layer * 8 + h), 1.0 / (3 + h)});
    }
  }
  const auto plan = KvPlan::Make(spec, options, simd::WriteBlocks);
  ASSERT_TRUE(plan.has_value());
  EXPECT_FALSE((*plan)->cache().sealed.is_uniform());
  EXPECT_TRUE(CheckCudaPlan(spec, **plan).ok());
  const uint64_t budget = CudaPageBudget(**plan, uint64_t{100} << 30);
  EXPECT_LE(cuda::DevicePages::SizesOf((*plan)->cache()).ArenaBytes(budget), uint64_t{100} << 30);
}

TEST(HeadBlocks, SayWhereAPageHasThem) {
  const auto layout = [](BlockKind k, BlockKind v) {
    return BlockLayout(k, v, CodeOrder::kTensorCore, 128, 128);
  };
  const BlockLayout two = layout(BlockKind::kInt2, BlockKind::kInt2);
  const PageLayout page(std::vector<std::vector<BlockLayout>>{
      {two, two, two},
      {two, layout(BlockKind::kInt4, BlockKind::kInt2), layout(BlockKind::kInt3, BlockKind::kInt4)},
      std::vector<BlockLayout>(3, layout(BlockKind::kInt3, BlockKind::kInt3)),
      std::vector<BlockLayout>(3, layout(BlockKind::kInt4, BlockKind::kInt4))});
  EXPECT_TRUE(cuda::IsUniformLayer(page, 0));
  EXPECT_FALSE(cuda::IsUniformLayer(page, 1));
  EXPECT_FALSE(cuda::IsUniformLayer(page, 2));  // no kernel for heads alike reads 3 bits
  EXPECT_TRUE(cuda::IsUniformLayer(page, 3));
  const cuda::HeadBlocks heads = cuda::HeadBlocksOf(page, 1);
  ASSERT_EQ(heads.size(), 3u);
  EXPECT_EQ(heads[0].offset, 0u);
  EXPECT_EQ(heads[1].offset, 4608u);
  EXPECT_EQ(heads[2].offset, 4608u + 6656u);
  EXPECT_EQ(heads[2].k, BlockKind::kInt3);
  EXPECT_EQ(heads[2].v, BlockKind::kInt4);
  const cuda::AttentionShape shape{.num_q_heads = 12, .num_kv_heads = 3};
  EXPECT_EQ(cuda::BlockSizes(shape, std::vector<cuda::HeadBlocks>{heads}).second,
            64 * 128 * 7 / 8 + 512);
  EXPECT_TRUE(cuda::CheckHeads(shape, heads).ok());
  EXPECT_FALSE(cuda::CheckHeads({}, heads).ok());
}

// Splits cover every page once, are about as many as asked for, and none is a tail: what a block
// reads differs by rounding to whole rounds alone.
TEST(MixedSplit, SharesBytesEvenly) {
  constexpr int kWarps = 12, kTarget = 132 - 8;
  const auto head = [](int k, int v) {
    const auto kind = [](int bits) {
      return bits == 2 ? BlockKind::kInt2 : bits == 3 ? BlockKind::kInt3 : BlockKind::kInt4;
    };
    return cuda::HeadBlock{0, kind(k), kind(v)};
  };
  const std::vector<cuda::HeadBlocks> maps = {cuda::HeadBlocks(8, head(2, 2)),
                                              cuda::HeadBlocks(8, head(3, 3)),
                                              {head(4, 2), head(2, 2), head(2, 2), head(2, 2),
                                               head(2, 2), head(2, 2), head(2, 2), head(2, 2)},
                                              {head(2, 2), head(4, 2), head(4, 2), head(4, 2),
                                               head(4, 2), head(4, 2), head(4, 2), head(4, 2)},
                                              {head(2, 2), head(2, 3), head(3, 2), head(3, 3),
                                               head(2, 4), head(4, 2), head(4, 3), head(4, 4)}};
  for (const cuda::HeadBlocks& heads : maps) {
    const auto split = cuda::MixedSplit::Make(128, 128, heads, /*least=*/5, kTarget,
                                              /*max_splits=*/128);
    std::vector<bool> seen(heads.size());
    for (size_t i = 0; i < heads.size(); ++i) {
      EXPECT_FALSE(seen[split.order[i]]);
      seen[split.order[i]] = true;
      if (i == 0) continue;
      EXPECT_LE(heads[split.order[i]].bits(), heads[split.order[i - 1]].bits());
    }
    for (const int pages : {0, 1, 11, 12, 13, 59, 60, 61, 300, 467, 1557, 2043, 16000}) {
      SCOPED_TRACE(testing::Message() << pages << " pages");
      const cuda::MixedSplit::Rounds rounds = split.RoundsOf(pages, kWarps);
      int all = 0;
      uint64_t most = 0, bytes = 0;
      for (const cuda::HeadBlock& of : heads) {
        const int size = cuda::MixedSplit::SizeOf(of), splits = split.Splits(rounds, size);
        const auto per_split =
            static_cast<int>(split.SplitRounds(rounds, split.units[size])) * kWarps;
        all += splits;
        EXPECT_GE(splits * per_split, pages);
        EXPECT_LT((splits - 1) * per_split, std::max(pages, 1));
        const uint64_t block = of.Layout(128, 128).block_bytes();
        bytes += block * static_cast<uint64_t>(pages);
        most = std::max(most, block * static_cast<uint64_t>(std::min(per_split, pages)));
      }
      EXPECT_EQ(split.AllSplits(rounds), all);
      if (pages < 1557) continue;
      // Full items fill the blocks; a short last split a head comes on top.
      EXPECT_LE(all, kTarget + 8 + kTarget / 12);
      EXPECT_LE(static_cast<double>(most),
                1.15 * static_cast<double>(bytes) / static_cast<double>(kTarget));
    }
  }
}

// A budget taken from the card's free bytes must not ask for more of them than there are: three
// INT4 pages leave a fifth of an open page's place empty.
TEST(CudaPageBudget, FitsTheBytesItWasMadeFrom) {
  constexpr uint64_t kBytes = uint64_t{100} << 30;
  for (const char* method : {"bf16", "oscar+", "naive", "saw-int4"}) {
    KvPlanOptions options;
    options.method = method;
    options.order = CodeOrder::kTensorCore;
    const auto plan = KvPlan::Make(Spec(), options, simd::WriteBlocks);
    ASSERT_TRUE(plan.has_value());
    const uint64_t budget = CudaPageBudget(**plan, kBytes);
    EXPECT_LE(cuda::DevicePages::SizesOf((*plan)->cache()).ArenaBytes(budget), kBytes) << method;
    EXPECT_GE(budget, kBytes / 4 * 3) << method;
  }
}

ExpertsSpec ExpertsOf(int count, int per_token, int shared) {
  ExpertsSpec experts;
  experts.num_experts = count;
  experts.experts_per_token = per_token;
  experts.intermediate = 31;  // any width
  experts.shared_intermediate = shared;
  return experts;
}

TEST(CheckCudaPlan, TakesExperts) {
  ModelSpec spec = Spec();
  spec.layers[1].feed_forward = ExpertsOf(512, 32, 64);
  EXPECT_TRUE(Check(spec, "oscar+").ok());
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
      {[](ModelSpec* s) { s->layers[2].feed_forward = ExpertsOf(513, 8, 0); }, "513 experts"},
      {[](ModelSpec* s) { s->layers[2].feed_forward = ExpertsOf(64, 33, 0); },
       "33 experts per token"},
      {[](ModelSpec* s) { s->layers[2].feed_forward = ExpertsOf(64, 8, 4098); },
       "intermediate size 4098"},
  };
  for (const Case& item : cases) {
    ModelSpec spec = Spec();
    item.change(&spec);
    const Status status = Check(spec, "oscar+");
    EXPECT_EQ(status.code(), StatusCode::kUnimplemented);
    EXPECT_THAT(status.message(), HasSubstr(item.expected));
    EXPECT_THAT(status.message(), HasSubstr("--device cpu"));
  }
  ModelSpec many = Spec();
  Attention(&many, 256, 256, 64);
  EXPECT_THAT(Check(many, "oscar-su").message(), HasSubstr("256 KV heads share norms"));
  EXPECT_TRUE(Check(many, "oscar-su:norm=head").ok());
  EXPECT_FALSE(Check(Spec(), "oscar+", CodeOrder::kCpu).ok());
}

}  // namespace
}  // namespace oscar
