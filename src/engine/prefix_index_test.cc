// Rules by number: docs/engine-contract.md section 4.
#include "engine/prefix_index.h"

#include <gtest/gtest.h>

#include "base/rng.h"
#include "engine/fake_model.h"
#include "engine/prompt_reader.h"

namespace oscar {
namespace {

// Sink 64, recent 128, cell 256: at 700 prompt tokens pages [1, 6) are sealed, [6, 11) open; the
// first generated token seals up to page 8.
class PrefixIndexTest : public testing::Test {
 protected:
  struct Run {
    std::vector<int32_t> tokens;
    std::vector<uint64_t> hashes;
    SequenceCache cache;
    PageKey key(std::string_view salt = "") const { return {salt, tokens, hashes}; }
  };

  Run Read(std::vector<int32_t> tokens, size_t prompt, std::string_view salt = "") {
    Run run{std::move(tokens), {}, SequenceCache(config(), pool_)};
    ExtendPageHashes(salt, run.tokens, &run.hashes);
    Continue(&run, prompt);
    return run;
  }
  // Computes what the cache lacks; tokens from `prompt` on are generated.
  void Continue(Run* run, size_t prompt) {
    const std::span<const int32_t> tokens = run->tokens;
    PromptReader reader(model_, run->cache, tokens.first(std::min(prompt, tokens.size())));
    ASSERT_TRUE(reader.ReadAll().ok());
    while (run->cache.length() < static_cast<int64_t>(tokens.size())) {
      const auto at = static_cast<size_t>(run->cache.length());
      const ForwardItem item{&run->cache, tokens.subspan(at, 1), /*is_prompt=*/false, 0};
      ASSERT_TRUE(model_.Forward({&item, 1}, {}).ok());
    }
  }
  // The form and content of every row, as the model would read it.
  static std::vector<uint64_t> Rows(const SequenceCache& cache) {
    std::vector<uint64_t> rows;
    for (int64_t p = 0; p < cache.length(); ++p) {
      const int64_t j = p / kPageTokens;
      uint64_t row = 0;
      const void* from = cache.is_sealed(j)
                             ? static_cast<const void*>(cache.page(j).data() + p % kPageTokens * 8)
                             : static_cast<const void*>(cache.KRow(0, 0, p));
      std::memcpy(&row, from, sizeof(row));
      rows.push_back(row * 2 + (cache.is_sealed(j) ? 1 : 0));
    }
    return rows;
  }
  // A hit of `length` tokens leaves the state that reading them afresh leaves, once the next pass
  // has sealed what it would seal anyway.
  void ExpectFresh(PrefixIndex::Hit& hit, std::span<const int32_t> tokens) {
    const auto length = static_cast<size_t>(hit.cache.length());
    Run fresh = Read({tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(length)}, length);
    ASSERT_TRUE(fresh.cache.SealForPrompt(threads_).ok());
    ASSERT_TRUE(hit.cache.SealForPrompt(threads_).ok());
    EXPECT_EQ(Rows(hit.cache), Rows(fresh.cache)) << length;
  }
  const CacheConfig& config() const { return model_.kv().cache(); }

  ThreadPool threads_{1};
  FakeModel model_{{}, threads_};
  PagePool pool_{uint64_t{64} << 20, model_.kv().host_sealer()};
  PrefixIndex index_{config(), pool_, false};
};

TEST_F(PrefixIndexTest, Rule4_1_SaltsAreApart) {
  Run run = Read(FakeTokens(1, 300), 300, "a");
  index_.Insert(run.key("a"), run.cache, 300, PrefixIndex::Keep::kAll);
  EXPECT_EQ(index_.Match(run.key("a"), 299, false).cache.length(), 299);
  std::vector<uint64_t> other;
  ExtendPageHashes("b", run.tokens, &other);
  EXPECT_EQ(index_.Match({"b", run.tokens, other}, 299, false).cache.length(), 0);
  // Not even with the hashes of the other salt.
  EXPECT_EQ(index_.Match(run.key("b"), 299, false).cache.length(), 0);
}

TEST_F(PrefixIndexTest, Rule4_1_AHashIsNotTrusted) {
  Run run = Read(FakeTokens(1, 300), 300);
  index_.Insert(run.key(), run.cache, 300, PrefixIndex::Keep::kAll);
  Run other{FakeTokens(2, 300), run.hashes, SequenceCache(config(), pool_)};
  EXPECT_EQ(index_.Match(other.key(), 299, false).cache.length(), 0);
  // A collision on insertion leaves the older pages.
  other.cache = run.cache.Fork();
  index_.Insert(other.key(), other.cache, 300, PrefixIndex::Keep::kAll);
  EXPECT_EQ(index_.Match(run.key(), 299, false).cache.length(), 299);
}

TEST_F(PrefixIndexTest, Rule4_3_AKeptTailContinuesAsUninterrupted) {
  auto tokens = FakeTokens(1, 1000);
  for (size_t turn : {700u, 704u, 725u, 767u}) {
    index_.Clear();
    Run first = Read({tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(turn)}, 650);
    index_.Insert(first.key(), first.cache, 650, PrefixIndex::Keep::kAll);
    Run uninterrupted{tokens, {}, std::move(first.cache)};
    ExtendPageHashes("", tokens, &uninterrupted.hashes);
    PrefixIndex::Hit hit = index_.Match(uninterrupted.key(), 999, false);
    EXPECT_EQ(hit.cache.length(), static_cast<int64_t>(turn));
    EXPECT_FALSE(hit.exact);
    Run next{tokens, uninterrupted.hashes, std::move(hit.cache)};
    Continue(&uninterrupted, 1000);
    Continue(&next, 1000);
    EXPECT_EQ(Rows(next.cache), Rows(uninterrupted.cache));
  }
}

TEST_F(PrefixIndexTest, Rule4_4_WithoutTheTailSealedPagesAreRead) {
  Run run = Read(FakeTokens(1, 700), 700);
  ASSERT_TRUE(run.cache.SealForGeneration(threads_).ok());
  EXPECT_EQ(run.cache.sealed_end(), 8);
  index_.Insert(run.key(), run.cache, 700, PrefixIndex::Keep::kImmutable);
  PrefixIndex::Hit hit = index_.Match(run.key(), 699, false);
  EXPECT_EQ(hit.cache.length(), 512);
  EXPECT_FALSE(hit.exact);
  for (int64_t j = 0; j < 8; ++j) EXPECT_EQ(hit.cache.is_sealed(j), j >= 1) << j;
}

TEST_F(PrefixIndexTest, Rule4_5_ExactHitsAreAsFresh) {
  const auto tokens = FakeTokens(1, 1500);
  const Philox rng(9, 0);
  int hits = 0;
  for (uint64_t round = 0; round < 60; ++round) {
    PrefixIndex index(config(), pool_, round % 2 == 0);
    // A sequence that published its pages as it went, generated, and ended.
    const size_t prompt = 1 + rng.Below(4 * round, 1200);
    const size_t total = prompt + rng.Below(4 * round + 1, 250);
    Run run = Read({tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(prompt)}, prompt);
    index.Insert(run.key(), run.cache, static_cast<int64_t>(prompt), PrefixIndex::Keep::kFullPages);
    run.tokens.assign(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(total));
    ExtendPageHashes("", run.tokens, &run.hashes);
    Continue(&run, prompt);
    index.Insert(run.key(), run.cache, static_cast<int64_t>(prompt), PrefixIndex::Keep::kAll);
    run.cache.Trim(0);
    if (rng.Below(4 * round + 2, 3) == 0) {  // some of it is evicted
      index.EvictFor(pool_.budget() - pool_.bytes_in_use() + 3 * config().open.bytes());
    }
    std::vector<uint64_t> hashes;
    ExtendPageHashes("", tokens, &hashes);
    const int64_t limit = 1 + rng.Below(4 * round + 3, 1499);
    PrefixIndex::Hit hit = index.Match({"", tokens, hashes}, limit, true);
    EXPECT_LE(hit.cache.length(), std::min(limit, static_cast<int64_t>(prompt)));
    if (hit.cache.length() == 0) continue;
    ++hits;
    EXPECT_TRUE(hit.exact);
    EXPECT_EQ(hit.exact_tokens, hit.cache.length());
    ExpectFresh(hit, tokens);
  }
  EXPECT_GT(hits, 30);
}

TEST_F(PrefixIndexTest, Rule4_5_GeneratedTokensAreNotExact) {
  Run run = Read(FakeTokens(1, 250), 100);
  index_.Insert(run.key(), run.cache, 100, PrefixIndex::Keep::kAll);
  EXPECT_EQ(index_.Match(run.key(), 249, true).cache.length(), 100);
  EXPECT_EQ(index_.Match(run.key(), 249, false).cache.length(), 249);
  // Pages at the end of the recent window before a cell are needed open.
  index_.Clear();
  Run longer = Read(FakeTokens(1, 700), 700);
  ASSERT_TRUE(longer.cache.SealForGeneration(threads_).ok());
  index_.Insert(longer.key(), longer.cache, 700, PrefixIndex::Keep::kAll);
  EXPECT_EQ(index_.Match(longer.key(), 699, true).cache.length(), 64);
}

TEST_F(PrefixIndexTest, AMoreExactPageReplacesALessExactOne) {
  const auto tokens = FakeTokens(1, 250);
  Run generated = Read(tokens, 100), prompt = Read(tokens, 250);
  index_.Insert(generated.key(), generated.cache, 100, PrefixIndex::Keep::kAll);
  index_.Insert(prompt.key(), prompt.cache, 250, PrefixIndex::Keep::kAll);
  index_.Insert(generated.key(), generated.cache, 100, PrefixIndex::Keep::kAll);
  PrefixIndex::Hit hit = index_.Match(prompt.key(), 249, true);
  EXPECT_EQ(hit.cache.length(), 249);
  ExpectFresh(hit, tokens);
}

TEST_F(PrefixIndexTest, Rule4_6_EvictsTheLeastRecentFromItsEnd) {
  Run a = Read(FakeTokens(1, 500), 500), b = Read(FakeTokens(2, 500), 500);
  index_.Insert(a.key(), a.cache, 500, PrefixIndex::Keep::kAll);
  index_.Insert(b.key(), b.cache, 500, PrefixIndex::Keep::kAll);
  a.cache.Trim(0);
  b.cache.Trim(0);
  const uint64_t full = pool_.bytes_in_use();
  EXPECT_EQ(index_.EvictableBytes(UINT64_MAX), full);
  EXPECT_EQ(index_.Match(a.key(), 499, false).cache.length(), 499);  // now b is the older
  EXPECT_TRUE(index_.EvictFor(pool_.budget() - full + 1));
  EXPECT_EQ(index_.Match(a.key(), 499, false).cache.length(), 499);
  EXPECT_EQ(index_.Match(b.key(), 499, false).cache.length(), 448);  // the tail page went
  EXPECT_EQ(index_.evictions(), 1u);
  {
    // Pages that somebody uses stay.
    const PrefixIndex::Hit used = index_.Match(a.key(), 128, false);
    const uint64_t bytes = config().open.bytes() + config().sealed.bytes();
    EXPECT_EQ(index_.EvictableBytes(UINT64_MAX), pool_.bytes_in_use() - bytes);
    EXPECT_FALSE(index_.EvictFor(pool_.budget()));
    EXPECT_EQ(pool_.bytes_in_use(), bytes);
  }
  EXPECT_TRUE(index_.EvictFor(pool_.budget()));
  EXPECT_EQ(pool_.bytes_in_use(), 0u);
  EXPECT_EQ(index_.num_nodes(), 0u);
}

TEST_F(PrefixIndexTest, Rule4_6_EvictableIsWhatEvictionFrees) {
  const Philox rng(21, 0);
  uint64_t draw = 0;
  for (int round = 0; round < 40; ++round) {
    std::vector<SequenceCache> users;
    for (int i = 0; i < 6; ++i) {
      // Prompts that share 0 to 5 pages with others.
      auto tokens = FakeTokens(1, 64 * rng.Below(draw++, 6));
      const auto rest = FakeTokens(draw, 1 + rng.Below(draw, 500));
      ++draw;
      tokens.insert(tokens.end(), rest.begin(), rest.end());
      const size_t size = tokens.size();
      Run run = Read(tokens, std::max<size_t>(1, size - rng.Below(draw++, 100) % size));
      PrefixIndex::Hit hit = index_.Match(run.key(), static_cast<int64_t>(size), false);
      if (rng.Below(draw++, 2) == 0) users.push_back(std::move(hit.cache));
      index_.Insert(run.key(), run.cache, 0, static_cast<PrefixIndex::Keep>(rng.Below(draw++, 3)));
      if (rng.Below(draw++, 3) == 0) users.push_back(std::move(run.cache));
    }
    const uint64_t before = pool_.bytes_in_use();
    const uint64_t evictable = index_.EvictableBytes(UINT64_MAX);
    index_.EvictFor(pool_.budget());
    ASSERT_EQ(pool_.bytes_in_use(), before - evictable) << round;
    if (round % 4 == 0) {
      users.clear();
      index_.EvictFor(pool_.budget());
      ASSERT_EQ(pool_.bytes_in_use(), 0u);
      ASSERT_EQ(index_.num_nodes(), 0u);
    }
  }
}

TEST_F(PrefixIndexTest, ReleaseSharedLetsSequencesSealInPlace) {
  Run run = Read(FakeTokens(1, 500), 500);
  index_.Insert(run.key(), run.cache, 500, PrefixIndex::Keep::kAll);
  EXPECT_GT(run.cache.CostOf(1, false).seal_peak, 0);
  EXPECT_TRUE(index_.ReleaseShared());
  EXPECT_LE(run.cache.CostOf(1, false).seal_peak, 0);
  EXPECT_EQ(run.cache.CostOf(1, false).reserve, 0);
  EXPECT_FALSE(index_.ReleaseShared());
  EXPECT_EQ(index_.Match(run.key(), 499, false).cache.length(), 128);  // sink, one sealed page
}

TEST_F(PrefixIndexTest, PagesSealedTogetherAreFoundTogether) {
  FakeModel::Options options;
  options.method = "kivi-sink";
  FakeModel model(options, threads_);
  const CacheConfig& kivi = model.kv().cache();
  ASSERT_EQ(kivi.pages_together, 2);
  PrefixIndex index(kivi, pool_, false);
  const auto read = [&](const std::vector<int32_t>& tokens) {
    SequenceCache cache(kivi, pool_);
    while (cache.length() < static_cast<int64_t>(tokens.size())) {
      const auto at = static_cast<size_t>(cache.length());
      const auto count = std::min<size_t>(tokens.size() - at, 256 - at % 256);
      const ForwardItem item{&cache, std::span(tokens).subspan(at, count), true, 0};
      EXPECT_TRUE(model.Forward({&item, 1}, {}).ok());
    }
    EXPECT_TRUE(cache.SealForGeneration(threads_).ok());
    return cache;
  };
  auto tokens = FakeTokens(1, 800);
  std::vector<uint64_t> hashes;
  ExtendPageHashes("", tokens, &hashes);
  {
    const SequenceCache cache = read(tokens);
    index.Insert({"", tokens, hashes}, cache, 800, PrefixIndex::Keep::kImmutable);
  }
  const int64_t whole = index.Match({"", tokens, hashes}, 799, false).cache.length();
  EXPECT_GE(whole, 512);
  EXPECT_EQ((whole - kivi.sink) % 128, 0);
  // Another prompt that parts in the second page of a pair cannot use the first.
  auto other = tokens;
  const size_t parts = static_cast<size_t>(kivi.sink) + 64 + 3;
  other[parts] = (other[parts] + 1) % FakeModel::kVocab;
  std::vector<uint64_t> other_hashes;
  ExtendPageHashes("", other, &other_hashes);
  EXPECT_EQ(index.Match({"", other, other_hashes}, 799, false).cache.length(), kivi.sink);
}

}  // namespace
}  // namespace oscar
