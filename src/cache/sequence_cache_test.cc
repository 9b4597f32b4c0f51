#include "cache/sequence_cache.h"

#include <gtest/gtest.h>

#include <cstring>

#include "base/rng.h"
#include "cache/page_sealer.h"

namespace oscar {
namespace {

constexpr int kLayers = 2, kHeads = 3, kDim = 64;

class SequenceCacheTest : public testing::Test {
 protected:
  // Row contents are a function of (layer, head, position), so any page can be checked later.
  static float Element(int layer, int head, int64_t position, int d, bool is_v) {
    const Philox rng(11, static_cast<uint64_t>(layer * 100 + head * 2 + (is_v ? 1 : 0)));
    return rng.Normal(static_cast<uint64_t>(position * kDim + d));
  }
  static void Append(SequenceCache& cache, int64_t count) {
    ASSERT_TRUE(cache.Reserve(count).ok());
    for (int64_t p = cache.length(); p < cache.length() + count; ++p) {
      for (int layer = 0; layer < kLayers; ++layer) {
        for (int head = 0; head < kHeads; ++head) {
          for (int d = 0; d < kDim; ++d) {
            cache.KRow(layer, head, p)[d] = ToBf16(Element(layer, head, p, d, false));
            cache.VRow(layer, head, p)[d] = ToBf16(Element(layer, head, p, d, true));
          }
        }
      }
    }
    cache.Advance(count);
  }
  // Every stored value is the BF16 row or its scalar quantisation, wherever the page is.
  void ExpectContents(const SequenceCache& cache) const {
    std::vector<std::byte> expected(config_.sealed.block(0, 0).block_bytes());
    for (int64_t j = 0; j < cache.num_pages(); ++j) {
      for (int layer = 0; layer < kLayers; ++layer) {
        for (int head = 0; head < kHeads; ++head) {
          const int64_t held = std::min<int64_t>(64, cache.length() - j * 64);
          std::vector<Bf16> k, v;
          for (int64_t t = 0; t < held; ++t) {
            for (int d = 0; d < kDim; ++d) {
              k.push_back(ToBf16(Element(layer, head, j * 64 + t, d, false)));
              v.push_back(ToBf16(Element(layer, head, j * 64 + t, d, true)));
            }
          }
          const auto block = cache.page(j).Block(layer, head);
          if (cache.is_sealed(j)) {
            EncodeBlock(config_.sealed.block(layer, 0), rules_, k, v, expected);
            ASSERT_EQ(std::memcmp(block.data(), expected.data(), expected.size()), 0) << j;
          } else {
            ASSERT_EQ(std::memcmp(block.data(), k.data(), k.size() * 2), 0) << j;
            ASSERT_EQ(std::memcmp(block.data() + 64 * kDim * 2, v.data(), v.size() * 2), 0) << j;
          }
        }
      }
    }
  }

  const BlockRules rules_{RowRule::kMseFitUnbiased, RowRule::kMinMax, 0.0f, 0.92f};
  CacheConfig config_{
      PageLayout({kLayers, BlockLayout(BlockKind::kBf16, CodeOrder::kCpu, kDim, kDim)}, kHeads),
      PageLayout({kLayers, BlockLayout(BlockKind::kInt2, CodeOrder::kCpu, kDim, kDim)}, kHeads),
      64,
      128,
      256,
      1};
  RuleSealer sealer_{config_, std::vector(kLayers, std::vector<BlockRules>(kHeads, rules_)),
                     EncodeBlocks};
  PagePool pool_{uint64_t{64} << 20, &sealer_};
  ThreadPool threads_{2};
};

TEST_F(SequenceCacheTest, GeneratedTokensSealAtRecentPlus64) {
  SequenceCache cache(config_, pool_);
  for (int64_t length = 1; length <= 600; ++length) {
    Append(cache, 1);
    ASSERT_TRUE(cache.SealForGeneration(threads_).ok());
    // Nothing is sealed below sink + recent + 64; then the newest part is never over recent + 63.
    const int64_t sealed = std::max<int64_t>(0, (length - 128) / 64 - 1);
    const CacheUsage usage = cache.Usage();
    ASSERT_EQ(usage.sealed_pages, static_cast<uint64_t>(sealed)) << length;
    ASSERT_FALSE(cache.is_sealed(0));
    ASSERT_EQ(usage.bytes, SequenceCache::BytesFor(config_, length)) << length;
    ASSERT_EQ(usage.bytes, pool_.bytes_in_use());
  }
  ExpectContents(cache);
}

TEST_F(SequenceCacheTest, PromptCellsSealTheSameWhateverTheChunks) {
  for (const std::vector<int64_t>& chunks :
       std::vector<std::vector<int64_t>>{{700}, {1, 255, 100, 300, 44}, {64, 64, 500, 72}}) {
    SequenceCache cache(config_, pool_);
    for (int64_t chunk : chunks) {
      // Callers split chunks at cell boundaries; sealing between parts uses positions alone.
      while (chunk > 0) {
        const int64_t part = std::min(chunk, 256 - cache.length() % 256);
        Append(cache, part);
        ASSERT_TRUE(cache.SealForPrompt(threads_).ok());
        chunk -= part;
      }
    }
    // Cell [512, 768) is current: everything before 512 - 128 is sealed, sink excepted.
    for (int64_t j = 0; j < cache.num_pages(); ++j) {
      EXPECT_EQ(cache.is_sealed(j), j >= 1 && (j + 1) * 64 <= 384) << j;
    }
    ExpectContents(cache);
    ASSERT_TRUE(cache.SealForGeneration(threads_).ok());
    EXPECT_EQ(cache.Usage().sealed_pages, 7u);  // pages 1..7: up to position 512 <= 700 - 128
    ExpectContents(cache);
  }
  EXPECT_EQ(pool_.pages_in_use(), 0);
}

TEST_F(SequenceCacheTest, ForkSharesAndCopiesOnWrite) {
  SequenceCache cache(config_, pool_);
  Append(cache, 500);
  ASSERT_TRUE(cache.SealForGeneration(threads_).ok());
  const uint64_t before = pool_.bytes_in_use();
  {
    SequenceCache fork = cache.Fork();
    EXPECT_EQ(pool_.bytes_in_use(), before);
    EXPECT_EQ(fork.Usage().shared_pages, static_cast<uint64_t>(fork.num_pages()));
    Append(fork, 10);
    EXPECT_EQ(pool_.bytes_in_use(), before + config_.open.bytes());
    ExpectContents(fork);
    Append(cache, 20);
    EXPECT_EQ(pool_.bytes_in_use(), before + 2 * config_.open.bytes());  // 500 + 20 > 512
    ExpectContents(cache);
    ExpectContents(fork);
  }
  ExpectContents(cache);
}

// A pass that failed may leave pages that hold nothing yet: each of the two needs its own.
TEST_F(SequenceCacheTest, ForkLeavesReservedPagesBehind) {
  for (const int64_t length : {40, 64}) {
    SequenceCache cache(config_, pool_);
    Append(cache, length);
    ASSERT_TRUE(cache.Reserve(100).ok());
    SequenceCache fork = cache.Fork();
    Append(cache, 100);
    Append(fork, 100);
    for (int64_t j = length / 64; j < cache.num_pages(); ++j) {
      EXPECT_NE(cache.page(j).data(), fork.page(j).data()) << length << " tokens, page " << j;
    }
    ExpectContents(cache);
    ExpectContents(fork);
  }
}

TEST_F(SequenceCacheTest, TrimKeepsSealedPagesWhole) {
  SequenceCache cache(config_, pool_);
  Append(cache, 600);
  ASSERT_TRUE(cache.SealForGeneration(threads_).ok());  // pages 1..6 sealed, [64, 448)
  EXPECT_EQ(cache.Trim(590), 590);
  EXPECT_EQ(cache.Trim(449), 449);
  EXPECT_EQ(cache.Trim(300), 256);
  ExpectContents(cache);
  Append(cache, 400);
  ASSERT_TRUE(cache.SealForGeneration(threads_).ok());
  ExpectContents(cache);
  EXPECT_EQ(cache.Trim(30), 30);
  EXPECT_EQ(cache.Trim(0), 0);
  EXPECT_EQ(pool_.pages_in_use(), 0);
}

TEST_F(SequenceCacheTest, TrimKeepsPagesThatAreSealedTogetherWhole) {
  config_.pages_together = 2;  // as methods do whose groups run over 128 tokens
  SequenceCache cache(config_, pool_);
  Append(cache, 600);
  ASSERT_TRUE(cache.SealForGeneration(threads_).ok());  // (1, 2), (3, 4), (5, 6)
  ASSERT_EQ(cache.sealed_end(), 7);
  EXPECT_EQ(cache.Trim(449), 449);
  EXPECT_EQ(cache.Trim(448), 448);
  EXPECT_EQ(cache.Trim(300), 192);  // page 3's bytes are those of a pair
  Append(cache, 400);
  // What sealing is to cost is what it seals: whole pairs, counted from the sink.
  const AppendCost cost = cache.CostOf(0, /*is_prompt=*/false);
  const uint64_t before = pool_.bytes_in_use();
  ASSERT_TRUE(cache.SealForGeneration(threads_).ok());
  EXPECT_EQ(cache.sealed_end(), SequenceCache::SealedEndAt(config_, cache.length() - 128));
  EXPECT_EQ(static_cast<int64_t>(pool_.bytes_in_use()),
            static_cast<int64_t>(before) + cost.seal_net);
  ExpectContents(cache);
  EXPECT_EQ(cache.Trim(128), 64);
  EXPECT_EQ(cache.Trim(64), 64);
  EXPECT_EQ(cache.Trim(30), 30);
}

TEST_F(SequenceCacheTest, PagesSealedTogetherAreCountedTogether) {
  config_.pages_together = 2;  // as methods do whose groups run over 128 tokens
  SequenceCache cache(config_, pool_);
  for (int64_t length = 1; length <= 600; ++length) {
    Append(cache, 1);
    ASSERT_TRUE(cache.SealForGeneration(threads_).ok());
    ASSERT_EQ(cache.Usage().bytes, SequenceCache::BytesFor(config_, length)) << length;
  }
  ExpectContents(cache);
}

TEST_F(SequenceCacheTest, BudgetIsNeverExceededAndErrorsChangeNothing) {
  // Room for nine open pages and nothing else: sealing must make its own room.
  PagePool small(9 * config_.open.bytes(), &sealer_);
  SequenceCache cache(config_, small);
  Append(cache, 9 * 64);
  EXPECT_EQ(cache.Reserve(1).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(cache.num_pages(), 9);
  ASSERT_TRUE(cache.SealForGeneration(threads_).ok());
  EXPECT_LE(small.peak_bytes(), small.budget());
  ExpectContents(cache);
  Append(cache, 64);
  ExpectContents(cache);
}

TEST_F(SequenceCacheTest, SealingASharedPageInAFullPoolFailsCleanly) {
  PagePool small(9 * config_.open.bytes(), &sealer_);
  SequenceCache cache(config_, small);
  Append(cache, 9 * 64);
  SequenceCache fork = cache.Fork();
  EXPECT_EQ(cache.SealForGeneration(threads_).code(), StatusCode::kResourceExhausted);
  ExpectContents(cache);
  ExpectContents(fork);
}

TEST_F(SequenceCacheTest, BitsCountWindowsAndMetadata) {
  SequenceCache cache(config_, pool_);
  Append(cache, 1000);
  EXPECT_DOUBLE_EQ(cache.Usage().bits_per_element, 16.0);
  ASSERT_TRUE(cache.SealForGeneration(threads_).ok());
  const double sealed = 12 * 64;  // pages 1..12
  EXPECT_DOUBLE_EQ(cache.Usage().bits_per_element, (sealed * 2.5 + (1000 - sealed) * 16) / 1000);
  EXPECT_EQ(cache.Usage().bf16_bytes, uint64_t{1000} * kLayers * kHeads * kDim * 2 * 2);
}

TEST_F(SequenceCacheTest, ConfigIsValidated) {
  EXPECT_TRUE(config_.Validate().ok());
  CacheConfig bad = config_;
  bad.recent = 100;
  EXPECT_EQ(bad.Validate().code(), StatusCode::kInvalidArgument);
  bad = config_;
  bad.cell = 0;
  EXPECT_EQ(bad.Validate().code(), StatusCode::kInvalidArgument);
}

TEST_F(SequenceCacheTest, FromPagesContinuesLikeTheOriginal) {
  for (const int64_t kept : {1, 63, 64, 100, 128, 320, 500}) {
    SequenceCache original(config_, pool_);
    Append(original, 500);
    ASSERT_TRUE(original.SealForPrompt(threads_).ok());
    std::vector<SequenceCache::StoredPage> pages;
    const int64_t length = original.Fork().Trim(kept);
    for (int64_t j = 0; j * 64 < length; ++j) {
      pages.push_back({original.page(j).Share(), original.is_sealed(j)});
    }
    SequenceCache second = SequenceCache::FromPages(config_, pool_, std::move(pages), length);
    EXPECT_EQ(second.length(), length);
    EXPECT_EQ(second.sealed_end(), std::clamp<int64_t>(length / 64, 1, original.sealed_end()));
    Append(second, 400);
    ASSERT_TRUE(second.SealForGeneration(threads_).ok());
    EXPECT_EQ(second.sealed_end(), SequenceCache::SealedEndAt(config_, length + 400 - 128));
    ExpectContents(second);
    ExpectContents(original);  // what it shares was not written
  }
  EXPECT_EQ(pool_.pages_in_use(), 0);
}

TEST_F(SequenceCacheTest, SealedEndIsWhatSealingReaches) {
  SequenceCache cache(config_, pool_);
  EXPECT_EQ(SequenceCache::SealedEndAt(config_, -1), 1);
  for (int64_t length = 1; length <= 700; ++length) {
    Append(cache, 1);
    ASSERT_TRUE(cache.SealForGeneration(threads_).ok());
    ASSERT_EQ(cache.sealed_end(), SequenceCache::SealedEndAt(config_, length - 128)) << length;
  }
}

}  // namespace
}  // namespace oscar
