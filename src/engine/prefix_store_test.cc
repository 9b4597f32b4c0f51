#include "engine/prefix_store.h"

#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <thread>

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

  PrefixStoreOptions Options(uint64_t max_bytes = uint64_t{1} << 30) const {
    return {.format = {key_, 200, 100}, .max_bytes = max_bytes};
  }
  std::unique_ptr<PrefixStore> Open(uint64_t max_bytes = uint64_t{1} << 30) {
    return Open(Options(max_bytes));
  }
  std::unique_ptr<PrefixStore> Open(const PrefixStoreOptions& options) {
    auto store = PrefixStore::Open(folder_, options);
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
    Load(*Open(), &loaded);
    return loaded;
  }
  static void Load(PrefixStore& store, std::vector<PageRecord>* loaded) {
    store.Load([&](PageRecord record) {
      loaded->push_back(std::move(record));
      return true;
    });
  }
  template <typename Fill, typename Free>
  void ExpectPagesComeAfterAFullDisk(const Fill& fill, const Free& free);
  fs::path PathOf(const PageRecord& record) const {
    return folder_ / fmt::format("{:016x}/{:016x}.page", key_, record.hash);
  }
  std::vector<fs::path> Files() const {
    std::vector<fs::path> files;
    for (const auto& entry : fs::recursive_directory_iterator(folder_)) {
      if (entry.is_regular_file() && entry.path().filename() != "lock") {
        files.push_back(entry.path());
      }
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
  store->Load([](const PageRecord&) { return true; });
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

size_t CountPages(const fs::path& folder) {
  size_t count = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    count += entry.path().extension() == ".page" ? 1 : 0;
  }
  return count;
}

// What a full disk leaves in the queue is written when there is space, without being asked. `fill`
// and `free` make the disk full and give its space back.
template <typename Fill, typename Free>
void PrefixStoreTest::ExpectPagesComeAfterAFullDisk(const Fill& fill, const Free& free) {
  const std::vector<PageRecord> chain = Chain(6);
  PrefixStoreOptions options = Options();
  options.retry_after = std::chrono::milliseconds(10);
  auto store = Open(options);
  ASSERT_TRUE(store->Put(chain[0]));
  store->Flush();
  fill();
  for (size_t i = 1; i < chain.size(); ++i) ASSERT_TRUE(store->Put(chain[i]));
  store->Flush();  // returns although nothing can be written
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(CountPages(folder_), 1u);
  EXPECT_EQ(warnings_.load(), 1);  // however often it was tried
  free();
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (CountPages(folder_) < 6 && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_EQ(CountPages(folder_), 6u);
  EXPECT_EQ(Files().size(), 6u);  // the attempts left no temporaries
}

// A real full file system, where the test may mount one.
TEST_F(PrefixStoreTest, PagesAreWrittenWhenADiskIsNoLongerFull) {
  fs::create_directories(folder_);
  if (::mount("tmpfs", folder_.c_str(), "tmpfs", 0, "size=256k") != 0) {
    GTEST_SKIP() << "only root may mount a small file system";
  }
  struct Unmount {
    ~Unmount() { ::umount2(folder.c_str(), MNT_DETACH); }
    fs::path folder;
  } unmount{folder_};
  const fs::path ballast = PathOf({}).parent_path() / "ballast.txt";
  ExpectPagesComeAfterAFullDisk(
      [&] { std::ofstream(ballast) << std::string(1 << 20, 'x') << std::flush; },
      [&] { fs::remove(ballast); });
}

// The same by the kernel's limit on the size of a file, which needs no rights.
TEST_F(PrefixStoreTest, PagesAreWrittenWhenALimitIsLifted) {
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  ExpectPagesComeAfterAFullDisk(
      [&] {
        const rlimit small{50, before.rlim_max};
        ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
      },
      [&] { ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0); });
}

// A full disk bounds what waits in memory, and does not hold up the end.
TEST_F(PrefixStoreTest, AFullDiskBoundsTheQueue) {
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  std::vector<PageRecord> chain = Chain(5);
  PrefixStoreOptions options = Options();
  options.retry_after = std::chrono::hours(1);
  auto store = Open(options);
  const rlimit small{50, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  for (PageRecord& record : chain) record.payload.resize(size_t{60} << 20);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(store->Wants(chain[i].hash, chain[i].payload.size()));
    EXPECT_TRUE(store->Put(std::move(chain[i])));
  }
  EXPECT_FALSE(store->Wants(chain[4].hash, chain[4].payload.size()));
  EXPECT_FALSE(store->Put(chain[4]));
  EXPECT_FALSE(store->Has(chain[4].hash));  // it may be offered again
  store.reset();
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_TRUE(Files().empty());
}

// Nothing that is named like a page makes the start wait, or read what is not a page.
TEST_F(PrefixStoreTest, OnlyRegularFilesAreOpened) {
  const std::vector<PageRecord> chain = Chain(5);
  {
    auto store = Open();
    ASSERT_TRUE(store->Put(chain[0]));
  }
  ASSERT_EQ(::mkfifo(PathOf(chain[1]).c_str(), 0600), 0);
  fs::create_symlink("/dev/zero", PathOf(chain[2]));
  fs::create_symlink(PathOf(chain[0]), PathOf(chain[3]));
  fs::create_directories(PathOf(chain[4]) / "inside");
  std::vector<PageRecord> loaded;
  auto store = Open();
  Load(*store, &loaded);
  EXPECT_EQ(loaded.size(), 1u);
  EXPECT_EQ(warnings_.load(), 4);
  // Pages take the place of all but the folder, which costs its page and those that continue it.
  for (const PageRecord& record : chain) EXPECT_TRUE(store->Put(record));
  store.reset();
  EXPECT_EQ(warnings_.load(), 5);
  EXPECT_TRUE(fs::is_directory(PathOf(chain[4]) / "inside"));
  for (size_t i = 1; i < 4; ++i) {
    EXPECT_NE(fs::symlink_status(PathOf(chain[i])).type(), fs::file_type::fifo);
    EXPECT_NE(fs::symlink_status(PathOf(chain[i])).type(), fs::file_type::symlink);
  }
}

TEST_F(PrefixStoreTest, AStrangeLockIsAnError) {
  fs::create_directories(folder_ / fmt::format("{:016x}", key_));
  const fs::path lock = folder_ / fmt::format("{:016x}/lock", key_);
  ASSERT_EQ(::mkfifo(lock.c_str(), 0600), 0);
  auto store = PrefixStore::Open(folder_, Options());
  ASSERT_FALSE(store.has_value());
  EXPECT_NE(store.error().message().find("not a regular file"), std::string::npos);
  fs::remove(lock);
  fs::create_symlink("/etc/passwd", lock);
  EXPECT_FALSE(PrefixStore::Open(folder_, Options()).has_value());
}

// Two servers on one folder: the second reads and does not write; when the first has ended, the
// folder is free, also where it was killed.
TEST_F(PrefixStoreTest, OneProcessWritesToAFolder) {
  const std::vector<PageRecord> chain = Chain(6);
  auto first = Open();
  EXPECT_FALSE(first->read_only());
  for (size_t i = 0; i < 3; ++i) ASSERT_TRUE(first->Put(chain[i]));
  first->Flush();
  {
    auto second = Open(/*max_bytes=*/10);  // nor does it delete anything
    EXPECT_TRUE(second->read_only());
    EXPECT_EQ(warnings_.load(), 1);
    std::vector<PageRecord> loaded;
    fs::rename(PathOf(chain[2]), folder_ / "elsewhere");  // as if the first had trimmed it
    Load(*second, &loaded);
    EXPECT_EQ(loaded.size(), 2u);
    EXPECT_EQ(warnings_.load(), 1);
    EXPECT_FALSE(second->Wants(chain[3].hash, 100));
    EXPECT_FALSE(second->Put(chain[3]));
    second->Flush();
  }
  // Another key is another folder.
  key_ = 78;
  EXPECT_FALSE(Open()->read_only());
  key_ = 77;
  first.reset();
  EXPECT_FALSE(Open()->read_only());

  const pid_t child = ::fork();
  if (child == 0) {
    const auto held = PrefixStore::Open(folder_, Options());
    ::kill(::getpid(), held.has_value() && !(*held)->read_only() ? SIGKILL : SIGTERM);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  EXPECT_FALSE(Open()->read_only());
}

// Whatever else lies in the folder does not cost a good page.
TEST_F(PrefixStoreTest, ForeignFilesDoNotDrivePagesOut) {
  const std::vector<PageRecord> chain = Chain(6);
  {
    auto store = Open();
    for (size_t i = 0; i < 4; ++i) ASSERT_TRUE(store->Put(chain[i]));
  }
  const fs::path notes = PathOf(chain[0]).parent_path() / "notes.txt";
  std::ofstream(notes) << std::string(10000, 'x');
  std::ofstream(PathOf(chain[4])) << std::string(10000, 'x');
  const fs::path torn = PathOf(chain[5]).string() + ".tmp.4711.3";
  std::ofstream(torn) << std::string(10000, 'x');
  // The header of a page and the size of a hundred.
  std::ofstream(PathOf(chain[5])) << std::ifstream(PathOf(chain[3])).rdbuf();
  fs::resize_file(PathOf(chain[5]), 10000);
  std::vector<PageRecord> loaded;
  auto store = Open(/*max_bytes=*/2500);
  Load(*store, &loaded);
  EXPECT_EQ(loaded.size(), 4u);
  EXPECT_TRUE(fs::exists(notes));              // not ours
  EXPECT_FALSE(fs::exists(PathOf(chain[4])));  // there was no room for it
  EXPECT_FALSE(fs::exists(PathOf(chain[5])));
  EXPECT_FALSE(fs::exists(torn));  // nobody will finish it
  // And afterwards there is room for what is new.
  ASSERT_TRUE(store->Put(chain[4]));
  store.reset();
  EXPECT_EQ(LoadAll().size(), 5u);
}

TEST_F(PrefixStoreTest, AnUnusableFolderIsAnError) {
  std::ofstream(folder_.string()) << "a file";
  EXPECT_FALSE(PrefixStore::Open(folder_, Options()).has_value());
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
  PrefixStoreOptions options = Options();
  options.format.open_bytes = config.open.bytes();
  options.format.sealed_bytes = config.sealed.bytes();
  {
    auto store = Open(options);
    PrefixIndex index(config, pool, false);
    index.AttachStore(store.get());
    index.Insert(key, cache, 1000, PrefixIndex::Keep::kAll);
  }
  auto store = Open(options);
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
    // A map in which K or V of one head has three bits.
    void RaiseSide(bool is_k) {
      KvPlanOptions made;
      const auto heads = static_cast<size_t>(changed.attention().num_kv_heads);
      made.sensitivities = SensitivityMap(static_cast<size_t>(changed.num_kv_layers()),
                                          std::vector<HeadSensitivity>(heads));
      HeadSensitivity& first = (*made.sensitivities)[0][0];
      (is_k ? first.k : first.v) = 1.0;
      const double sides = static_cast<double>(2 * heads * made.sensitivities->size());
      made.bits = 2.0 + 32.0 / std::min(changed.attention().head_dim, 128) + 1.0 / sides;
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
  model.RaiseSide(true);
  const uint64_t keys = PrefixStoreKey(model);
  model.RaiseSide(true);
  EXPECT_EQ(keys, PrefixStoreKey(model));
  model.RaiseSide(false);
  EXPECT_NE(keys, PrefixStoreKey(model));
}

}  // namespace
}  // namespace oscar
