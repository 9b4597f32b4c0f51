// Prefill on tiles: emulated ones, so that machines without AMX test all but the instructions
// themselves, and the real ones where there are some.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd/attention_prefill_amx_test.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h

#include <algorithm>
#include <cmath>
#include <vector>

#include "simd/attention_prefill-inl.h"
#include "simd/attention_prefill_amx-inl.h"
#include "simd/emulated_tiles-inl.h"

#if HWY_TARGET == HWY_AVX3
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {

// All of `query`, on one thread. `rows`: BF16 rows and keys that are not rows on tiles, too.
void EmulatedTilePrefill(const AttentionLayer& layer, const PrefillQuery& query, bool rows) {
  const int g = layer.q_heads / layer.kv_heads, step = PrefillTokensPerTask(g);
  AttentionWorkspace workspace;
  // Not a number, wherever a kernel reads what it has not written.
  workspace.scratch.Grow(PrefillScratchSize(layer.head_dim(), layer.num_groups()));
  std::fill_n(workspace.scratch.data(), workspace.scratch.size(), std::nanf(""));
  const auto run =
      rows ? &PrefillBlock<TilePath<EmulatedTiles>>
           : &PrefillBlock<CodeTilePath<EmulatedTiles, VectorPath<PairOp::kMadd, false>>>;
  for (int first = 0; first < query.num_tokens; first += step) {
    for (int h = 0; h < layer.kv_heads; ++h) {
      run(layer, query, h, h * g, g, first, std::min(step, query.num_tokens - first),
          workspace.scratch.data());
    }
  }
}

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_AVX3

#if HWY_ONCE
#include <gtest/gtest.h>

#include "cache/attention_reference.h"
#include "simd/attention_cases.h"
#include "simd/dispatch.h"
#include "simd/gemm.h"
#include "simd/gemm_kernels.h"

namespace oscar::simd {
namespace {

bool Has(Target target) { return std::ranges::count(SupportedTargets(), target) > 0; }

bool AmxTakesRows() {
  return Has(Target::kAmxInt8) && HasAmx() && DefaultGemmPath() != GemmPath::kAvx512Bf16;
}

std::vector<float> Emulated(const Prompt& prompt, bool rows) {
  std::vector<float> out(prompt.q.size());
  const size_t stride = prompt.in.q.size();
  const PrefillQuery query{prompt.paged.view(), prompt.first, prompt.count, prompt.q.data(), stride,
                           out.data(),          stride};
  N_AVX3::EmulatedTilePrefill(prompt.paged.layer, query, rows);
  return out;
}

// Every kind, head dim, group and pattern: sums of codes are exact.
TEST(TilePrefill, CodesGiveTheBitsOfVectors) {
  if (!Has(Target::kAvx512Vnni)) GTEST_SKIP() << "needs AVX-512 with VBMI";
  ThreadPool pool(1);
  int cases = 0;
  for (AttentionCase c : AttentionCases()) {
    if (c.kind == BlockKind::kBf16 || c.num_pages == 0) continue;
    c.num_pages = std::min(c.num_pages, 3);
    c.kv_heads = 1;
    c.recent_tokens = std::min(c.recent_tokens, 21);
    const Prompt prompt(c, std::max(1, std::min(c.recent_tokens, 19)));
    const ScopedTarget scope(Target::kAvx512Vnni);
    const auto expected = prompt.Run(pool, {prompt.count});
    EXPECT_EQ(Emulated(prompt, false), expected) << c.Name();
    if (Has(Target::kAmxInt8)) {
      const ScopedTarget tiles(Target::kAmxInt8);
      EXPECT_EQ(prompt.Run(pool, {prompt.count}), expected) << c.Name() << " on AMX";
    }
    ++cases;
  }
  EXPECT_GT(cases, 30);
}

// BF16 rows, windows and sinks included, whole tiles and rows beside them.
TEST(TilePrefill, RowsMeetTheBudget) {
  if (!Has(Target::kAvx512Vnni) || !HasAvx512Bf16()) GTEST_SKIP() << "needs AVX512-BF16";
  struct Shape {
    AttentionCase c;
    int tokens;
    int64_t window = 0;
  };
  const AttentionCase open{
      .kind = BlockKind::kBf16, .kv_heads = 1, .sink_tokens = 0, .num_pages = 0};
  std::vector<Shape> shapes;
  for (const int dims : {64, 128, 256}) {
    for (const int heads : {1, 3, 8}) {
      Shape shape{open, 70};
      shape.c.head_dim = shape.c.group_dims = dims;
      shape.c.queries_per_kv = heads;
      shape.c.recent_tokens = 150;
      shapes.push_back(shape);
      shape.window = heads == 8 ? 65 : 10;
      shapes.push_back(shape);
    }
  }
  shapes.push_back({{.kv_heads = 1, .num_pages = 2, .recent_tokens = 40}, 33});
  shapes.push_back({{.kind = BlockKind::kBf16, .kv_heads = 1, .recent_tokens = 40}, 33});
  Shape sharp{open, 60};
  sharp.c.recent_tokens = 130;
  sharp.c.pattern = AttentionPattern::kSharpLogits;
  shapes.push_back(sharp);
  ThreadPool pool(1);
  for (const Shape& shape : shapes) {
    Prompt prompt(shape.c, shape.tokens);
    prompt.paged.layer.window = shape.window;
    prompt.paged.layer.bf16_products = true;
    const auto emulated = Emulated(prompt, true);
    // Windows: against fp32 arithmetic, which the reference judges.
    std::vector<double> expected;
    if (shape.window == 0) {
      expected = prompt.Reference();
    } else {
      const ScopedTarget scope(Target::kAvx512);
      const auto exact = prompt.Run(pool, {prompt.count});
      expected.assign(exact.begin(), exact.end());
    }
    if (AmxTakesRows()) {
      const ScopedTarget tiles(Target::kAmxInt8);
      EXPECT_EQ(prompt.Run(pool, {prompt.count}), emulated) << prompt.c.Name();
    }
    const bool is_sharp = shape.c.pattern == AttentionPattern::kSharpLogits;
    // What rounding q and P costs a few tokens does not average out.
    const double budget = is_sharp ? kBf16Sharp : shape.window > 0 ? 2.0 * kBf16 : kBf16;
    const auto dims = static_cast<size_t>(prompt.c.head_dim);
    for (size_t at = 0; at < emulated.size(); at += dims) {
      ASSERT_LE(RelativeL2({emulated.data() + at, dims}, {expected.data() + at, dims}), budget)
          << prompt.c.Name() << " window " << shape.window << " row " << at / dims;
    }
  }
}

// Keys that are not rows, as two BF16 numbers: within the budget of the floats they stand for.
TEST(TilePrefill, KeysThatAreNotRowsMeetTheirBudget) {
  if (!Has(Target::kAvx512Vnni) || !HasAvx512Bf16()) GTEST_SKIP() << "needs AVX512-BF16";
  ThreadPool pool(2);
  for (AttentionCase c : FormCases()) {
    // Pages of codes alone but for the tokens themselves.
    c.sink_tokens = 0;
    c.num_pages = std::min(c.num_pages, 4);
    c.recent_tokens = 1;
    Prompt prompt(c, 1);
    prompt.paged.layer.bf16_products = true;
    const auto dims = static_cast<size_t>(c.head_dim);
    const auto expected = prompt.Reference();
    const auto emulated = Emulated(prompt, true);
    for (size_t at = 0; at < emulated.size(); at += dims) {
      ASSERT_LE(RelativeL2({emulated.data() + at, dims}, {expected.data() + at, dims}),
                prompt.c.budget)
          << prompt.c.Name() << " row " << at / dims;
    }
    if (!AmxTakesRows()) continue;
    const ScopedTarget tiles(Target::kAmxInt8);
    EXPECT_EQ(prompt.Run(pool, {1}), emulated) << prompt.c.Name();
    c.recent_tokens = 3;
    Prompt several(c, 3);
    several.paged.layer.bf16_products = true;
    EXPECT_EQ(several.Run(pool, {1, 2}), several.Run(pool, {3})) << several.c.Name();
  }
}

}  // namespace
}  // namespace oscar::simd
#endif  // HWY_ONCE
