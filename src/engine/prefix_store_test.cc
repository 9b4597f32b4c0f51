#include "engine/prefix_store.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "base/log.h"
#include "engine/engine_test_util.h"
#include "engine/prefix_index.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

class PrefixStoreTest : public testing::Test {
 protected:
  PrefixStoreTest() {
    folder_ = fs::temp_directory_path() /
              fmt::format("oscar_prefix_{}_{}", ::getpid(),
                          testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(folder_);
    SetLogSink([this](LogLevel level, std::string_view) {
      warnings_ += level == LogLevel::kWarning ? 1 : 0;
    });
  }
  ~PrefixStoreTest() override {
    SetLogSink({});
    fs::remove_all(folder_);
  }

  std::unique_ptr<PrefixStore> Open(uint64_t max_bytes = uint64_t{1} << 30) {
    auto store = PrefixStore::Open(folder_, key_, max_bytes);
    EXPECT_TRUE(store.has_value()) << store.error().ToString();
    return std::move(*store);
  }
  // `count` chained pages of 100 bytes.
  static std::vector<PageRecord> Chain(size_t count) {
    const auto tokens = FakeTokens(3, count * 64);
    std::vector<uint64_t> hashes;
    ExtendPageHashes("", tokens, &hashes);
    std::vector<PageRecord> records;
    for (size_t i = 0; i < count; ++i) {
      PageRecord& record = records.emplace_back();
      record.parent = i == 0 ? XXH3_64bits("", 0) : hashes[i - 1];
      record.hash = hashes[i];
      record.index = static_cast<int64_t>(i);
      record.sealed = i > 0;
      record.tokens.assign(tokens.begin() + static_cast<ptrdiff_t>(64 * i),
                           tokens.begin() + static_cast<ptrdiff_t>(64 * i + 64));
      record.payload.assign(i > 0 ? 100 : 200, static_cast<std::byte>(i + 1));
    }
    return records;
  }
  std::vector<PageRecord> LoadAll() {
    std::vector<PageRecord> loaded;
    Open()->Load(200, 100, [&](PageRecord record) {
      loaded.push_back(std::move(record));
      return true;
    });
    return loaded;
  }
  std::vector<fs::path> Files() const {
    std::vector<fs::path> files;
    for (const auto& entry : fs::recursive_directory_iterator(folder_)) {
      if (entry.is_regular_file()) files.push_back(entry.path());
    }
    return files;
  }

  fs::path folder_;
  uint64_t key_ = 77;
  std::atomic<int> warnings_{0};
};

TEST_F(PrefixStoreTest, PagesComeBackInOrder) {
  auto records = Chain(20);
  {
    auto store = Open();
    for (const PageRecord& record : records) EXPECT_TRUE(store->Put(record));
    EXPECT_TRUE(store->Has(records[5].hash));
  }
  const auto loaded = LoadAll();
  ASSERT_EQ(loaded.size(), 20u);
  for (size_t i = 0; i < 20; ++i) {
    EXPECT_EQ(loaded[i].hash, records[i].hash);
    EXPECT_EQ(loaded[i].parent, records[i].parent);
    EXPECT_EQ(loaded[i].sealed, records[i].sealed);
    EXPECT_EQ(loaded[i].tokens, records[i].tokens);
    EXPECT_EQ(loaded[i].payload, records[i].payload);
  }
  EXPECT_EQ(warnings_.load(), 0);
  // Another model or format sees none of them.
  key_ = 78;
  EXPECT_TRUE(LoadAll().empty());
}

TEST_F(PrefixStoreTest, DamagedFilesAreIgnoredWithAWarning) {
  {
    auto store = Open();
    for (const PageRecord& record : Chain(4)) EXPECT_TRUE(store->Put(record));
  }
  const auto files = Files();
  ASSERT_EQ(files.size(), 4u);
  for (const fs::path& path : files) {
    std::ifstream in(path, std::ios::binary);
    const std::string whole((std::istreambuf_iterator<char>(in)), {});
    const auto write = [&](const std::string& text) {
      std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
    };
    // Every byte matters, and so does every length.
    for (size_t at = 0; at < whole.size(); at += 7) {
      std::string bad = whole;
      bad[at] = static_cast<char>(bad[at] ^ 0x10);
      write(bad);
      warnings_ = 0;
      ASSERT_EQ(LoadAll().size(), 3u) << at;
      ASSERT_EQ(warnings_.load(), 1);
      write(whole.substr(0, at));
      ASSERT_EQ(LoadAll().size(), 3u) << at;
    }
    write(whole + "x");
    EXPECT_EQ(LoadAll().size(), 3u);
    write(whole);
  }
  // Foreign names are nobody's business.
  std::ofstream(files[0].parent_path() / "notes.txt") << "hello";
  std::ofstream(files[0].parent_path() / "0123.page.tmp") << "torn";
  warnings_ = 0;
  EXPECT_EQ(LoadAll().size(), 4u);
  EXPECT_EQ(warnings_.load(), 0);
}

TEST_F(PrefixStoreTest, SpaceIsBounded) {
  {
    auto store = Open(2000);
    for (const PageRecord& record : Chain(30)) EXPECT_TRUE(store->Put(record));
  }
  uint64_t bytes = 0;
  for (const fs::path& path : Files()) bytes += fs::file_size(path);
  EXPECT_LE(bytes, 2000u);
  EXPECT_GT(bytes, 1000u);
}

// A page is of use only with all that it continues, so the beginnings of histories go last.
TEST_F(PrefixStoreTest, WhatIsLeftAtTheLimitCanStillBeUsed) {
  const std::vector<PageRecord> chain = Chain(12);
  constexpr uint64_t kFile = 48 + 4 * 64 + 8;  // beside the payload
  constexpr uint64_t kLimit = 6 * (kFile + 100) + 100;
  const auto indices = [&] {
    std::vector<int64_t> found;
    for (const PageRecord& record : LoadAll()) found.push_back(record.index);
    return found;
  };
  {
    auto store = Open(kLimit);
    for (const PageRecord& record : chain) ASSERT_TRUE(store->Put(record));
    store->Flush();
    // Too long for the folder by itself: what did not stay is not offered again and again.
    EXPECT_TRUE(store->Has(chain.back().hash));
  }
  EXPECT_EQ(indices(), (std::vector<int64_t>{0, 1, 2, 3, 4, 5}));
  // The order survives, as far as the folder is made smaller.
  Open(kLimit - 2 * (kFile + 100));
  EXPECT_EQ(indices(), (std::vector<int64_t>{0, 1, 2, 3}));

  // Another history takes the place of the old one's end; that may be written again.
  auto store = Open(kLimit - 2 * (kFile + 100));
  store->Load(200, 100, [](const PageRecord&) { return true; });
  PageRecord other = chain[1];
  other.tokens = FakeTokens(9, 64);
  other.hash = XXH3_64bits_withSeed(other.tokens.data(), 4 * 64, other.parent);
  ASSERT_TRUE(store->Put(other));
  store->Flush();
  EXPECT_FALSE(store->Has(chain[3].hash));
  EXPECT_TRUE(store->Has(chain[2].hash));
  EXPECT_TRUE(store->Has(chain[0].hash));
  EXPECT_TRUE(store->Has(other.hash));
}

TEST_F(PrefixStoreTest, AnUnusableFolderIsAnError) {
  std::ofstream(folder_.string()) << "a file";
  EXPECT_FALSE(PrefixStore::Open(folder_, 1, 1000).has_value());
  // The engine goes without, and says so.
  EngineServiceOptions options;
  options.prefix_dir = folder_.string();
  FakeEngine engine(4096, options);
  EXPECT_EQ(engine.Ask(FakeRequest(1, 10, 3)).tokens.size(), 3u);
  EXPECT_GE(warnings_.load(), 1);
}

TEST_F(PrefixStoreTest, Rule4_8_ARestartFindsThePrefix) {
  EngineServiceOptions options;
  options.prefix_dir = folder_.string();
  EngineRequest request = FakeRequest(4, 2000, 50);
  EngineRequest salted = FakeRequest(6, 500, 5);
  salted.cache_salt = "key";
  EngineRequest next;
  Answer within;
  {
    FakeEngine engine(4096, options);
    const Answer first = engine.Ask(request);
    engine.Ask(salted);
    next = request;
    next.prompt.insert(next.prompt.end(), first.tokens.begin(), first.tokens.end());
    next.prompt.push_back(3);
  }
  {
    FakeEngine engine(4096, options);
    EXPECT_GT(engine.service->Stats().kv_bytes, 0u);
    const Answer second = engine.Ask(next);
    EXPECT_EQ(second.cached_tokens, (2049 - 128) / 64 * 64);  // all that was sealed
    EXPECT_EQ(second.tokens.size(), 50u);
    salted.cache_salt.clear();
    EXPECT_EQ(engine.Ask(salted).cached_tokens, 0);  // salted pages are not written
  }
  // A cache half of which is smaller than the pages takes up what fits, from the start.
  FakeEngine small(20, options);
  EXPECT_LE(small.service->Stats().kv_bytes, small.pool.budget() / 2);
  next.max_tokens = 5;
  const Answer third = small.Ask(next);
  EXPECT_GT(third.cached_tokens, 500);
  EXPECT_EQ(third.tokens.size(), 5u);
}

// What comes back is what was stored, row by row: the same hits as in one run.
TEST_F(PrefixStoreTest, RestoredPagesAreTheSameBytes) {
  ThreadPool threads(1);
  FakeModel model({}, threads);
  const CacheConfig& config = model.kv().cache();
  PagePool pool(uint64_t{64} << 20, model.kv().host_sealer());
  const auto tokens = FakeTokens(1, 1000);
  std::vector<uint64_t> hashes;
  ExtendPageHashes("", tokens, &hashes);
  const PageKey key{"", tokens, hashes};
  SequenceCache cache(config, pool);
  while (cache.length() < 1000) {
    const auto at = static_cast<size_t>(cache.length());
    const ForwardItem item{
        &cache, std::span(tokens).subspan(at, std::min<size_t>(256 - at % 256, 1000 - at)), true,
        0};
    ASSERT_TRUE(model.Forward({&item, 1}, {}).ok());
  }
  ASSERT_TRUE(cache.SealForGeneration(threads).ok());
  {
    auto store = Open();
    PrefixIndex index(config, pool, false);
    index.AttachStore(store.get());
    index.Insert(key, cache, 1000, PrefixIndex::Keep::kAll);
  }
  auto store = Open();
  PrefixIndex index(config, pool, false);
  index.AttachStore(store.get());
  const PrefixIndex::Hit hit = index.Match(key, 999, false);
  ASSERT_EQ(hit.cache.length(), cache.sealed_end() * 64);
  EXPECT_FALSE(hit.exact);
  EXPECT_EQ(hit.exact_tokens, 0);
  for (int64_t j = 0; j < hit.cache.num_pages(); ++j) {
    ASSERT_EQ(hit.cache.is_sealed(j), cache.is_sealed(j));
    EXPECT_EQ(
        std::memcmp(hit.cache.page(j).data(), cache.page(j).data(), cache.page(j).layout().bytes()),
        0)
        << j;
  }
  EXPECT_EQ(index.Match(key, 999, true).cache.length(), 0);
}

// Whatever changes the rows of the same tokens, or what they are quantised to.
TEST(PrefixStoreKey, KnowsPositionsAndClips) {
  struct OtherModel : FakeModel {
    OtherModel(const Options& options, ThreadPool& threads) : FakeModel(options, threads) {
      changed = FakeModel::spec();
    }
    const ModelSpec& spec() const override { return changed; }
    const KvPlan& kv() const override { return plan != nullptr ? *plan : FakeModel::kv(); }
    void Replan(std::optional<float> v_clip) {
      KvPlanOptions made;
      made.method = "naive";
      made.v_clip = v_clip;
      plan = *KvPlan::Make(changed, made, FakeEncodePage);
    }
    ModelSpec changed;
    std::unique_ptr<KvPlan> plan;
  };
  ThreadPool threads(1);
  OtherModel model({}, threads), same({}, threads);
  const uint64_t key = PrefixStoreKey(model);
  EXPECT_EQ(key, PrefixStoreKey(same));
  model.changed.rope_scaling = {.type = RopeScalingType::kYarn, .factor = 4.0};
  const uint64_t stretched = PrefixStoreKey(model);
  EXPECT_NE(key, stretched);
  model.changed.rope_scaling.factor = 2.0;
  EXPECT_NE(stretched, PrefixStoreKey(model));
  same.changed.rope_theta *= 2.0;
  EXPECT_NE(key, PrefixStoreKey(same));
  model.Replan(std::nullopt);
  const uint64_t unclipped = PrefixStoreKey(model);
  model.Replan(0.92f);
  EXPECT_NE(unclipped, PrefixStoreKey(model));
}

}  // namespace
}  // namespace oscar
