#include "cache/layered_append.h"

#include <gtest/gtest.h>

#include <cstring>

#include "base/rng.h"
#include "cache/page_sealer.h"

namespace oscar {
namespace {

constexpr int kLayers = 2, kHeads = 2, kDim = 64;

class LayeredAppendTest : public testing::TestWithParam<int> {
 protected:
  template <typename Rows>  // SequenceCache's arguments less the layer
  static void Write(const Rows& rows, int layer, int64_t first, int64_t count) {
    for (int64_t p = first; p < first + count; ++p) {
      for (int head = 0; head < kHeads; ++head) {
        const Philox rng(3, static_cast<uint64_t>(layer * kHeads + head));
        for (int d = 0; d < kDim; ++d) {
          const auto at = static_cast<uint64_t>(2 * (p * kDim + d));
          rows.K(head, p)[d] = ToBf16(rng.Normal(at));
          rows.V(head, p)[d] = ToBf16(rng.Normal(at + 1));
        }
      }
    }
  }
  void Append(SequenceCache& cache, int64_t count) {
    struct Rows {
      const SequenceCache& cache;
      int layer;
      Bf16* K(int head, int64_t p) const { return cache.KRow(layer, head, p); }
      Bf16* V(int head, int64_t p) const { return cache.VRow(layer, head, p); }
    };
    ASSERT_TRUE(cache.Reserve(count).ok());
    for (int layer = 0; layer < kLayers; ++layer) {
      Write(Rows{cache, layer}, layer, cache.length(), count);
    }
    cache.Advance(count);
  }
  void AppendByLayer(SequenceCache& cache, int64_t count) {
    struct Rows {
      const LayeredAppend& append;
      Bf16* K(int head, int64_t p) const { return append.KRow(head, p); }
      Bf16* V(int head, int64_t p) const { return append.VRow(head, p); }
    };
    const AppendCost cost = LayeredAppend::CostOf(cache, count);
    const uint64_t before = pool_.bytes_in_use();
    auto append = LayeredAppend::Begin(cache, count, threads_);
    ASSERT_TRUE(append.has_value());
    EXPECT_EQ(static_cast<int64_t>(pool_.bytes_in_use() - before), cost.seal_net + cost.reserve);
    for (int layer = 0; layer < kLayers; ++layer) {
      (*append)->SetLayer(layer);
      Write(Rows{**append}, layer, cache.length(), count);
      (*append)->SealLayer(threads_);
    }
    (*append)->Commit();
  }
  void ExpectSamePages(const SequenceCache& a, const SequenceCache& b) {
    ASSERT_EQ(a.length(), b.length());
    ASSERT_EQ(a.sealed_end(), b.sealed_end());
    for (int64_t j = 0; j < a.num_pages(); ++j) {
      ASSERT_EQ(a.is_sealed(j), b.is_sealed(j)) << j;
      const int64_t rows = std::min<int64_t>(kPageTokens, a.length() - j * kPageTokens);
      for (int layer = 0; layer < kLayers; ++layer) {
        const auto block = a.page(j).Block(layer, kHeads - 1);
        const size_t bytes = a.is_sealed(j) ? block.size() : static_cast<size_t>(rows) * kDim * 2;
        EXPECT_EQ(0, std::memcmp(block.data(), b.page(j).Block(layer, kHeads - 1).data(), bytes))
            << "page " << j << " layer " << layer;
      }
    }
  }

  CacheConfig config_{
      PageLayout({kLayers, BlockLayout(BlockKind::kBf16, CodeOrder::kCpu, kDim, kDim)}, kHeads),
      PageLayout({kLayers, BlockLayout(BlockKind::kInt2, CodeOrder::kCpu, kDim, kDim)}, kHeads),
      64,
      128,
      1024,
      GetParam()};
  const RuleSealer sealer_{config_, std::vector(kLayers, std::vector<BlockRules>(kHeads)),
                           EncodeBlocks};
  PagePool pool_{uint64_t{64} << 20, &sealer_};
  ThreadPool threads_{1};
};

TEST_P(LayeredAppendTest, EndsAsIfReadAtOnce) {
  for (const int64_t start : {0, 1, 64, 100, 449}) {
    for (const int64_t count : {1, 63, 64, 200, 500}) {
      SequenceCache plain(config_, pool_), layered(config_, pool_);
      Append(plain, start);
      Append(layered, start);
      Append(plain, count);
      AppendByLayer(layered, count);
      ASSERT_TRUE(plain.SealForGeneration(threads_).ok());
      ExpectSamePages(plain, layered);
    }
  }
  EXPECT_EQ(pool_.pages_in_use(), 0);
}

// A prefix hit takes pages in the form that is still there: open ones may lie before sealed ones.
TEST_P(LayeredAppendTest, SealedPagesAfterAGapStayAsTheyAre) {
  SequenceCache open(config_, pool_), sealed(config_, pool_);
  Append(open, 450);
  Append(sealed, 900);
  ASSERT_TRUE(sealed.SealForGeneration(threads_).ok());
  const auto hit = [&] {
    std::vector<SequenceCache::StoredPage> pages;
    for (int64_t j = 0; j * kPageTokens < open.length(); ++j) {
      const bool takes_sealed = j == 3 || j == 4 || j == 5 || j == 6;
      pages.push_back({(takes_sealed ? sealed : open).page(j).Share(), takes_sealed});
    }
    return SequenceCache::FromPages(config_, pool_, std::move(pages), open.length());
  };
  for (const int64_t count : {1, 300}) {  // the sealed pages are beyond what is due, or before it
    SequenceCache plain = hit(), layered = hit();
    ASSERT_EQ(layered.sealed_end(), 1);
    Append(plain, count);
    ASSERT_TRUE(plain.SealForGeneration(threads_).ok());
    AppendByLayer(layered, count);
    ExpectSamePages(plain, layered);
    EXPECT_EQ(layered.page(4).data(), sealed.page(4).data());
  }
}

INSTANTIATE_TEST_SUITE_P(PagesTogether, LayeredAppendTest, testing::Values(1, 2));

}  // namespace
}  // namespace oscar
