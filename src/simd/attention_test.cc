#include "simd/attention.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "base/rng.h"
#include "cache/attention_reference.h"
#include "simd/attention_cases.h"
#include "simd/attention_state.h"
#include "simd/dispatch.h"

namespace oscar::simd {
namespace {

std::vector<float> Decode(ThreadPool& pool, const PagedCase& paged, const AttentionInputs& in) {
  AttentionWorkspace workspace;
  std::vector<float> out(in.q.size());
  const DecodeQuery query{paged.view(), paged.num_tokens, in.q.data(), out.data()};
  DecodeAttention(pool, workspace, paged.layer, {&query, 1});
  return out;
}

class AttentionTest : public testing::TestWithParam<Target> {
 protected:
  ScopedTarget target_{GetParam()};
};

void DecodeMeetsTheBudget(std::span<const AttentionCase> cases) {
  ThreadPool pool(2);
  for (const AttentionCase& listed : cases) {
    const AttentionCase c = WholePages(listed);
    const AttentionInputs in = MakeAttentionInputs(c, CodeOrder::kCpu);
    const auto expected = ReferenceDecodeAttention(c, in);
    PagedCase paged = MakePages(c, in);
    const auto dims = static_cast<size_t>(c.head_dim);
    for (const Target target : SupportedTargets()) {
      const ScopedTarget scope(target);
      for (const bool bf16 : {false, true}) {
        // Rounding q to BF16 moves a logit by up to 2^-9 of what its terms add up to.
        const bool sharp = c.pattern != AttentionPattern::kGaussian;
        const bool rounds =
            bf16 && (c.kind == BlockKind::kBf16 || c.sink_tokens > 0 || c.recent_tokens > 0);
        const double budget = !rounds ? c.budget : sharp ? kBf16Sharp : kBf16;
        paged.layer.bf16_products = bf16;
        const auto actual = Decode(pool, paged, in);
        for (size_t at = 0; at < actual.size(); at += dims) {
          const double error = RelativeL2({actual.data() + at, dims}, {expected.data() + at, dims});
          EXPECT_LE(error, budget) << c.Name() << " on " << TargetName(target) << ", query head "
                                   << at / dims << (bf16 ? ", BF16 products" : "");
        }
      }
    }
  }
}

TEST(DecodeAttention, MeetsTheBudgetOfEveryCaseOnEveryTarget) {
  DecodeMeetsTheBudget(AttentionCases());
}

TEST(DecodeAttention, MeetsTheBudgetOfKeysThatAreNotRows) { DecodeMeetsTheBudget(FormCases()); }

// One draw of rows may be lucky: what rounding does to sharp logits depends on the tokens they
// pick.
TEST(DecodeAttention, MeetsItsBudgetOnManyDraws) {
  ThreadPool pool(2);
  for (const auto pattern : {AttentionPattern::kGaussian, AttentionPattern::kSharpLogits,
                             AttentionPattern::kOneHugeLogit, AttentionPattern::kEqualLogits,
                             AttentionPattern::kMixedScales, AttentionPattern::kOutlierQuery}) {
    for (const auto& [kind, group_dims] :
         {std::pair{BlockKind::kInt2, 32}, {BlockKind::kInt2, 128}, {BlockKind::kInt4, 128}}) {
      const AttentionCase c{.kind = kind,
                            .group_dims = group_dims,
                            .kv_heads = 4,
                            .sink_tokens = 0,
                            .num_pages = 3,
                            .recent_tokens = 0,
                            .pattern = pattern};
      const auto dims = static_cast<size_t>(c.head_dim);
      std::map<Target, double> largest;
      for (uint64_t seed = 100; seed < 116; ++seed) {
        const AttentionInputs in = MakeAttentionInputs(c, CodeOrder::kCpu, seed);
        const auto expected = ReferenceDecodeAttention(c, in);
        const PagedCase paged = MakePages(c, in);
        for (const Target target : SupportedTargets()) {
          const ScopedTarget scope(target);
          const auto actual = Decode(pool, paged, in);
          double& worst = largest[target];
          for (size_t at = 0; at < actual.size(); at += dims) {
            worst = std::max(worst,
                             RelativeL2({actual.data() + at, dims}, {expected.data() + at, dims}));
          }
        }
      }
      for (const auto& [target, worst] : largest) {
        EXPECT_LE(worst, c.budget) << c.Name() << " on " << TargetName(target);
        RecordProperty(c.Name() + "_" + std::string(TargetName(target)),
                       fmt::format("{:.2e}", worst));
      }
    }
  }
}

TEST_P(AttentionTest, DecodeIsTheSameForAnyThreadCountAndBatch) {
  ThreadPool one(1), three(3);
  const AttentionCase a = WholePages({.num_pages = 70, .recent_tokens = 33});
  const AttentionCase b = WholePages({.num_pages = 2, .recent_tokens = 7});
  const auto in_a = MakeAttentionInputs(a, CodeOrder::kCpu, 1);
  const auto in_b = MakeAttentionInputs(b, CodeOrder::kCpu, 2);
  PagedCase pages_a = MakePages(a, in_a), pages_b = MakePages(b, in_b);
  // Falls back to fp32 on targets without it.
  pages_a.layer.bf16_products = pages_b.layer.bf16_products = true;
  const auto alone_a = Decode(one, pages_a, in_a), alone_b = Decode(one, pages_b, in_b);
  std::vector<float> out_a(alone_a.size()), out_b(alone_b.size()), out_c(alone_a.size());
  const DecodeQuery batch[] = {{pages_b.view(), pages_b.num_tokens, in_b.q.data(), out_b.data()},
                               {pages_a.view(), pages_a.num_tokens, in_a.q.data(), out_a.data()},
                               {pages_a.view(), pages_a.num_tokens, in_a.q.data(), out_c.data()}};
  AttentionWorkspace workspace;
  for (int round = 0; round < 3; ++round) {
    DecodeAttention(three, workspace, pages_a.layer, batch);
    EXPECT_EQ(out_a, alone_a);
    EXPECT_EQ(out_b, alone_b);
    EXPECT_EQ(out_c, alone_a);
  }
}

TEST(PrefillAttention, MatchesTheReferenceOnEveryTarget) {
  // q and P have 15 bits against packed pages. Against BF16 pages they have 24, or 8 where the
  // products are BF16, which costs most on sharp logits (+-40).
  ThreadPool pool(2);
  for (const AttentionCase& shape :
       {AttentionCase{.num_pages = 3, .recent_tokens = 150},
        AttentionCase{.head_dim = 64, .group_dims = 32, .queries_per_kv = 7, .recent_tokens = 90},
        AttentionCase{.kind = BlockKind::kInt4,
        .head_dim = 256,
        .group_dims = 64,
        .kv_heads = 1,
        .num_pages = 1,
        .recent_tokens = 70},
        AttentionCase{.kind = BlockKind::kBf16, .queries_per_kv = 1, .recent_tokens = 65},
        AttentionCase{.sink_tokens = 0,
        .num_pages = 0,
        .recent_tokens = 130,
        .pattern = AttentionPattern::kSharpLogits}}) {
    Prompt prompt(shape, std::min(100, shape.recent_tokens));
    const AttentionCase& c = prompt.c;
    const auto dims = static_cast<size_t>(c.head_dim);
    const auto expected = prompt.Reference();
    for (const Target target : SupportedTargets()) {
      const ScopedTarget scope(target);
      for (const bool bf16 : {false, true}) {
        prompt.paged.layer.bf16_products = bf16;
        const double budget = !bf16                                         ? kPacked
                              : c.pattern == AttentionPattern::kSharpLogits ? kBf16Sharp
                                                                            : kBf16;
        const auto actual = prompt.Run(pool, {prompt.count});
        for (size_t at = 0; at < actual.size(); at += dims) {
          ASSERT_LE(RelativeL2({actual.data() + at, dims}, {expected.data() + at, dims}), budget)
              << c.Name() << " row " << at / dims << " on " << TargetName(target) << " " << bf16;
        }
      }
    }
  }
}

TEST(PrefillAttention, MatchesTheReferenceOnKeysThatAreNotRows) {
  ThreadPool pool(2);
  for (AttentionCase shape : FormCases()) {
    // BF16 pages have budgets of their own, above.
    shape.sink_tokens = 0;
    shape.num_pages = std::min(shape.num_pages, 4);
    shape.recent_tokens = 3;
    const Prompt prompt(shape, 3);
    const auto dims = static_cast<size_t>(shape.head_dim);
    const auto expected = prompt.Reference();
    for (const Target target : SupportedTargets()) {
      const ScopedTarget scope(target);
      const auto actual = prompt.Run(pool, {3});
      EXPECT_EQ(prompt.Run(pool, {1, 2}), actual);
      for (size_t at = 0; at < actual.size(); at += dims) {
        ASSERT_LE(RelativeL2({actual.data() + at, dims}, {expected.data() + at, dims}),
                  prompt.c.budget)
            << prompt.c.Name() << " row " << at / dims << " on " << TargetName(target);
      }
    }
  }
}

// What the disk or another process put there: nothing is read outside of the block.
TEST(Attention, KeysOfAnyBytesAreReadWithoutHarm) {
  ThreadPool pool(1);
  for (AttentionCase shape : FormCases()) {
    if (shape.pattern != AttentionPattern::kGaussian || shape.num_pages > 4) continue;
    shape.sink_tokens = 0, shape.recent_tokens = 1;
    Prompt prompt(shape, 1);
    const Philox rng(17, static_cast<uint64_t>(shape.head_dim));
    for (size_t page = 0; page + 1 < prompt.paged.storage.size(); ++page) {
      auto& bytes = prompt.paged.storage[page];
      for (size_t i = 0; i < bytes.size(); ++i) {
        bytes[i] = static_cast<std::byte>(rng.Bits(page * bytes.size() + i));
      }
    }
    for (const Target target : SupportedTargets()) {
      const ScopedTarget scope(target);
      EXPECT_EQ(Decode(pool, prompt.paged, prompt.in).size(), prompt.in.q.size());
      EXPECT_EQ(prompt.Run(pool, {1}).size(), prompt.q.size());
    }
  }
}

TEST(PrefillAttention, MeetsItsBudgetOnManyDraws) {
  ThreadPool pool(2);
  for (const auto pattern : {AttentionPattern::kSharpLogits, AttentionPattern::kOneHugeLogit,
                             AttentionPattern::kMixedScales, AttentionPattern::kOutlierQuery}) {
    for (const auto& [kind, group_dims] :
         {std::pair{BlockKind::kInt2, 32}, {BlockKind::kInt2, 128}, {BlockKind::kInt4, 128}}) {
      for (uint64_t seed = 100; seed < 110; ++seed) {
        const Prompt prompt({.kind = kind,
                             .group_dims = group_dims,
                             .sink_tokens = 0,
                             .num_pages = 3,
                             .recent_tokens = 3,
                             .pattern = pattern},
                            3, seed);
        const auto dims = static_cast<size_t>(prompt.c.head_dim);
        const auto expected = prompt.Reference();
        for (const Target target : SupportedTargets()) {
          const ScopedTarget scope(target);
          const auto actual = prompt.Run(pool, {prompt.count});
          for (size_t at = 0; at < actual.size(); at += dims) {
            ASSERT_LE(RelativeL2({actual.data() + at, dims}, {expected.data() + at, dims}),
                      prompt.c.budget)
                << prompt.c.Name() << " row " << at / dims << " on " << TargetName(target)
                << " draw " << seed;
          }
        }
      }
    }
  }
}

TEST_P(AttentionTest, PrefillIsTheSameForAnyChunkingAndThreadCount) {
  // Head dims and groups that take every width of product.
  for (const AttentionCase& shape :
       {AttentionCase{.num_pages = 2, .recent_tokens = 200},
        AttentionCase{.head_dim = 64, .group_dims = 32, .queries_per_kv = 3, .recent_tokens = 200},
        // Rows that need a second pass beside others that do not.
        AttentionCase{
            .num_pages = 2, .recent_tokens = 200, .pattern = AttentionPattern::kOneHugeLogit}}) {
    Prompt prompt(shape, 140);
    ThreadPool one(1), three(3);
    for (const bool bf16 : {false, true}) {
      prompt.paged.layer.bf16_products = bf16;
      const auto whole = prompt.Run(one, {140});
      EXPECT_EQ(prompt.Run(three, {140}), whole);
      EXPECT_EQ(prompt.Run(three, {1, 63, 64, 12}), whole);
      EXPECT_EQ(prompt.Run(one, {70, 7, 63}), whole);
    }
  }
}

// Heads of one layer whose blocks differ: each gives the bits that it gives alone.
TEST(Attention, HeadsMayHaveBitsOfTheirOwn) {
  using enum BlockKind;
  const std::pair<BlockKind, BlockKind> kinds[] = {
      {kInt2, kInt2}, {kInt4, kInt2}, {kInt3, kInt3}, {kInt2, kInt4}, {kInt3, kInt2}};
  ThreadPool pool(2);
  for (const Target target : SupportedTargets()) {
    const ScopedTarget scope(target);
    std::vector<AttentionInputs> inputs;
    std::vector<PagedCase> alone;
    std::vector<float> expected_decode, expected_prefill, q;
    AttentionCase c{.kv_heads = 1, .num_pages = 9, .recent_tokens = 64};
    const size_t row = static_cast<size_t>(c.queries_per_kv * c.head_dim);
    const auto prefill = [&](const AttentionLayer& layer, const PagedCase& pages,
                             const std::vector<float>& rows) {
      AttentionWorkspace workspace;
      std::vector<float> out(rows.size());
      const PrefillQuery query{pages.view(), pages.num_tokens - 1, 1,          rows.data(),
                               rows.size(),  out.data(),           rows.size()};
      PrefillAttention(pool, workspace, layer, {&query, 1});
      return out;
    };
    for (const auto& [k, v] : kinds) {
      c.kind = k, c.v_kind = v;
      const uint64_t seed = 10 + inputs.size();
      inputs.push_back(MakeAttentionInputs(c, CodeOrder::kCpu, seed));
      alone.push_back(MakePages(c, inputs.back()));
      alone.back().layer.sealed = alone.back().places;
      const std::vector<float> decoded = Decode(pool, alone.back(), inputs.back());
      expected_decode.insert(expected_decode.end(), decoded.begin(), decoded.end());
      const auto read = prefill(alone.back().layer, alone.back(), inputs.back().q);
      expected_prefill.insert(expected_prefill.end(), read.begin(), read.end());
      q.insert(q.end(), inputs.back().q.begin(), inputs.back().q.end());
    }
    // All heads in one page, block after block.
    PagedCase mixed;
    const int heads = static_cast<int>(std::size(kinds));
    mixed.layer = alone[0].layer;
    mixed.layer.kv_heads = heads;
    mixed.layer.q_heads = heads * c.queries_per_kv;
    mixed.is_sealed = alone[0].is_sealed;
    mixed.num_tokens = alone[0].num_tokens;
    size_t at = kSealedOffset;
    for (const AttentionInputs& in : inputs) {
      mixed.places.push_back({in.layout, at});
      at += in.layout.block_bytes();
    }
    mixed.layer.sealed = mixed.places;
    for (size_t page = 0; page < alone[0].pages.size(); ++page) {
      const bool sealed = mixed.is_sealed[page] != 0;
      auto& bytes = mixed.storage.emplace_back(sealed ? kSealedOffset : kOpenOffset);
      for (const PagedCase& head : alone) {
        const auto& from = head.storage[page];
        bytes.insert(bytes.end(), from.begin() + (sealed ? kSealedOffset : kOpenOffset),
                     from.end());
      }
    }
    for (const auto& page : mixed.storage) mixed.pages.push_back(page.data());
    ASSERT_EQ(q.size(), row * std::size(kinds));
    AttentionInputs all{.layout = inputs[0].layout, .q = q};
    EXPECT_EQ(Decode(pool, mixed, all), expected_decode);
    EXPECT_EQ(prefill(mixed.layer, mixed, q), expected_prefill);
  }
}

// A window that ends at the token: rows of its pages come in both forms.
struct WindowedPrompt : Prompt {
  // The last `twins` pages in sealed form, too, as the window wants them.
  WindowedPrompt(const AttentionCase& shape, int tokens, int twins, int64_t window, int64_t sink)
      : Prompt(shape, tokens) {
    const BlockLayout& sealed = paged.layer.Stored(0);
    const auto rows = static_cast<size_t>(kPageTokens * c.head_dim);
    const auto heads = static_cast<size_t>(c.kv_heads);
    const size_t open_bytes = 2 * rows * sizeof(Bf16);
    const size_t first_page = paged.pages.size() - static_cast<size_t>(twins);
    for (size_t page = first_page; page < paged.pages.size(); ++page) {
      auto& out = storage.emplace_back(heads * sealed.block_bytes());
      for (size_t h = 0; h < heads; ++h) {
        std::vector<Bf16> block(2 * rows);
        std::memcpy(block.data(), paged.pages[page] + kOpenOffset + h * open_bytes, open_bytes);
        for (Bf16& x : block) x = ToFloat(x) == ToFloat(x) ? x : ToBf16(0.0f);  // rows to come
        EncodeBlock(sealed, {}, {block.data(), rows}, {block.data() + rows, rows},
                    {out.data() + h * sealed.block_bytes(), sealed.block_bytes()});
      }
    }
    pages.resize(first_page);
    for (const auto& page : storage) pages.push_back(page.data());
    view = {pages.data(), static_cast<int64_t>(pages.size()), sink, window};
  }
  std::vector<float> RunWindowed(ThreadPool& pool, const std::vector<int>& chunks) const {
    AttentionWorkspace workspace;
    const size_t stride = in.q.size();
    std::vector<float> out(q.size());
    int at = 0;
    for (const int chunk : chunks) {
      const size_t offset = static_cast<size_t>(at) * stride;
      const PrefillQuery query{paged.view(), first + at,          chunk,  q.data() + offset,
                               stride,       out.data() + offset, stride, view};
      PrefillAttention(pool, workspace, paged.layer, {&query, 1});
      at += chunk;
    }
    return out;
  }
  // What the tokens see, row by row, decoded by the scalar codec.
  std::vector<double> Expected() const {
    const auto dims = static_cast<size_t>(c.head_dim);
    std::vector<double> expected(q.size());
    for (int h = 0; h < c.kv_heads; ++h) {
      const DenseKv written = DecodeKvHead(c, in, h);
      DenseKv stored = written;
      for (int64_t i = 0; i < view.count; ++i) {
        if (view.pages[i] == nullptr) continue;
        const size_t rows = kPageTokens * dims;
        std::vector<float> k(rows), v(rows);
        const BlockLayout& sealed = paged.layer.Stored(h);
        DecodeBlock(
            sealed,
            {view.pages[i] + static_cast<size_t>(h) * sealed.block_bytes(), sealed.block_bytes()},
            k, v);
        const size_t start = static_cast<size_t>(i) * rows;
        const size_t known = std::min(rows, written.k.size() - start);
        std::copy_n(k.begin(), known, stored.k.begin() + static_cast<std::ptrdiff_t>(start));
        std::copy_n(v.begin(), known, stored.v.begin() + static_cast<std::ptrdiff_t>(start));
      }
      for (int token = 0; token < count; ++token) {
        const auto old = static_cast<std::ptrdiff_t>(
            std::max<int64_t>(view.sink, first + token + 1 - view.tokens) * c.head_dim);
        const std::ptrdiff_t sink = view.sink * c.head_dim;
        DenseKv seen = written;
        std::copy(stored.k.begin() + sink, stored.k.begin() + old, seen.k.begin() + sink);
        std::copy(stored.v.begin() + sink, stored.v.begin() + old, seen.v.begin() + sink);
        for (int g = 0; g < c.queries_per_kv; ++g) {
          const size_t row = static_cast<size_t>(token * c.q_heads() + h * c.queries_per_kv + g);
          ReferenceAttention({q.data() + row * dims, dims}, seen.k, seen.v, first + token + 1,
                             in.softmax_scale, {expected.data() + row * dims, dims});
        }
      }
    }
    return expected;
  }

  std::vector<std::vector<std::byte>> storage;
  std::vector<const std::byte*> pages;
  TokenWindow view;
};

TEST(PrefillAttention, WindowsThatEndAtATokenMatchTheReference) {
  ThreadPool one(1), three(3);
  struct Shape {
    AttentionCase shape;
    int tokens, twins;
    int64_t window, sink = 0;
  };
  for (const Shape& s : std::vector<Shape>{
           // No window: every token but itself, from the first of the sequence on.
           {{.sink_tokens = 0, .num_pages = 0, .recent_tokens = 50}, 50, 1, 1},
           {{.num_pages = 2, .recent_tokens = 64}, 64, 1, 1},
           {{.kind = BlockKind::kInt4, .head_dim = 64, .group_dims = 32, .recent_tokens = 33},
            33,
            1,
            1},
           // A window of two pages and pages that are stored three together.
           {{.num_pages = 1, .recent_tokens = 180}, 52, 3, 128},
           {{.kind = BlockKind::kBf16, .num_pages = 1, .recent_tokens = 180}, 52, 3, 128},
           // A sink that ends inside a page.
           {{.sink_tokens = 0, .num_pages = 0, .recent_tokens = 180}, 52, 3, 128, 32}}) {
    WindowedPrompt prompt(s.shape, s.tokens, s.twins, s.window, s.sink);
    const auto dims = static_cast<size_t>(prompt.c.head_dim);
    const std::vector<double> expected = prompt.Expected();
    for (const Target target : SupportedTargets()) {
      const ScopedTarget scope(target);
      for (const bool bf16 : {false, true}) {
        prompt.paged.layer.bf16_products = bf16;
        const auto actual = prompt.RunWindowed(three, {prompt.count});
        EXPECT_EQ(prompt.RunWindowed(one, {1, prompt.count - 8, 7}), actual);
        for (size_t at = 0; at < actual.size(); at += dims) {
          ASSERT_LE(RelativeL2({actual.data() + at, dims}, {expected.data() + at, dims}),
                    bf16 ? kBf16 : kPacked)
              << prompt.c.Name() << " row " << at / dims << " on " << TargetName(target) << bf16;
        }
      }
    }
  }
}

// Sinks take weight and give no value; windows end exactly at their token. In fp64, row by row.
TEST(WindowsAndSinks, DecodeAndPrefillMatchTheReference) {
  ThreadPool one(1), three(3);
  struct Shape {
    AttentionCase shape;
    int tokens;
    int64_t window;
    bool sinks;
  };
  const AttentionCase open{.kind = BlockKind::kBf16, .sink_tokens = 0, .num_pages = 0};
  std::vector<Shape> shapes;
  for (const int64_t window : {1, 2, 10, 63, 64, 65, 128, 200, 400}) {
    for (const int dims : {64, 128, 256}) {
      AttentionCase c = open;
      c.head_dim = c.group_dims = dims;
      c.recent_tokens = 330;
      c.queries_per_kv = dims == 64 ? 8 : 3;
      shapes.push_back({c, 260, window, window % 2 == 0});
    }
  }
  // Beyond one split of a generated token's pages, with history and without a window.
  shapes.push_back({{.num_pages = 2, .recent_tokens = 90}, 60, 0, true});
  shapes.push_back(
      {{.head_dim = 64, .group_dims = 64, .num_pages = 70, .recent_tokens = 30}, 20, 0, true});
  for (const Shape& s : shapes) {
    Prompt prompt(s.shape, s.tokens);
    const AttentionCase& c = prompt.c;
    const auto dims = static_cast<size_t>(c.head_dim);
    const auto heads = static_cast<size_t>(c.q_heads());
    // What rounding q and P costs a few tokens does not average out.
    const double few = s.window > 0 ? 2.0 : 1.0;
    // Some far above the logits, some far below.
    std::vector<float> sinks;
    for (size_t h = 0; h < heads; ++h) sinks.push_back(-6.0f + 3.0f * static_cast<float>(h % 5));
    AttentionLayer& layer = prompt.paged.layer;
    layer.window = s.window;
    layer.sinks = s.sinks ? sinks.data() : nullptr;
    std::vector<DenseKv> dense;
    for (int h = 0; h < c.kv_heads; ++h) dense.push_back(DecodeKvHead(c, prompt.in, h));
    const auto expect = [&](std::span<const float> q, size_t head, int64_t position,
                            std::span<double> out) {
      const DenseKv& kv = dense[head / static_cast<size_t>(c.queries_per_kv)];
      const int64_t begin = s.window == 0 ? 0 : std::max<int64_t>(0, position - s.window + 1);
      std::vector<double> logits;
      double largest = s.sinks ? sinks[head] : -1e300;
      for (int64_t t = begin; t <= position; ++t) {
        double dot = 0.0;
        for (size_t d = 0; d < dims; ++d) {
          dot += static_cast<double>(q[d]) * kv.k[static_cast<size_t>(t) * dims + d];
        }
        logits.push_back(dot * prompt.in.softmax_scale);
        largest = std::max(largest, logits.back());
      }
      double total = s.sinks ? std::exp(sinks[head] - largest) : 0.0;
      for (const double l : logits) total += std::exp(l - largest);
      std::ranges::fill(out, 0.0);
      for (size_t i = 0; i < logits.size(); ++i) {
        const double p = std::exp(logits[i] - largest) / total;
        for (size_t d = 0; d < dims; ++d) {
          out[d] += p * kv.v[(static_cast<size_t>(begin) + i) * dims + d];
        }
      }
    };
    std::vector<double> expected(prompt.q.size()), last(heads * dims);
    for (size_t row = 0; row < expected.size() / dims; ++row) {
      const auto position = prompt.first + static_cast<int64_t>(row / heads);
      expect({prompt.q.data() + row * dims, dims}, row % heads, position,
             std::span(expected).subspan(row * dims, dims));
    }
    for (size_t h = 0; h < heads; ++h) {
      expect({prompt.in.q.data() + h * dims, dims}, h, prompt.paged.num_tokens - 1,
             std::span(last).subspan(h * dims, dims));
    }
    for (const Target target : SupportedTargets()) {
      const ScopedTarget scope(target);
      for (const bool bf16 : {false, true}) {
        layer.bf16_products = bf16;
        const std::string name = fmt::format("{} window {} sinks {} on {} {}", c.Name(), s.window,
                                             s.sinks, TargetName(target), bf16);
        const auto prefilled = prompt.Run(three, {prompt.count});
        EXPECT_EQ(prompt.Run(one, {1, 7, prompt.count - 8}), prefilled) << name;
        const auto decoded = Decode(three, prompt.paged, prompt.in);
        EXPECT_EQ(Decode(one, prompt.paged, prompt.in), decoded) << name;
        for (size_t at = 0; at < prefilled.size(); at += dims) {
          ASSERT_LE(RelativeL2({prefilled.data() + at, dims}, {expected.data() + at, dims}),
                    !bf16 ? kPacked : few * kBf16)
              << name << " row " << at / dims;
        }
        for (size_t at = 0; at < decoded.size(); at += dims) {
          ASSERT_LE(RelativeL2({decoded.data() + at, dims}, {last.data() + at, dims}),
                    bf16 ? few * kBf16 : c.budget)
              << name << " head " << at / dims;
        }
      }
    }
  }
  // One key with logit 0 beside a sink of 0 has half of the weight.
  EXPECT_EQ(AttentionState::InverseOf(0.0f, 1.0f, 0.0f), 0.5f);
}

TEST(PrefillAttention, InstructionSetsChangeNoBit) {
  ThreadPool pool(2);
  for (const BlockKind kind : {BlockKind::kInt2, BlockKind::kInt3, BlockKind::kInt4}) {
    const Prompt prompt({.kind = kind, .num_pages = 2, .recent_tokens = 150}, 100);
    const auto expected = prompt.Run(pool, {100});
    for (const Target target : SupportedTargets()) {
      const ScopedTarget scope(target);
      EXPECT_EQ(prompt.Run(pool, {100}), expected) << TargetName(target);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, AttentionTest,
                         testing::ValuesIn(SupportedTargets().begin(), SupportedTargets().end()));

}  // namespace
}  // namespace oscar::simd
