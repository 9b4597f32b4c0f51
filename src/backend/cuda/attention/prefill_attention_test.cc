#include "cuda/attention/prefill_attention.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <span>

#include "cache/attention_reference.h"
#include "cuda/attention/test_cache.h"

namespace oscar::cuda {
namespace {

// Relative L2 of the fp32 output, a query and head. BF16 outputs are these, rounded once, which is
// up to 2^-9 more.
constexpr double kBudget = 1e-3;
// PrefillPrecision::kFast: each P of a BF16 page is off by up to 2^-9.
constexpr double kFastBudget = 4e-3;

struct PrefillCase {
  AttentionCase attention;
  int query_tokens;
};

std::vector<PrefillCase> Cases() {
  std::vector<PrefillCase> cases;
  for (const BlockKind kind :
       {BlockKind::kInt2, BlockKind::kInt3, BlockKind::kInt4, BlockKind::kBf16}) {
    const int smallest_group = kind == BlockKind::kBf16 ? 128 : 32;
    for (const int dim : {64, 128, 256}) {
      for (const int group : {32, 64, 128, 256}) {
        if (!BlockLayout::IsSupported(dim, group)) continue;
        if (kind == BlockKind::kBf16 && group != dim) continue;
        cases.push_back({{.kind = kind,
                          .head_dim = dim,
                          .group_dims = group,
                          .queries_per_kv = 2,
                          .num_pages = 5,
                          .recent_tokens = 300},
                         200});
      }
      // Logits of +-40 magnify whatever is wrong with a key, in every group's place.
      cases.push_back({{.kind = kind,
                        .head_dim = dim,
                        .group_dims = kind == BlockKind::kBf16 ? dim : 32,
                        .num_pages = 3,
                        .recent_tokens = 40,
                        .pattern = AttentionPattern::kSharpLogits},
                       40});
    }
    // Page edges, one query, all queries, nothing but the chunk.
    for (const int queries : {1, 63, 64, 65, 128, 129, 257}) {
      cases.push_back(
          {{.kind = kind, .kv_heads = 1, .queries_per_kv = 3, .num_pages = 4, .recent_tokens = 257},
           queries});
    }
    cases.push_back({{.kind = kind, .sink_tokens = 64, .num_pages = 0, .recent_tokens = 321}, 385});
    cases.push_back({{.kind = kind, .sink_tokens = 33, .num_pages = 0, .recent_tokens = 0}, 33});
    for (const auto pattern : {AttentionPattern::kSharpLogits, AttentionPattern::kOneHugeLogit,
                               AttentionPattern::kEqualLogits, AttentionPattern::kTinyScales,
                               AttentionPattern::kLargeValues, AttentionPattern::kMixedScales,
                               AttentionPattern::kOutlierQuery}) {
      cases.push_back(
          {{.kind = kind, .num_pages = 7, .recent_tokens = 65, .pattern = pattern}, 65});
      cases.push_back({{.kind = kind,
                        .group_dims = smallest_group,
                        .sink_tokens = 0,
                        .num_pages = 3,
                        .recent_tokens = 2,
                        .pattern = pattern},
                       2});
    }
    // Mostly history.
    cases.push_back(
        {{.kind = kind, .kv_heads = 1, .sink_tokens = 0, .num_pages = 64, .recent_tokens = 8}, 8});
  }
  // K and V apart, at every head dim.
  constexpr BlockKind kPacked[] = {BlockKind::kInt2, BlockKind::kInt3, BlockKind::kInt4};
  for (const BlockKind k : kPacked) {
    for (const BlockKind v : kPacked) {
      if (k == v) continue;
      for (const int dim : {64, 128, 256}) {
        cases.push_back({{.kind = k,
                          .head_dim = dim,
                          .group_dims = dim == 64 ? 32 : dim,
                          .kv_heads = 1,
                          .queries_per_kv = 2,
                          .num_pages = 3,
                          .recent_tokens = 70,
                          .v_kind = v},
                         70});
      }
    }
  }
  return cases;
}

class PrefillConformance : public testing::TestWithParam<PrefillCase> {};

void RunCase(const PrefillCase& test, PrefillPath path, PrefillPrecision precision,
             uint64_t seed = 3) {
  const double budget = precision == PrefillPrecision::kPrecise ? kBudget : kFastBudget;
  const AttentionCase& c = test.attention;
  const int queries = test.query_tokens;
  const AttentionShape shape = ShapeOf(c);
  // Row 0 is padding; row 1 the case.
  const int ring = (c.recent_tokens + 63) / 64 + 2;
  const HeadBlocks heads = CaseHeads(c);
  TestCache cache(shape, 2, c.num_pages, ring, 1, heads);
  const AttentionInputs in = MakeAttentionInputs(c, CodeOrder::kTensorCore, seed);
  const auto dims = static_cast<size_t>(c.head_dim);
  const int ring_begin = c.sink_tokens / kPageTokens + c.num_pages;
  for (size_t at = 0; at < in.norms.size(); at += kPageTokens) {
    cache.SetNorms(1, static_cast<int>(at / kPageTokens), &in.norms[at]);
  }
  for (int h = 0; h < c.kv_heads; ++h) {
    for (int t = 0; t < c.sink_tokens; ++t) {
      const size_t at = static_cast<size_t>(h * c.sink_tokens + t) * dims;
      cache.SetWindowRow(1, t / 64, t % 64, h, &in.sink_k[at], &in.sink_v[at]);
    }
    for (int p = 0; p < c.num_pages; ++p) {
      const size_t block = in.layout.block_bytes();
      std::memcpy(cache.history_block(1, p, h),
                  in.blocks.data() + static_cast<size_t>(h * c.num_pages + p) * block, block);
    }
    for (int t = 0; t < c.recent_tokens; ++t) {
      const size_t at = static_cast<size_t>(h * c.recent_tokens + t) * dims;
      const int64_t page = ring_begin + t / 64;
      cache.SetWindowRow(1, page < 1 ? page + 1000 * ring : page, t % 64, h, &in.recent_k[at],
                         &in.recent_v[at]);
    }
  }
  cache.sequence(1) = {c.sink_tokens, c.num_pages, c.recent_tokens, 1};
  cache.Upload();

  // The case's query, turned a little for each token; two rows of slack before the chunk.
  constexpr int kBegin = 2;
  const auto per_row = static_cast<size_t>(c.q_heads()) * dims;
  std::vector<Bf16> q(static_cast<size_t>(kBegin + queries) * per_row);
  const Philox rng(9, seed);
  for (size_t i = 0; i < q.size(); ++i) {
    q[i] = ToBf16(in.q[i % per_row] + 0.5f * rng.Normal(i));
  }
  const auto d_q = Unwrap(DeviceBuffer<Bf16>::Copy(q));
  auto d_out = Unwrap(DeviceBuffer<float>::Allocate(q.size()));
  ASSERT_TRUE(d_out.Fill(0xff).ok());
  const auto d_chunks = Unwrap(
      DeviceBuffer<PrefillChunk>::Copy(std::vector<PrefillChunk>{{0, 0}, {kBegin, queries}}));
  const PrefillAttention kernel = Unwrap(PrefillAttention::Create(
      shape, path, std::span(&heads, heads.empty() ? size_t{0} : size_t{1})));
  PrefillArguments args;
  args.cache = cache.view();
  args.sequences = cache.device_sequences();
  args.chunks = d_chunks.data();
  args.q = d_q.data();
  args.out = d_out.data();
  args.out_fp32 = true;
  args.precision = precision;
  args.softmax_scale = in.softmax_scale;
  args.batch = 2;
  args.max_query_tokens = queries;
  args.heads = heads;
  const Status launched = kernel.Launch(args, nullptr);
  ASSERT_TRUE(launched.ok()) << launched.ToString();
  const Status done = CudaStatus(cudaDeviceSynchronize(), "prefill");
  ASSERT_TRUE(done.ok()) << done.ToString();
  const std::vector<float> out = Unwrap(d_out.ToHost());
  for (size_t i = 0; i < kBegin * per_row; ++i) ASSERT_TRUE(std::isnan(out[i]));

  double worst = 0.0;
  for (int h = 0; h < c.kv_heads; ++h) {
    const DenseKv dense = DecodeKvHead(c, in, h);
    for (int i = 0; i < queries; ++i) {
      // Every query near the edges, a sample of the others.
      if (i > 2 && i + 3 < queries && i % 17 != 0 && i % 64 > 1 && i % 64 < 62) continue;
      for (int g = 0; g < c.queries_per_kv; ++g) {
        const size_t at = static_cast<size_t>(kBegin + i) * per_row +
                          static_cast<size_t>(h * c.queries_per_kv + g) * dims;
        std::vector<float> row(dims);
        for (size_t d = 0; d < dims; ++d) row[d] = ToFloat(q[at + d]);
        std::vector<double> expected(dims);
        ReferenceAttention(row, dense.k, dense.v, c.num_tokens() - queries + i + 1,
                           in.softmax_scale, expected);
        const double error = RelativeL2({&out[at], dims}, expected);
        worst = std::max(worst, error);
        ASSERT_LE(error, budget) << "query " << i << " kv head " << h << " of group " << g;
      }
    }
  }
  testing::Test::RecordProperty("worst_error", fmt::format("{:.2e}", worst));

  auto d_rounded = Unwrap(DeviceBuffer<Bf16>::Allocate(q.size()));
  args.out = d_rounded.data();
  args.out_fp32 = false;
  ASSERT_TRUE(kernel.Launch(args, nullptr).ok());
  const std::vector<Bf16> rounded = Unwrap(d_rounded.ToHost());
  for (size_t i = kBegin * per_row; i < q.size(); ++i) {
    ASSERT_EQ(rounded[i], ToBf16(out[i])) << "BF16 outputs are the fp32 ones, rounded once; " << i;
  }
}

TEST_P(PrefillConformance, MatchesTheReference) {
  RunCase(GetParam(), PrefillPath::kBest, PrefillPrecision::kPrecise);
}
TEST_P(PrefillConformance, MatchesTheReferenceWithoutWgmma) {
  RunCase(GetParam(), PrefillPath::kGeneric, PrefillPrecision::kPrecise);
}
TEST_P(PrefillConformance, FastFormKeepsItsBudget) {
  RunCase(GetParam(), PrefillPath::kBest, PrefillPrecision::kFast);
}
TEST_P(PrefillConformance, FastFormKeepsItsBudgetWithoutWgmma) {
  RunCase(GetParam(), PrefillPath::kGeneric, PrefillPrecision::kFast);
}

INSTANTIATE_TEST_SUITE_P(Cases, PrefillConformance, testing::ValuesIn(Cases()),
                         [](const auto& test) {
                           return test.param.attention.Name() + "_q" +
                                  std::to_string(test.param.query_tokens);
                         });

// Keys that are not rows; a chunk of a page and a bit, or what the case has of one.
std::vector<PrefillCase> FormPrefillCases() {
  std::vector<PrefillCase> cases;
  for (AttentionCase c : FormCases()) {
    c.recent_tokens = std::max(c.recent_tokens, 5);
    cases.push_back({c, std::min(c.recent_tokens, 65)});
  }
  return cases;
}
class FormPrefill : public testing::TestWithParam<PrefillCase> {};
TEST_P(FormPrefill, MatchesTheReference) {
  RunCase(GetParam(), PrefillPath::kBest, PrefillPrecision::kPrecise);
}
INSTANTIATE_TEST_SUITE_P(Cases, FormPrefill, testing::ValuesIn(FormPrefillCases()),
                         [](const auto& test) { return test.param.attention.Name(); });

// One draw of rows may be lucky.
class PrefillDraws : public testing::TestWithParam<AttentionCase> {};

TEST_P(PrefillDraws, MeetTheBudget) {
  for (uint64_t seed = 100; seed < 112; ++seed) {
    SCOPED_TRACE(fmt::format("draw {}", seed));
    RunCase({GetParam(), 4}, PrefillPath::kBest, PrefillPrecision::kPrecise, seed);
    RunCase({GetParam(), 4}, PrefillPath::kGeneric, PrefillPrecision::kPrecise, seed);
  }
}

std::vector<AttentionCase> DrawCases() {
  std::vector<AttentionCase> cases;
  for (const BlockKind kind :
       {BlockKind::kInt2, BlockKind::kInt3, BlockKind::kInt4, BlockKind::kBf16}) {
    for (const auto pattern : {AttentionPattern::kSharpLogits, AttentionPattern::kOneHugeLogit,
                               AttentionPattern::kMixedScales, AttentionPattern::kOutlierQuery}) {
      cases.push_back({.kind = kind, .num_pages = 5, .recent_tokens = 4, .pattern = pattern});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, PrefillDraws, testing::ValuesIn(DrawCases()),
                         [](const auto& test) { return test.param.Name(); });

// Heads with every pair of bits side by side in one launch.
TEST(MixedPrefill, EveryHeadMatchesTheReference) {
  for (const int dim : {64, 128, 256}) {
    constexpr int kPages = 3, kQueries = 66, kHeads = 9;
    const HeadBlocks heads = NinePairs(dim, dim);
    const AttentionShape shape{
        .head_dim = dim, .group_dims = dim, .num_q_heads = kHeads, .num_kv_heads = kHeads};
    TestCache cache(shape, 1, kPages, 4, 1, heads);
    const auto dims = static_cast<size_t>(dim), per_row = kHeads * dims;
    std::vector<Bf16> q(kQueries * per_row);
    const Philox rng(9, 1);
    for (size_t i = 0; i < q.size(); ++i) q[i] = ToBf16(rng.Normal(i));
    std::vector<AttentionCase> cases;
    std::vector<AttentionInputs> inputs;
    for (int h = 0; h < kHeads; ++h) {
      const HeadBlock& head = heads[static_cast<size_t>(h)];
      const AttentionCase& c = cases.emplace_back(AttentionCase{.kind = head.k,
                                                                .head_dim = dim,
                                                                .group_dims = dim,
                                                                .kv_heads = 1,
                                                                .queries_per_kv = 1,
                                                                .sink_tokens = 64,
                                                                .num_pages = kPages,
                                                                .recent_tokens = kQueries,
                                                                .v_kind = head.v});
      const AttentionInputs& in = inputs.emplace_back(
          MakeAttentionInputs(c, CodeOrder::kTensorCore, static_cast<uint64_t>(h)));
      for (int t = 0; t < 64; ++t) {
        const size_t at = static_cast<size_t>(t) * dims;
        cache.SetWindowRow(0, 0, t, h, &in.sink_k[at], &in.sink_v[at]);
      }
      for (int p = 0; p < kPages; ++p) {
        const size_t block = in.layout.block_bytes();
        std::memcpy(cache.history_block(0, p, h), &in.blocks[static_cast<size_t>(p) * block],
                    block);
      }
      for (int t = 0; t < kQueries; ++t) {
        const size_t at = static_cast<size_t>(t) * dims;
        cache.SetWindowRow(0, 1 + kPages + t / 64, t % 64, h, &in.recent_k[at], &in.recent_v[at]);
      }
    }
    cache.sequence(0) = {64, kPages, kQueries, 0};
    cache.Upload();
    const auto d_q = Unwrap(DeviceBuffer<Bf16>::Copy(q));
    const auto d_chunks =
        Unwrap(DeviceBuffer<PrefillChunk>::Copy(std::vector<PrefillChunk>{{0, kQueries}}));
    for (const PrefillPath path : {PrefillPath::kBest, PrefillPath::kGeneric}) {
      auto d_out = Unwrap(DeviceBuffer<float>::Allocate(q.size()));
      const PrefillAttention kernel =
          Unwrap(PrefillAttention::Create(shape, path, std::span(&heads, 1)));
      PrefillArguments args;
      args.cache = cache.view();
      args.sequences = cache.device_sequences();
      args.chunks = d_chunks.data();
      args.q = d_q.data();
      args.out = d_out.data();
      args.out_fp32 = true;
      args.softmax_scale = inputs[0].softmax_scale;
      args.batch = 1;
      args.max_query_tokens = kQueries;
      args.heads = heads;
      ASSERT_TRUE(kernel.Launch(args, nullptr).ok());
      const Status done = CudaStatus(cudaDeviceSynchronize(), "prefill");
      ASSERT_TRUE(done.ok()) << done.ToString();
      const std::vector<float> out = Unwrap(d_out.ToHost());
      for (int h = 0; h < kHeads; ++h) {
        const DenseKv dense =
            DecodeKvHead(cases[static_cast<size_t>(h)], inputs[static_cast<size_t>(h)], 0);
        for (const int i : {0, 1, 63, 64, 65}) {
          const size_t at = static_cast<size_t>(i) * per_row + static_cast<size_t>(h) * dims;
          std::vector<float> row(dims);
          for (size_t d = 0; d < dims; ++d) row[d] = ToFloat(q[at + d]);
          std::vector<double> expected(dims);
          ReferenceAttention(row, dense.k, dense.v, 64 + kPages * kPageTokens + i + 1,
                             args.softmax_scale, expected);
          EXPECT_LE(RelativeL2({&out[at], dims}, expected), kBudget)
              << "dim " << dim << " head " << h << " query " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace oscar::cuda
