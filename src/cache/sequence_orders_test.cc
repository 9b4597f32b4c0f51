// Sequences that grow, part, lose tokens and are sealed in any order, in a pool that is mostly
// full: every page of every one is at all times the rows of its own tokens, or their quantisation.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "base/rng.h"
#include "cache/layered_append.h"
#include "cache/page_sealer.h"

namespace oscar {
namespace {

constexpr int kLayers = 2, kDim = 64, kCell = 512, kRecent = 64;

struct Sequence {
  SequenceCache cache;
  std::vector<uint32_t> tokens;  // rows are a function of (layer, token)
};

Bf16 Element(int layer, uint32_t token, int d) {
  const uint32_t bits = (token * 2654435761u) ^ static_cast<uint32_t>(layer * 7919 + d * 104729);
  return ToBf16(static_cast<float>(bits * 2246822519u >> 16) / 32768.0f - 1.0f);
}

void Write(Bf16* k, Bf16* v, int layer, uint32_t token) {
  for (int d = 0; d < kDim; ++d) {
    k[d] = Element(layer, token, d);
    v[d] = Element(layer, token, kDim + d);
  }
}

class SequenceOrdersTest : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  uint32_t Draw(uint32_t below) { return rng_.Below(draw_++, below); }

  bool Append(Sequence& sequence, int64_t count) {
    if (!sequence.cache.Reserve(count).ok()) return false;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t p = sequence.cache.length() + i;
      sequence.tokens.push_back(Draw(1u << 31));
      for (int layer = 0; layer < kLayers; ++layer) {
        Write(sequence.cache.KRow(layer, 0, p), sequence.cache.VRow(layer, 0, p), layer,
              sequence.tokens.back());
      }
    }
    sequence.cache.Advance(count);
    return true;
  }
  bool AppendByLayer(Sequence& sequence, int64_t count, bool commits) {
    const int64_t first = sequence.cache.length();
    auto append = LayeredAppend::Begin(sequence.cache, count, threads_);
    if (!append.has_value()) return false;
    for (int64_t i = 0; i < count; ++i) sequence.tokens.push_back(Draw(1u << 31));
    for (int layer = 0; layer < kLayers; ++layer) {
      (*append)->SetLayer(layer);
      for (int64_t p = first; p < first + count; ++p) {
        Write((*append)->KRow(0, p), (*append)->VRow(0, p), layer,
              sequence.tokens[static_cast<size_t>(p)]);
      }
      if (layer + 1 == kLayers && !commits) break;
      (*append)->SealLayer(threads_);
    }
    if (commits) {
      (*append)->Commit();
    } else {
      sequence.tokens.resize(static_cast<size_t>(first));
    }
    return true;
  }
  // What a prefix hit is: whole pages in either form, those that are sealed together in one.
  Sequence Hit(const Sequence& open, const SequenceCache& sealed) {
    const int64_t together = config_.pages_together, sink = config_.sink / kPageTokens;
    std::vector<SequenceCache::StoredPage> pages;
    for (int64_t j = 0;;) {
      const int64_t count = j < sink ? 1 : together;
      if ((j + count) * kPageTokens > sealed.length()) break;
      const SequenceCache& from = Draw(2) == 0 ? open.cache : sealed;
      for (const int64_t end = j + count; j < end; ++j) {
        pages.push_back({from.page(j).Share(), from.is_sealed(j)});
      }
    }
    const auto length = static_cast<int64_t>(pages.size()) * kPageTokens;
    Sequence hit{SequenceCache::FromPages(config_, pool_, std::move(pages), length), open.tokens};
    hit.tokens.resize(static_cast<size_t>(length));
    return hit;
  }
  bool HasGap(const SequenceCache& cache) const {
    bool gap = false;
    for (int64_t j = cache.sealed_end(); j < cache.num_pages(); ++j) gap |= cache.is_sealed(j);
    return gap;
  }
  void Check(const Sequence& sequence) {
    const SequenceCache& cache = sequence.cache;
    ASSERT_EQ(cache.length(), static_cast<int64_t>(sequence.tokens.size()));
    std::vector<std::byte> expected(config_.sealed.block(0, 0).block_bytes());
    for (int64_t j = 0; j < PagesOf(cache.length()); ++j) {
      const int64_t held = std::min<int64_t>(kPageTokens, cache.length() - j * kPageTokens);
      ASSERT_EQ(cache.page_table()[j], cache.page(j).data());
      for (int layer = 0; layer < kLayers; ++layer) {
        std::vector<Bf16> k(static_cast<size_t>(kPageTokens * kDim)), v(k.size());
        for (int64_t t = 0; t < held; ++t) {
          Write(&k[static_cast<size_t>(t * kDim)], &v[static_cast<size_t>(t * kDim)], layer,
                sequence.tokens[static_cast<size_t>(j * kPageTokens + t)]);
        }
        const std::byte* const block = cache.page(j).Block(layer, 0).data();
        if (cache.is_sealed(j)) {
          ASSERT_GE(j, config_.sink / kPageTokens);
          EncodeBlock(config_.sealed.block(layer, 0), {}, k, v, expected);
          ASSERT_EQ(0, std::memcmp(block, expected.data(), expected.size())) << j;
        } else {
          const auto bytes = static_cast<size_t>(held * kDim) * sizeof(Bf16);
          ASSERT_EQ(0, std::memcmp(block, k.data(), bytes)) << j;
          ASSERT_EQ(0, std::memcmp(block + k.size() * sizeof(Bf16), v.data(), bytes)) << j;
        }
      }
    }
  }
  void CheckAll() {
    std::set<const std::byte*> seen;
    uint64_t bytes = 0;
    for (const Sequence& sequence : sequences_) {
      Check(sequence);
      for (int64_t j = 0; j < sequence.cache.num_pages(); ++j) {
        const PageRef& page = sequence.cache.page(j);
        if (seen.insert(page.data()).second) bytes += page.layout().bytes();
      }
    }
    ASSERT_EQ(pool_.bytes_in_use(), bytes);
    ASSERT_LE(pool_.peak_bytes(), pool_.budget());
  }

  CacheConfig config_{
      PageLayout({kLayers, BlockLayout(BlockKind::kBf16, CodeOrder::kCpu, kDim, kDim)}, 1),
      PageLayout({kLayers, BlockLayout(BlockKind::kInt2, CodeOrder::kCpu, kDim, kDim)}, 1),
      std::get<1>(GetParam()),
      kRecent,
      kCell,
      std::get<0>(GetParam())};
  const RuleSealer sealer_{config_, std::vector(kLayers, std::vector<BlockRules>(1)), EncodeBlocks};
  PagePool pool_{14 * config_.open.bytes(), &sealer_};
  ThreadPool threads_{1};
  std::vector<Sequence> sequences_;  // goes before the pool
  const Philox rng_{17, static_cast<uint64_t>(std::get<0>(GetParam()) * 1000 + config_.sink)};
  uint64_t draw_ = 0;
};

TEST_P(SequenceOrdersTest, RowsStayThoseOfTheirTokens) {
  int refused = 0, gaps = 0;
  for (int step = 0; step < 600; ++step) {
    std::erase_if(sequences_, [](const Sequence& each) { return each.cache.length() > 700; });
    if (sequences_.size() == 5) {
      sequences_.erase(std::ranges::min_element(
          sequences_, {}, [](const Sequence& each) { return each.cache.length(); }));
    }
    if (sequences_.empty()) sequences_.push_back({SequenceCache(config_, pool_), {}});
    const size_t at = Draw(static_cast<uint32_t>(sequences_.size()));
    Sequence& sequence = sequences_[at];
    SequenceCache& cache = sequence.cache;
    const int64_t count =
        std::min<int64_t>(1 + Draw(150), kCell - cache.length() % kCell);  // stays in its cell
    const AppendCost cost = cache.CostOf(count, /*is_prompt=*/true);
    const AppendCost layered = LayeredAppend::CostOf(cache, count);
    const auto fits = [&](const AppendCost& of) {
      const int64_t needed = std::max(of.seal_peak, of.seal_net + of.reserve);
      return needed <= 0 || pool_.CanAllocate(static_cast<uint64_t>(needed));
    };
    bool done = true;
    switch (Draw(12)) {
      case 0:
      case 1:
      case 2:
      case 3: {
        const bool expected = fits(cost);
        done = cache.SealForPrompt(threads_).ok() && Append(sequence, count);
        ASSERT_EQ(done, expected) << step;
        break;
      }
      case 4:
      case 5: {
        const bool expected = fits(layered);
        done = AppendByLayer(sequence, count, /*commits=*/Draw(4) != 0);
        ASSERT_TRUE(done || !expected) << step;  // pages left from a failed pass are a help
        break;
      }
      case 6:
        if (Draw(4) == 0) done = cache.SealForGeneration(threads_).ok();
        break;
      case 7: {
        const int64_t length = std::max<int64_t>(0, cache.length() - Draw(150));
        const int64_t kept = cache.Trim(length);
        ASSERT_LE(kept, length);
        sequence.tokens.resize(static_cast<size_t>(kept));
        break;
      }
      case 8:
        sequences_.push_back({cache.Fork(), sequence.tokens});
        break;
      case 9: {
        Sequence sealed{cache.Fork(), sequence.tokens};
        done = sealed.cache.SealForGeneration(threads_).ok();
        Sequence hit = Hit(sequence, sealed.cache);
        gaps += HasGap(hit.cache) ? 1 : 0;
        sequences_.push_back(std::move(hit));
        break;
      }
      case 10:
        done = cache.SealGaps(threads_).ok();
        break;
      case 11:
        done = cache.Reserve(count).ok();  // a pass that fails afterwards
        break;
    }
    refused += done ? 0 : 1;
    if (step % 4 == 3 || !done) CheckAll();
    if (HasFatalFailure()) FAIL() << "step " << step;
    if (!done) sequences_.erase(sequences_.begin());  // makes room
  }
  EXPECT_GT(refused, 3);
  if (config_.pages_together == 1) {  // pairs rarely leave one
    EXPECT_GT(gaps, 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Geometries, SequenceOrdersTest,
                         testing::Combine(testing::Values(1, 2), testing::Values(0, 64)));

}  // namespace
}  // namespace oscar
