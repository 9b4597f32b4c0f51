#include "cuda/attention/decode_attention.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <span>
#include <vector>

#include "cache/attention_reference.h"
#include "cuda/attention/test_cache.h"

namespace oscar::cuda {
namespace {

int SinkPages(const AttentionCase& c) { return std::max(1, (c.sink_tokens + 63) / 64); }

TestCache MakeCache(const AttentionCase& c, int rows) {
  return {ShapeOf(c),   rows,        c.num_pages, (c.recent_tokens + 63) / 64 + 2,
          SinkPages(c), CaseHeads(c)};
}

// Lays one sequence of the case into row `row`, its heads from `first_head` on; q comes back
// rounded to BF16.
AttentionInputs Place(const AttentionCase& c, uint64_t seed, int row, TestCache* cache,
                      std::vector<Bf16>* q, int first_head = 0) {
  AttentionInputs in = MakeAttentionInputs(c, CodeOrder::kTensorCore, seed);
  for (float& x : in.q) {
    const Bf16 rounded = ToBf16(x);
    q->push_back(rounded);
    x = ToFloat(rounded);
  }
  const auto dims = static_cast<size_t>(c.head_dim);
  const int ring_begin = c.sink_tokens / kPageTokens + c.num_pages;
  for (size_t at = 0; at < in.norms.size(); at += kPageTokens) {
    cache->SetNorms(row, static_cast<int>(at / kPageTokens), &in.norms[at]);
  }
  for (int h = 0; h < c.kv_heads; ++h) {
    for (int t = 0; t < c.sink_tokens; ++t) {
      const size_t at = static_cast<size_t>(h * c.sink_tokens + t) * dims;
      cache->SetWindowRow(row, t / 64, t % 64, first_head + h, &in.sink_k[at], &in.sink_v[at]);
    }
    for (int p = 0; p < c.num_pages; ++p) {
      const size_t block = in.layout.block_bytes();
      std::memcpy(cache->history_block(row, p, first_head + h),
                  in.blocks.data() + static_cast<size_t>(h * c.num_pages + p) * block, block);
    }
    for (int t = 0; t < c.recent_tokens; ++t) {
      const size_t at = static_cast<size_t>(h * c.recent_tokens + t) * dims;
      // Recent pages are in the ring even where their absolute index is below sink_pages.
      const int64_t page = ring_begin + t / 64;
      const int64_t ring =
          page < SinkPages(c) ? page + 1000 * ((c.recent_tokens + 63) / 64 + 2) : page;
      cache->SetWindowRow(row, ring, t % 64, first_head + h, &in.recent_k[at], &in.recent_v[at]);
    }
  }
  cache->sequence(row) = {c.sink_tokens, c.num_pages, c.recent_tokens, row};
  return in;
}

struct Decoder {
  Decoder(const AttentionShape& shape, int batch, const HeadBlocks& heads = {})
      : kernel(Unwrap(DecodeAttention::Create(
            shape, batch, 1024, std::span(&heads, heads.empty() ? size_t{0} : size_t{1})))),
        workspace(Unwrap(DeviceBuffer<std::byte>::Allocate(kernel.workspace_bytes()))),
        out(Unwrap(DeviceBuffer<float>::Allocate(
            static_cast<size_t>(batch * shape.num_q_heads * shape.head_dim)))) {
    EXPECT_TRUE(workspace.Fill(0).ok());
    EXPECT_TRUE(out.Fill(0xff).ok());
  }
  DecodeArguments Arguments(const TestCache& cache, const DeviceBuffer<Bf16>& q, float scale,
                            int batch) const {
    DecodeArguments args;
    args.cache = cache.view();
    args.sequences = cache.device_sequences();
    args.q = q.data();
    args.out = out.data();
    args.out_fp32 = true;
    args.softmax_scale = scale;
    args.batch = batch;
    args.workspace = workspace.data();
    args.heads = cache.heads();
    return args;
  }
  std::vector<float> Run(const DecodeArguments& args) {
    const Status launched = kernel.Launch(args, nullptr);
    EXPECT_TRUE(launched.ok()) << launched.ToString();
    const Status done = CudaStatus(cudaDeviceSynchronize(), "decode");
    EXPECT_TRUE(done.ok()) << done.ToString();
    return Unwrap(out.ToHost());
  }
  DecodeAttention kernel;
  DeviceBuffer<std::byte> workspace;
  DeviceBuffer<float> out;
};

class DecodeConformance : public testing::TestWithParam<AttentionCase> {};

// Row 0 is padding, rows 1 and 2 two draws of the case.
TEST_P(DecodeConformance, MatchesTheReference) {
  const AttentionCase& c = GetParam();
  TestCache cache = MakeCache(c, 3);
  std::vector<Bf16> q(static_cast<size_t>(c.q_heads() * c.head_dim));
  std::vector<AttentionInputs> inputs;
  for (int row = 1; row < 3; ++row) {
    inputs.push_back(Place(c, static_cast<uint64_t>(row), row, &cache, &q));
  }
  cache.Upload();
  const auto device_q = Unwrap(DeviceBuffer<Bf16>::Copy(q));
  Decoder decoder(ShapeOf(c), 3, cache.heads());
  const DecodeArguments args = decoder.Arguments(cache, device_q, inputs[0].softmax_scale, 3);
  const std::vector<float> out = decoder.Run(args);
  const auto per_row = static_cast<size_t>(c.q_heads() * c.head_dim);
  for (size_t i = 0; i < per_row; ++i) {
    ASSERT_TRUE(std::isnan(out[i])) << "a padded row was written at " << i;
  }
  const auto dims = static_cast<size_t>(c.head_dim);
  for (size_t row = 0; row < 2; ++row) {
    const std::vector<double> expected = ReferenceDecodeAttention(c, inputs[row]);
    for (int head = 0; head < c.q_heads(); ++head) {
      const size_t at = static_cast<size_t>(head) * dims;
      const double error =
          RelativeL2({&out[(row + 1) * per_row + at], dims}, {&expected[at], dims});
      EXPECT_LE(error, c.budget) << "row " << row << " head " << head;
    }
  }
  // The workspace is left ready for the next launch, and the same work gives the same bits.
  EXPECT_TRUE(decoder.out.Fill(0xff).ok());
  const std::vector<float> again = decoder.Run(args);
  EXPECT_EQ(std::memcmp(out.data(), again.data(), out.size() * sizeof(float)), 0);
}

INSTANTIATE_TEST_SUITE_P(Cases, DecodeConformance, testing::ValuesIn(AttentionCases()),
                         [](const auto& test) { return test.param.Name(); });
// Keys that are not rows.
INSTANTIATE_TEST_SUITE_P(Forms, DecodeConformance, testing::ValuesIn(FormCases()),
                         [](const auto& test) { return test.param.Name(); });
// Those with values in one group per row, where up to four heads have a kernel for themselves; long
// enough for several splits.
std::vector<AttentionCase> FourHeadCases() {
  std::vector<AttentionCase> cases;
  for (const SideForm form : {SideForm::kChannels, SideForm::kMixed, SideForm::kCodebook}) {
    for (const auto pattern : {AttentionPattern::kGaussian, AttentionPattern::kSharpLogits,
                               AttentionPattern::kOutlierQuery}) {
      for (const int queries : {1, 3, 4}) {
        const bool is_codebook = form == SideForm::kCodebook;
        cases.push_back({.kind = is_codebook ? BlockKind::kInt4 : BlockKind::kInt2,
                         .kv_heads = queries == 4 ? 1 : 2,
                         .queries_per_kv = queries,
                         .num_pages = queries == 4 ? 130 : 4,
                         .pattern = pattern,
                         .v_kind = is_codebook ? BlockKind::kInt3 : BlockKind::kInt2,
                         .k_form = form,
                         .group_tokens = is_codebook ? 0 : 128,
                         .boosted_dims = form == SideForm::kMixed ? 16 : 0});
      }
    }
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(FormsOfFourHeads, DecodeConformance, testing::ValuesIn(FourHeadCases()),
                         [](const auto& test) { return test.param.Name(); });

// Long enough for several splits. Over thousands of equally likely tokens the output is the small
// rest of a sum that nearly cancels against the min term, the more so where V scales differ by
// 2^16.
INSTANTIATE_TEST_SUITE_P(
    Long, DecodeConformance,
    testing::Values(
        AttentionCase{.kv_heads = 1, .num_pages = 301},
        AttentionCase{.kind = BlockKind::kInt4, .kv_heads = 1, .num_pages = 211},
        AttentionCase{.kind = BlockKind::kBf16, .kv_heads = 1, .num_pages = 50},
        AttentionCase{.kind = BlockKind::kInt3, .kv_heads = 1, .num_pages = 150},
        AttentionCase{.kind = BlockKind::kInt3,
                      .kv_heads = 1,
                      .num_pages = 150,
                      .pattern = AttentionPattern::kEqualLogits},
        AttentionCase{.kv_heads = 1, .queries_per_kv = 16, .num_pages = 100},
        AttentionCase{.kv_heads = 3, .num_pages = 130},
        AttentionCase{.kv_heads = 1, .num_pages = 300, .pattern = AttentionPattern::kSharpLogits},
        AttentionCase{.kv_heads = 1, .num_pages = 300, .pattern = AttentionPattern::kMixedScales},
        AttentionCase{.kv_heads = 1, .num_pages = 300, .pattern = AttentionPattern::kEqualLogits},
        // Small query dims beside a large one: 16 bits of the largest would be 3e-3.
        AttentionCase{.kv_heads = 1,
                      .sink_tokens = 0,
                      .num_pages = 300,
                      .recent_tokens = 0,
                      .pattern = AttentionPattern::kOutlierQuery},
        AttentionCase{.num_pages = 2, .recent_tokens = 900}),
    [](const auto& test) { return test.param.Name(); });

// One draw of rows may be lucky: what rounding does to sharp logits depends on the tokens they
// pick.
class DecodeDraws : public testing::TestWithParam<AttentionCase> {};

TEST_P(DecodeDraws, MeetTheBudget) {
  const AttentionCase& c = GetParam();
  constexpr int kDraws = 32;
  TestCache cache = MakeCache(c, kDraws);
  std::vector<Bf16> q;
  std::vector<AttentionInputs> inputs;
  for (int row = 0; row < kDraws; ++row) {
    inputs.push_back(Place(c, static_cast<uint64_t>(100 + row), row, &cache, &q));
  }
  cache.Upload();
  const auto device_q = Unwrap(DeviceBuffer<Bf16>::Copy(q));
  Decoder decoder(ShapeOf(c), kDraws, cache.heads());
  const std::vector<float> out =
      decoder.Run(decoder.Arguments(cache, device_q, inputs[0].softmax_scale, kDraws));
  const auto dims = static_cast<size_t>(c.head_dim);
  double worst = 0.0;
  for (size_t row = 0; row < kDraws; ++row) {
    const std::vector<double> expected = ReferenceDecodeAttention(c, inputs[row]);
    for (size_t at = 0; at < expected.size(); at += dims) {
      worst = std::max(worst,
                       RelativeL2({&out[row * expected.size() + at], dims}, {&expected[at], dims}));
    }
  }
  EXPECT_LE(worst, c.budget);
  RecordProperty("worst_error", fmt::format("{:.2e}", worst));
}

std::vector<AttentionCase> DrawCases() {
  std::vector<AttentionCase> cases;
  for (const BlockKind kind :
       {BlockKind::kInt2, BlockKind::kInt3, BlockKind::kInt4, BlockKind::kBf16}) {
    for (const auto pattern : {AttentionPattern::kGaussian, AttentionPattern::kSharpLogits,
                               AttentionPattern::kOneHugeLogit, AttentionPattern::kEqualLogits,
                               AttentionPattern::kMixedScales, AttentionPattern::kOutlierQuery}) {
      for (const int group : {32, 128}) {
        if (kind == BlockKind::kBf16 && group != 128) continue;
        cases.push_back({.kind = kind,
                         .group_dims = group,
                         .kv_heads = 4,
                         .sink_tokens = 0,
                         .num_pages = 5,
                         .recent_tokens = 0,
                         .pattern = pattern});
      }
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, DecodeDraws, testing::ValuesIn(DrawCases()),
                         [](const auto& test) { return test.param.Name(); });

// Heads with every pair of bits side by side, sequences of lengths around the edges of pages,
// rounds of the block's warps and splits.
struct MixedCase {
  int head_dim, group_dims, queries_per_kv;
  AttentionPattern pattern = AttentionPattern::kGaussian;
};
class MixedDecode : public testing::TestWithParam<MixedCase> {
 protected:
  // One sequence of one head.
  AttentionCase Case(const HeadBlock& head, int pages) const {
    const MixedCase& m = GetParam();
    return {.kind = head.k,
            .head_dim = m.head_dim,
            .group_dims = m.group_dims,
            .kv_heads = 1,
            .queries_per_kv = m.queries_per_kv,
            .sink_tokens = pages == 1 ? 0 : 64,
            .num_pages = pages,
            .recent_tokens = pages == 0 ? 64 : 1 + pages % 64,
            .pattern = m.pattern,
            .v_kind = head.v};
  }
};

TEST_P(MixedDecode, MatchesTheReference) {
  const MixedCase& m = GetParam();
  constexpr int kPages[] = {1, 0, 11, 12, 13, 73, 133};
  constexpr int kRows = std::size(kPages);
  HeadBlocks heads = NinePairs(m.head_dim, m.group_dims);
  const AttentionShape shape{.head_dim = m.head_dim,
                             .group_dims = m.group_dims,
                             .num_q_heads = 9 * m.queries_per_kv,
                             .num_kv_heads = 9};
  TestCache cache(shape, kRows, 133, 4, 1, heads);
  std::vector<Bf16> q;
  std::vector<std::vector<double>> expected;
  float scale = 0.0f;
  for (int row = 0; row < kRows; ++row) {
    for (int h = 0; h < 9; ++h) {
      const AttentionCase c = Case(heads[static_cast<size_t>(h)], kPages[row]);
      const AttentionInputs in = Place(c, static_cast<uint64_t>(row * 9 + h), row, &cache, &q, h);
      expected.push_back(ReferenceDecodeAttention(c, in));
      scale = in.softmax_scale;
    }
  }
  cache.Upload();
  const auto device_q = Unwrap(DeviceBuffer<Bf16>::Copy(q));
  Decoder decoder(shape, kRows, heads);
  const std::vector<float> out = decoder.Run(decoder.Arguments(cache, device_q, scale, kRows));
  const auto dims = static_cast<size_t>(m.head_dim);
  size_t at = 0;
  for (int row = 0; row < kRows; ++row) {
    for (int h = 0; h < 9; ++h) {
      const std::vector<double>& of_head = expected[static_cast<size_t>(row * 9 + h)];
      for (size_t i = 0; i < of_head.size(); i += dims, at += dims) {
        EXPECT_LE(RelativeL2({&out[at], dims}, {&of_head[i], dims}), AttentionCase().budget)
            << kPages[row] << " pages, head " << h << " with "
            << BitsOf(heads[static_cast<size_t>(h)].k) << " and "
            << BitsOf(heads[static_cast<size_t>(h)].v) << " bits";
      }
    }
  }
  // A sequence alone gives the same bits.
  const auto per_row = static_cast<size_t>(9 * m.queries_per_kv) * dims;
  DecodeArguments one = decoder.Arguments(cache, device_q, scale, 1);
  one.sequences = cache.device_sequences() + 5;
  one.q = device_q.data() + 5 * per_row;
  const std::vector<float> alone = decoder.Run(one);
  EXPECT_EQ(std::memcmp(alone.data(), out.data() + 5 * per_row, per_row * sizeof(float)), 0);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, MixedDecode,
    testing::Values(MixedCase{128, 128, 4}, MixedCase{128, 128, 1}, MixedCase{128, 128, 7},
                    MixedCase{128, 128, 12}, MixedCase{128, 64, 4}, MixedCase{128, 32, 3},
                    MixedCase{64, 64, 4}, MixedCase{64, 32, 8}, MixedCase{256, 256, 4},
                    MixedCase{256, 128, 2}, MixedCase{256, 64, 2}, MixedCase{256, 32, 2},
                    MixedCase{128, 128, 4, AttentionPattern::kSharpLogits},
                    MixedCase{128, 128, 4, AttentionPattern::kOutlierQuery},
                    MixedCase{128, 128, 4, AttentionPattern::kMixedScales},
                    MixedCase{64, 64, 2, AttentionPattern::kSharpLogits}),
    [](const auto& test) {
      const MixedCase& m = test.param;
      return fmt::format("{}_d{}_g{}_q{}", test.index, m.head_dim, m.group_dims, m.queries_per_kv);
    });

// So many heads that a sequence is one split, so many pages that a warp sums more than 256 of them:
// 32-bit sums must be scaled on the way. Repeating every page changes no output.
TEST(DecodeAttention, SumsManyPages) {
  const AttentionCase c{.kv_heads = 66, .sink_tokens = 0, .num_pages = 4, .recent_tokens = 0};
  constexpr int kTimes = 800;
  TestCache cache = MakeCache(c, 1);
  std::vector<Bf16> q;
  const AttentionInputs in = Place(c, 1, 0, &cache, &q);
  cache.RepeatHistory(kTimes);
  cache.sequence(0).history_pages = c.num_pages * kTimes;
  cache.Upload();
  const auto device_q = Unwrap(DeviceBuffer<Bf16>::Copy(q));
  Decoder decoder(ShapeOf(c), 1);
  const std::vector<float> out =
      decoder.Run(decoder.Arguments(cache, device_q, in.softmax_scale, 1));
  const std::vector<double> expected = ReferenceDecodeAttention(c, in);
  const auto dims = static_cast<size_t>(c.head_dim);
  for (size_t at = 0; at < out.size(); at += dims) {
    EXPECT_LE(RelativeL2({&out[at], dims}, {&expected[at], dims}), c.budget) << "at " << at;
  }
}

// A sequence's result is bitwise the same alone and inside a batch.
TEST(DecodeAttention, DoesNotDependOnTheRestOfTheBatch) {
  const AttentionCase c{.kv_heads = 2, .num_pages = 300, .recent_tokens = 300};
  const AttentionShape shape = ShapeOf(c);
  constexpr int kRows = 6;
  TestCache cache = MakeCache(c, kRows);
  std::vector<Bf16> q;
  float scale = 0.0f;
  for (int row = 0; row < kRows; ++row) {
    scale = Place(c, static_cast<uint64_t>(row + 1), row, &cache, &q).softmax_scale;
    cache.sequence(row).history_pages = row == 4 ? 300 : 37 * row;  // ragged
  }
  cache.Upload();
  const auto device_q = Unwrap(DeviceBuffer<Bf16>::Copy(q));
  Decoder decoder(shape, kRows);
  EXPECT_GT(decoder.kernel.NumSplits(300), 1);
  const std::vector<float> batched = decoder.Run(decoder.Arguments(cache, device_q, scale, kRows));
  const auto per_row = static_cast<size_t>(c.q_heads() * c.head_dim);
  for (const int row : {0, 4, 5}) {
    DecodeArguments one = decoder.Arguments(cache, device_q, scale, 1);
    one.sequences = cache.device_sequences() + row;
    one.q = device_q.data() + static_cast<size_t>(row) * per_row;
    const std::vector<float> alone = decoder.Run(one);
    EXPECT_EQ(std::memcmp(alone.data(), batched.data() + static_cast<size_t>(row) * per_row,
                          per_row * sizeof(float)),
              0)
        << "row " << row;
  }
}

// Captured once, replayed with other lengths; BF16 output is the rounded fp32 one.
TEST(DecodeAttention, ReplaysInAGraph) {
  const AttentionCase c{.num_pages = 210};
  TestCache cache = MakeCache(c, 2);
  std::vector<Bf16> q;
  float scale = 0.0f;
  for (int row = 0; row < 2; ++row) {
    scale = Place(c, static_cast<uint64_t>(row + 5), row, &cache, &q).softmax_scale;
  }
  cache.Upload();
  const auto device_q = Unwrap(DeviceBuffer<Bf16>::Copy(q));
  auto device_sequences = Unwrap(DeviceBuffer<SequenceView>::Allocate(2));
  Decoder decoder(ShapeOf(c), 2);
  DecodeArguments args = decoder.Arguments(cache, device_q, scale, 2);
  args.sequences = device_sequences.data();
  args.overlap_predecessor = true;
  auto rounded = Unwrap(DeviceBuffer<Bf16>::Allocate(q.size()));
  DecodeArguments args_bf16 = args;
  args_bf16.out = rounded.data();
  args_bf16.out_fp32 = false;

  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  ASSERT_TRUE(decoder.kernel.Launch(args, stream).ok());
  ASSERT_TRUE(decoder.kernel.Launch(args_bf16, stream).ok());
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (const int pages : {210, 1, 57}) {
    std::vector<SequenceView> lengths = {cache.sequence(0), cache.sequence(1)};
    lengths[0].history_pages = pages;
    if (pages == 1) lengths[1] = {};
    ASSERT_EQ(cudaMemcpy(device_sequences.data(), lengths.data(), 2 * sizeof(SequenceView),
                         cudaMemcpyHostToDevice),
              cudaSuccess);
    EXPECT_TRUE(decoder.out.Fill(0xff).ok());
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    const std::vector<float> replayed = Unwrap(decoder.out.ToHost());
    const std::vector<Bf16> as_bf16 = Unwrap(rounded.ToHost());
    EXPECT_TRUE(decoder.out.Fill(0xff).ok());
    const std::vector<float> direct = decoder.Run(args);
    EXPECT_EQ(std::memcmp(replayed.data(), direct.data(), direct.size() * sizeof(float)), 0);
    for (size_t i = 0; i < direct.size() / 2; ++i) ASSERT_EQ(as_bf16[i], ToBf16(direct[i]));
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST(DecodeAttention, RefusesWhatItCannotDo) {
  EXPECT_EQ(DecodeAttention::Create({.head_dim = 96}, 1, 320).error().code(),
            StatusCode::kUnimplemented);
  EXPECT_EQ(DecodeAttention::Create({.num_q_heads = 33}, 1, 320).error().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(DecodeAttention::Create({.num_q_heads = 136, .num_kv_heads = 8}, 1, 320).error().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(DecodeAttention::Create({}, 0, 320).error().code(), StatusCode::kInvalidArgument);
  const std::vector<HeadBlocks> nine = {NinePairs(128, 128)};
  EXPECT_EQ(DecodeAttention::Create({}, 1, 320, nine).error().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace oscar::cuda
