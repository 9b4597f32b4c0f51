// The tile kernels of INT2 decode on emulated tiles, so that machines without AMX test all but the
// instructions themselves; those run wherever Target::kAmxInt8 is supported (attention_test.cc).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd/attention_amx_test.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h

#include <algorithm>
#include <cstring>

#include "simd/attention_amx-inl.h"
#include "simd/emulated_tiles-inl.h"

#if HWY_TARGET == HWY_AVX3
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {
// Attention of `heads` queries (q: [heads, D]) over `count` pages; out: [heads, D].
void EmulatedTileAttention(const BlockLayout& layout, const std::byte* const* blocks, int count,
                           int last_visible, int heads, const float* q, float softmax_scale,
                           float* out) {
  TileQuery query;
  const int dims = layout.head_dim();
  const float scale = softmax_scale * 1.4426950408889634f;
  for (int h = 0; h < heads; ++h) {
    PrepareTileQuery(q + h * dims, layout, scale, h, QueryPart::kRounded, query);
  }
  Remainder<TileQuery> remainder(q, heads, scale, &PrepareTileQuery);
  float m[kMaxTileHeads], d[kMaxTileHeads];
  alignas(64) float o[kMaxTileHeads * kMaxPageDims] = {};
  std::fill_n(m, kMaxTileHeads, kEmptyMax);
  std::fill_n(d, kMaxTileHeads, 0.0f);
  // In two runs, so that the second finds a state.
  const int first = count / 2;
  if (first > 0) {
    TilePages<EmulatedTiles>(layout, blocks, first, count, kPageTokens, heads, query, remainder, m,
                             d, o);
  }
  TilePages<EmulatedTiles>(layout, blocks + first, count - first, count - first, last_visible,
                           heads, query, remainder, m, d, o);
  for (int i = 0; i < heads * dims; ++i) out[i] = o[i] / d[i / dims];
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_AVX3

#if HWY_ONCE
#include <gtest/gtest.h>

#include <vector>

#include "cache/attention_reference.h"
#include "simd/dispatch.h"

namespace oscar::simd {
namespace {

TEST(TileAttention, MeetsTheBudgetOfEveryCaseOnEmulatedTiles) {
  bool has_avx512 = false;
  for (const Target target : SupportedTargets()) has_avx512 |= target == Target::kAvx512;
  if (!has_avx512) GTEST_SKIP() << "needs AVX-512";
  int cases = 0;
  for (AttentionCase c : AttentionCases()) {
    if (c.kind != BlockKind::kInt2 || c.v_kind.has_value() || c.num_pages == 0) continue;
    c.sink_tokens = c.recent_tokens = 0;
    // One draw of rows may be lucky where logits are sharp.
    const uint64_t draws = c.pattern == AttentionPattern::kGaussian ? 1 : 6;
    for (uint64_t draw = 0; draw < draws; ++draw) {
      const AttentionInputs in = MakeAttentionInputs(c, CodeOrder::kCpu, 1 + draw);
      const auto dims = static_cast<size_t>(c.head_dim);
      const auto expected = ReferenceDecodeAttention(c, in);
      const int g = c.queries_per_kv;
      for (int kv = 0; kv < c.kv_heads; ++kv) {
        std::vector<const std::byte*> blocks;
        for (int p = 0; p < c.num_pages; ++p) {
          blocks.push_back(in.blocks.data() +
                           static_cast<size_t>(kv * c.num_pages + p) * in.layout.block_bytes());
        }
        for (int base = 0; base < g; base += 8) {
          const int heads = std::min(8, g - base);
          const size_t at = static_cast<size_t>(kv * g + base) * dims;
          std::vector<float> out(static_cast<size_t>(heads) * dims);
          N_AVX3::EmulatedTileAttention(in.layout, blocks.data(), c.num_pages, kPageTokens, heads,
                                        in.q.data() + at, in.softmax_scale, out.data());
          for (int h = 0; h < heads; ++h) {
            const size_t row = static_cast<size_t>(h) * dims;
            EXPECT_LE(RelativeL2({out.data() + row, dims}, {expected.data() + at + row, dims}),
                      c.budget)
                << c.Name() << " query head " << kv * g + base + h;
          }
        }
      }
    }
    ++cases;
  }
  EXPECT_GT(cases, 30);
}

TEST(TileAttention, TokensBeyondTheVisibleOnesDoNotCount) {
  bool has_avx512 = false;
  for (const Target target : SupportedTargets()) has_avx512 |= target == Target::kAvx512;
  if (!has_avx512) GTEST_SKIP() << "needs AVX-512";
  const AttentionCase c{
      .kv_heads = 1, .queries_per_kv = 6, .sink_tokens = 0, .num_pages = 2, .recent_tokens = 0};
  const AttentionInputs in = MakeAttentionInputs(c, CodeOrder::kCpu);
  const DenseKv dense = DecodeKvHead(c, in, 0);
  const auto dims = static_cast<size_t>(c.head_dim);
  const std::byte* blocks[2] = {in.blocks.data(), in.blocks.data() + in.layout.block_bytes()};
  for (const int visible : {1, 15, 16, 17, 63, 64}) {
    std::vector<float> out(6 * dims);
    N_AVX3::EmulatedTileAttention(in.layout, blocks, 2, visible, 6, in.q.data(), in.softmax_scale,
                                  out.data());
    for (size_t h = 0; h < 6; ++h) {
      std::vector<double> expected(dims);
      ReferenceAttention({in.q.data() + h * dims, dims}, dense.k, dense.v, kPageTokens + visible,
                         in.softmax_scale, expected);
      EXPECT_LE(RelativeL2({out.data() + h * dims, dims}, expected), c.budget)
          << visible << " visible, head " << h;
    }
  }
}

}  // namespace
}  // namespace oscar::simd
#endif  // HWY_ONCE
