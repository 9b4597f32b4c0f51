// Attention with learned sinks and sliding windows against fp64.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "cache/attention_reference.h"
#include "cuda/attention/decode_attention.h"
#include "cuda/attention/prefill_attention.h"
#include "cuda/attention/test_cache.h"

namespace oscar::cuda {
namespace {

struct SinkCase {
  AttentionCase attention;
  int sliding_window;  // 0: all
  int query_tokens;    // of a chunk
};

AttentionCase Case(BlockKind kind, int sink, int pages, int recent, int group_dims = 64) {
  return {.kind = kind,
          .head_dim = kSinkHeadDim,
          .group_dims = kind == BlockKind::kBf16 ? kSinkHeadDim : group_dims,
          .sink_tokens = sink,
          .num_pages = pages,
          .recent_tokens = recent};
}

// What sinks do not touch, what they share and what they take nearly all of.
float SinkOf(int head) {
  constexpr float kSinks[] = {-70.0f, -1.0f, 0.5f, 3.0f, 9.0f, 20.0f};
  return kSinks[head % 6];
}

class SinkTest : public testing::TestWithParam<SinkCase> {
 protected:
  SinkTest() {
    const AttentionCase& c = GetParam().attention;
    shape_ = {.history_kind = c.kind,
              .head_dim = c.head_dim,
              .group_dims = c.group_dims,
              .num_q_heads = c.q_heads(),
              .num_kv_heads = c.kv_heads,
              .has_sinks = true,
              .sliding_window = GetParam().sliding_window};
    if (c.v_kind.has_value() || c.kind == BlockKind::kInt3) {
      heads_ = HeadsOf(std::vector<BlockLayout>(static_cast<size_t>(c.kv_heads),
                                                c.layout(CodeOrder::kTensorCore)));
    }
    std::vector<float> sinks;
    for (int head = 0; head < c.q_heads(); ++head) {
      sinks.push_back(SinkOf(head) * 1.4426950408889634f);
    }
    sinks_ = Unwrap(DeviceBuffer<float>::Copy(sinks));
  }
  // A sequence in row `row`. History that a window does not show stays what it is: no numbers.
  AttentionInputs Place(TestCache& cache, int row, uint64_t seed) const {
    const AttentionCase& c = GetParam().attention;
    AttentionInputs in = MakeAttentionInputs(c, CodeOrder::kTensorCore, seed);
    const auto dims = static_cast<size_t>(c.head_dim);
    const int ring = Ring();
    for (int h = 0; h < c.kv_heads; ++h) {
      for (int t = 0; t < c.sink_tokens; ++t) {
        const size_t at = static_cast<size_t>(h * c.sink_tokens + t) * dims;
        cache.SetWindowRow(row, t / 64, t % 64, h, &in.sink_k[at], &in.sink_v[at]);
      }
      for (int p = 0; p < c.num_pages && GetParam().sliding_window == 0; ++p) {
        const size_t block = in.layout.block_bytes();
        std::memcpy(cache.history_block(row, p, h),
                    in.blocks.data() + static_cast<size_t>(h * c.num_pages + p) * block, block);
      }
      for (int t = 0; t < c.recent_tokens; ++t) {
        const size_t at = static_cast<size_t>(h * c.recent_tokens + t) * dims;
        const int64_t page = c.sink_tokens / kPageTokens + c.num_pages + t / 64;
        cache.SetWindowRow(row, page < 1 ? page + 1000 * ring : page, t % 64, h, &in.recent_k[at],
                           &in.recent_v[at]);
      }
    }
    cache.sequence(row) = {c.sink_tokens, c.num_pages, c.recent_tokens, row};
    return in;
  }
  int Ring() const { return (GetParam().attention.recent_tokens + 63) / 64 + 2; }
  TestCache MakeCache(int rows) const {
    return {shape_, rows, GetParam().attention.num_pages, Ring(), 1, heads_};
  }
  // Of the query at `position`.
  std::vector<double> Expected(std::span<const float> q, const DenseKv& kv, int position,
                               float scale, int head) const {
    const auto dims = q.size();
    const int window = GetParam().sliding_window;
    const int first = window == 0 ? 0 : std::max(0, position - window + 1);
    double largest = double{SinkOf(head)}, sum = 0.0;
    std::vector<double> logits, out(dims, 0.0);
    for (int t = first; t <= position; ++t) {
      double dot = 0.0;
      for (size_t d = 0; d < dims; ++d) {
        dot += double{q[d]} * double{kv.k[static_cast<size_t>(t) * dims + d]};
      }
      logits.push_back(dot * double{scale});
      largest = std::max(largest, logits.back());
    }
    for (int t = first; t <= position; ++t) {
      const double p = std::exp(logits[static_cast<size_t>(t - first)] - largest);
      sum += p;
      for (size_t d = 0; d < dims; ++d) {
        out[d] += p * double{kv.v[static_cast<size_t>(t) * dims + d]};
      }
    }
    sum += std::exp(double{SinkOf(head)} - largest);
    for (double& x : out) x /= sum;
    return out;
  }

  AttentionShape shape_;
  HeadBlocks heads_;
  DeviceBuffer<float> sinks_;
};

// Row 0 is padding, rows 1 and 2 two draws of the case.
TEST_P(SinkTest, DecodeMatchesTheReference) {
  const AttentionCase& c = GetParam().attention;
  TestCache cache = MakeCache(3);
  const auto dims = static_cast<size_t>(c.head_dim);
  const size_t per_row = static_cast<size_t>(c.q_heads()) * dims;
  std::vector<Bf16> q(per_row);
  std::vector<AttentionInputs> inputs;
  for (int row = 1; row < 3; ++row) {
    inputs.push_back(Place(cache, row, static_cast<uint64_t>(row)));
    for (float& x : inputs.back().q) {
      q.push_back(ToBf16(x));
      x = ToFloat(q.back());
    }
  }
  cache.Upload();
  const auto d_q = Unwrap(DeviceBuffer<Bf16>::Copy(q));
  const DecodeAttention kernel = Unwrap(DecodeAttention::Create(
      shape_, 3, 1024, std::span(&heads_, heads_.empty() ? size_t{0} : size_t{1})));
  auto workspace = Unwrap(DeviceBuffer<std::byte>::Allocate(kernel.workspace_bytes()));
  auto d_out = Unwrap(DeviceBuffer<float>::Allocate(q.size()));
  ASSERT_TRUE(workspace.Fill(0).ok());
  ASSERT_TRUE(d_out.Fill(0xff).ok());
  DecodeArguments args;
  args.cache = cache.view();
  args.sequences = cache.device_sequences();
  args.q = d_q.data();
  args.out = d_out.data();
  args.out_fp32 = true;
  args.softmax_scale = inputs[0].softmax_scale;
  args.batch = 3;
  args.workspace = workspace.data();
  args.heads = heads_;
  EXPECT_EQ(kernel.Launch(args, nullptr).code(), StatusCode::kInvalidArgument);  // no sinks
  args.sinks = sinks_.data();
  const Status launched = kernel.Launch(args, nullptr);
  ASSERT_TRUE(launched.ok()) << launched.ToString();
  const Status done = CudaStatus(cudaDeviceSynchronize(), "decode");
  ASSERT_TRUE(done.ok()) << done.ToString();
  const std::vector<float> out = Unwrap(d_out.ToHost());
  for (size_t i = 0; i < per_row; ++i) ASSERT_TRUE(std::isnan(out[i])) << i;
  for (size_t row = 0; row < 2; ++row) {
    for (int head = 0; head < c.q_heads(); ++head) {
      const DenseKv kv = DecodeKvHead(c, inputs[row], head / c.queries_per_kv);
      const size_t at = static_cast<size_t>(head) * dims;
      const std::vector<double> expected =
          Expected({&inputs[row].q[at], dims}, kv, c.num_tokens() - 1, args.softmax_scale, head);
      EXPECT_LE(RelativeL2({&out[(row + 1) * per_row + at], dims}, expected), c.budget)
          << "row " << row << " head " << head;
    }
  }
}

TEST_P(SinkTest, PrefillMatchesTheReference) {
  constexpr double kBudget = 1e-3;
  const AttentionCase& c = GetParam().attention;
  const int queries = GetParam().query_tokens;
  TestCache cache = MakeCache(2);
  const AttentionInputs in = Place(cache, 1, 3);
  cache.Upload();
  const auto dims = static_cast<size_t>(c.head_dim);
  const size_t per_row = static_cast<size_t>(c.q_heads()) * dims;
  std::vector<Bf16> q(static_cast<size_t>(queries) * per_row);
  const Philox rng(9, 3);
  for (size_t i = 0; i < q.size(); ++i) {
    q[i] = ToBf16(in.q[i % per_row] + 0.5f * rng.Normal(i));
  }
  const auto d_q = Unwrap(DeviceBuffer<Bf16>::Copy(q));
  const auto d_chunks =
      Unwrap(DeviceBuffer<PrefillChunk>::Copy(std::vector<PrefillChunk>{{0, 0}, {0, queries}}));
  for (const PrefillPath path : {PrefillPath::kBest, PrefillPath::kGeneric}) {
    auto d_out = Unwrap(DeviceBuffer<float>::Allocate(q.size()));
    ASSERT_TRUE(d_out.Fill(0xff).ok());
    const PrefillAttention kernel = Unwrap(PrefillAttention::Create(
        shape_, path, std::span(&heads_, heads_.empty() ? size_t{0} : size_t{1})));
    PrefillArguments args;
    args.cache = cache.view();
    args.sequences = cache.device_sequences();
    args.chunks = d_chunks.data();
    args.q = d_q.data();
    args.out = d_out.data();
    args.out_fp32 = true;
    args.softmax_scale = in.softmax_scale;
    args.batch = 2;
    args.max_query_tokens = queries;
    args.heads = heads_;
    args.sinks = sinks_.data();
    const Status launched = kernel.Launch(args, nullptr);
    ASSERT_TRUE(launched.ok()) << launched.ToString();
    const Status done = CudaStatus(cudaDeviceSynchronize(), "prefill");
    ASSERT_TRUE(done.ok()) << done.ToString();
    const std::vector<float> out = Unwrap(d_out.ToHost());
    for (int head = 0; head < c.q_heads(); ++head) {
      const DenseKv kv = DecodeKvHead(c, in, head / c.queries_per_kv);
      for (int i = 0; i < queries; ++i) {
        // Every query near the edges, a sample of the others.
        if (i > 2 && i + 3 < queries && i % 17 != 0 && i % 64 > 1 && i % 64 < 62) continue;
        const size_t at = static_cast<size_t>(i) * per_row + static_cast<size_t>(head) * dims;
        std::vector<float> row(dims);
        for (size_t d = 0; d < dims; ++d) row[d] = ToFloat(q[at + d]);
        const std::vector<double> expected =
            Expected(row, kv, c.num_tokens() - queries + i, in.softmax_scale, head);
        ASSERT_LE(RelativeL2({&out[at], dims}, expected), kBudget)
            << "query " << i << " head " << head
            << (path == PrefillPath::kBest ? "" : " without wgmma");
      }
    }
  }
}

std::vector<SinkCase> Cases() {
  using enum BlockKind;
  std::vector<SinkCase> cases;
  const auto add = [&](AttentionCase c, int window, int queries, int per_kv, int kv_heads = 1) {
    c.kv_heads = kv_heads;
    c.queries_per_kv = per_kv;
    cases.push_back({c, window, queries});
  };
  // Layers that see all: gpt-oss has 8 query heads per KV head.
  for (const BlockKind kind : {kInt2, kInt3, kInt4, kBf16}) {
    for (const int group : {64, 32}) {
      if (kind == kBf16 && group == 32) continue;
      add(Case(kind, 64, 5, 150, group), 0, 70, 8);
    }
    add(Case(kind, 0, 0, 1), 0, 1, 2, 2);
  }
  AttentionCase mixed = Case(kInt4, 64, 3, 70);
  mixed.v_kind = kInt2;
  add(mixed, 0, 33, 6, 2);
  // Several splits, whose merge adds the sink once.
  add(Case(kInt2, 64, 300, 10), 0, 3, 8);
  add(Case(kBf16, 64, 60, 10), 0, 3, 8);
  // Windows inside the recent tokens, over edges of tiles, pages and units.
  add(Case(kBf16, 64, 3, 300), 128, 150, 8);
  add(Case(kBf16, 64, 2, 391), 128, 264, 2, 2);
  add(Case(kBf16, 64, 1, 257), 10, 129, 3);
  add(Case(kBf16, 0, 1, 200), 64, 137, 2);
  add(Case(kBf16, 0, 2, 145), 17, 65, 1, 2);
  add(Case(kBf16, 64, 1, 70), 1, 70, 2);
  // Sequences that are all windows: they begin in the sink, or before all tokens.
  add(Case(kBf16, 64, 0, 200), 128, 264, 2);
  add(Case(kBf16, 64, 0, 36), 128, 100, 2);
  add(Case(kBf16, 64, 0, 77), 64, 141, 1);
  add(Case(kBf16, 33, 0, 0), 10, 33, 2);
  add(Case(kBf16, 64, 0, 50), 5000, 114, 2);
  // More than one item of units.
  add(Case(kBf16, 64, 1, 990), 800, 9, 2);
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, SinkTest, testing::ValuesIn(Cases()), [](const auto& test) {
  const SinkCase& c = test.param;
  return fmt::format("{}_{}_w{}_q{}", test.index, c.attention.Name(), c.sliding_window,
                     c.query_tokens);
});

}  // namespace
}  // namespace oscar::cuda
