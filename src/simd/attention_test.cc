#include "simd/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "cache/attention_reference.h"
#include "simd/dispatch.h"

namespace oscar::simd {
namespace {

// A case's inputs as a sequence of pages. Cases put their windows anywhere; here they become whole
// open pages except for the last, so tokens are laid out anew: sink, pages, recent, in order.
struct PagedCase {
  AttentionLayer layer;
  std::vector<std::vector<std::byte>> storage;
  std::vector<const std::byte*> pages;
  std::vector<uint8_t> is_sealed;
  int64_t num_tokens = 0;

  SequencePages view() const { return {pages.data(), is_sealed.data()}; }
};

constexpr size_t kOpenOffset = 192, kSealedOffset = 64;  // as if other layers came first

void AppendOpenPages(const AttentionCase& c, const std::vector<Bf16>& k, const std::vector<Bf16>& v,
                     int tokens, PagedCase& out) {
  const PageLayout& open = out.layer.open;
  const auto dims = static_cast<size_t>(c.head_dim);
  for (int first = 0; first < tokens; first += kPageTokens) {
    const auto count = static_cast<size_t>(std::min(kPageTokens, tokens - first));
    // Rows that hold no token are NaN: reading one into a result would show.
    std::vector<std::byte> page(kOpenOffset + open.block_bytes() * static_cast<size_t>(c.kv_heads),
                                std::byte{0xff});
    for (int h = 0; h < c.kv_heads; ++h) {
      const size_t source = (static_cast<size_t>(h * tokens + first)) * dims;
      std::byte* block = page.data() + kOpenOffset + static_cast<size_t>(h) * open.block_bytes();
      std::memcpy(block, k.data() + source, count * dims * sizeof(Bf16));
      std::memcpy(block + open.v_codes_offset(), v.data() + source, count * dims * sizeof(Bf16));
    }
    out.storage.push_back(std::move(page));
    out.is_sealed.push_back(0);
    out.num_tokens += static_cast<int64_t>(count);
  }
}

PagedCase MakePages(const AttentionCase& c, const AttentionInputs& in) {
  PagedCase out{
      .layer = {.q_heads = c.q_heads(),
                .kv_heads = c.kv_heads,
                .softmax_scale = in.softmax_scale,
                .open = PageLayout(PageKind::kBf16, CodeOrder::kCpu, c.head_dim, c.head_dim),
                .sealed = in.layout,
                .open_offset = kOpenOffset,
                .sealed_offset = kSealedOffset},
      .storage = {},
      .pages = {},
      .is_sealed = {}};
  AppendOpenPages(c, in.sink_k, in.sink_v, c.sink_tokens, out);
  const size_t block = in.layout.block_bytes();
  for (int p = 0; p < c.num_pages; ++p) {
    std::vector<std::byte> page(kSealedOffset + block * static_cast<size_t>(c.kv_heads));
    for (int h = 0; h < c.kv_heads; ++h) {
      std::memcpy(page.data() + kSealedOffset + static_cast<size_t>(h) * block,
                  in.blocks.data() + static_cast<size_t>(h * c.num_pages + p) * block, block);
    }
    out.storage.push_back(std::move(page));
    out.is_sealed.push_back(1);
    out.num_tokens += kPageTokens;
  }
  AppendOpenPages(c, in.recent_k, in.recent_v, c.recent_tokens, out);
  for (const auto& page : out.storage) out.pages.push_back(page.data());
  return out;
}

// Windows before the last page are whole pages in a real cache.
AttentionCase WholePages(AttentionCase c) {
  c.sink_tokens =
      c.num_pages + c.recent_tokens > 0 ? (c.sink_tokens + 63) / 64 * 64 : c.sink_tokens;
  return c;
}

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

TEST(DecodeAttention, MeetsTheBudgetOfEveryCaseOnEveryTarget) {
  ThreadPool pool(2);
  for (const AttentionCase& listed : AttentionCases()) {
    const AttentionCase c = WholePages(listed);
    const AttentionInputs in = MakeAttentionInputs(c, CodeOrder::kCpu);
    const auto expected = ReferenceDecodeAttention(c, in);
    const PagedCase paged = MakePages(c, in);
    const auto dims = static_cast<size_t>(c.head_dim);
    for (const Target target : SupportedTargets()) {
      const ScopedTarget scope(target);
      const auto actual = Decode(pool, paged, in);
      for (size_t at = 0; at < actual.size(); at += dims) {
        const double error = RelativeL2({actual.data() + at, dims}, {expected.data() + at, dims});
        EXPECT_LE(error, c.budget)
            << c.Name() << " on " << TargetName(target) << ", query head " << at / dims;
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
  const PagedCase pages_a = MakePages(a, in_a), pages_b = MakePages(b, in_b);
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

INSTANTIATE_TEST_SUITE_P(Targets, AttentionTest,
                         testing::ValuesIn(SupportedTargets().begin(), SupportedTargets().end()));

}  // namespace
}  // namespace oscar::simd
