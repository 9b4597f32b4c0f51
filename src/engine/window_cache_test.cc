// Layers with a sliding window in the cache: sealed pages hold nothing of them, memory says so, and
// a prefix is found where what they see is kept.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "base/file.h"
#include "engine/engine_test_util.h"
#include "engine/generator.h"
#include "engine/loaded_model.h"
#include "engine/page_budget.h"
#include "engine/scheduler.h"
#include "engine/tiny_model.h"

namespace oscar {
namespace {

std::string Config() {
  auto json = nlohmann::json::parse(
      *ReadFile(OSCAR_TEST_DATA "/tiny-models/gpt_oss_mxfp4/config.json", 1 << 20));
  json["max_position_embeddings"] = 4096;
  return json.dump();
}

struct WindowModel {
  explicit WindowModel(const std::string& kv = "oscar+", uint64_t memory = uint64_t{1} << 28,
                       int recent = 64) {
    ModelOptions options;
    options.model = checkpoint.path();
    options.kv = kv;
    options.device = Device::kCpu;
    options.prefill_cell = 128;
    if (kv != "bf16") options.recent = recent;
    options.kv_memory = memory;
    options.num_threads = 2;
    auto made = LoadedModel::Load(options);
    EXPECT_TRUE(made.has_value()) << made.error().ToString();
    loaded = std::move(*made);
  }
  const CacheConfig& config() const { return loaded->kv().cache(); }

  TinyCheckpoint checkpoint{Config()};
  std::unique_ptr<LoadedModel> loaded;
};

std::vector<int32_t> Ids(size_t count, uint64_t seed) {
  const Philox rng(seed, 0);
  std::vector<int32_t> ids(count);
  for (size_t i = 0; i < count; ++i) ids[i] = 2 + static_cast<int32_t>(rng.Below(i, 150));
  return ids;
}

std::vector<int32_t> Join(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

EngineRequest Greedy(std::vector<int32_t> prompt, int64_t max_tokens) {
  EngineRequest request;
  request.prompt = std::move(prompt);
  request.max_tokens = max_tokens;
  request.sampling.temperature = 0.0f;
  return request;
}

TEST(WindowCache, SealedPagesHoldNothingOfWindowedLayers) {
  for (const char* kv : {"oscar+", "bf16", "kivi-sink"}) {
    WindowModel model(kv);
    const CacheConfig& config = model.config();
    EXPECT_EQ(config.window, 10);
    ASSERT_TRUE(config.seals());
    EXPECT_EQ(config.sealed.elements() * 3, config.open.elements());
    for (const int slot : {0, 2}) {
      EXPECT_FALSE(config.sealed.Holds(slot));
      EXPECT_EQ(config.sealed.LayerBytes(slot), 0u);
      EXPECT_EQ(model.loaded->kv().k(slot).kind, RotationKind::kNone);
      EXPECT_EQ(model.loaded->kv().v(slot).kind, RotationKind::kNone);
    }
    Generator generator(model.loaded->model(), model.loaded->pool());
    const std::vector<int32_t> ids = Ids(500, 1);
    ASSERT_TRUE(generator.Prefill(ids, 1, [](int64_t, std::span<const float>) {}).ok());
    for (int32_t token : Ids(100, 2)) ASSERT_TRUE(generator.Step(token).has_value());
    const CacheUsage usage = generator.cache().Usage();
    EXPECT_EQ(usage.tokens, 600u);
    EXPECT_GT(usage.sealed_pages, 2u);
    EXPECT_EQ(usage.bytes,
              usage.sealed_pages * config.sealed.bytes() + usage.open_pages * config.open.bytes());
    EXPECT_EQ(usage.bytes, model.loaded->pool().bytes_in_use());
    EXPECT_EQ(usage.bytes, SequenceCache::BytesFor(config, 600));
    const uint64_t rows = 600 - usage.sealed_pages * 64;  // that are open
    EXPECT_EQ(usage.bf16_bytes, 2 * (usage.sealed_pages * config.sealed.elements() +
                                     rows * config.open.elements() / 64));
    if (std::string_view(kv) == "bf16") {
      EXPECT_EQ(usage.bits_per_element, 16.0);
      EXPECT_EQ(model.loaded->kv().StoredBits(600), 16.0);
    }
    EXPECT_EQ(model.loaded->kv().StoredBytes(600),
              usage.sealed_pages * config.sealed.bytes() + rows * config.open.bytes() / 64);
    EXPECT_NEAR(model.loaded->kv().StoredBits(600), usage.bits_per_element, 1e-9);
  }
}

TEST(WindowCache, TrimGoesBackToWhereTheWindowIsOpen) {
  WindowModel model;
  Generator generator(model.loaded->model(), model.loaded->pool());
  const std::vector<int32_t> ids = Ids(600, 1);
  ASSERT_TRUE(generator.Prefill(ids, 1, [](int64_t, std::span<const float>) {}).ok());
  SequenceCache cache = generator.cache().Fork();
  const int64_t open = cache.sealed_end() * kPageTokens;
  ASSERT_GT(open, 64);
  EXPECT_EQ(cache.Trim(open + 9), open + 9);  // the nine before it and itself
  EXPECT_EQ(cache.Trim(open + 8), 64);        // of the sink alone
  cache = generator.cache().Fork();
  EXPECT_EQ(cache.Trim(open), 64);
  cache = generator.cache().Fork();
  EXPECT_EQ(cache.Trim(70), 64);
  EXPECT_EQ(cache.Trim(50), 50);
  // And what follows is what it would have been.
  for (const size_t length : {static_cast<size_t>(open) + 20, size_t{300}}) {
    std::vector<int32_t> other(ids.begin(), ids.begin() + static_cast<ptrdiff_t>(length));
    other = Join(other, Ids(60, 9));
    std::vector<std::vector<float>> logits;
    for (const bool reuses : {true, false}) {
      Generator fresh(model.loaded->model(), model.loaded->pool());
      Generator& one = reuses ? generator : fresh;
      logits.emplace_back();
      ASSERT_TRUE(one.Prefill(other, 1,
                              [&](int64_t, std::span<const float> part) {
                                logits.back().assign(part.begin(), part.end());
                              })
                      .ok());
    }
    if (length == 300) {
      EXPECT_EQ(logits[0], logits[1]);
    }
  }
}

// The next turn computes what is new; so does a text that diverges from an earlier one, from the
// second time on.
TEST(WindowCache, PrefixesAreFoundWhereTheWindowIsKept) {
  const std::vector<int32_t> system = Ids(330, 3);  // five pages and a little
  const auto folder =
      std::filesystem::path(testing::TempDir()) / ("oscar_window_" + std::to_string(::getpid()));
  std::vector<int32_t> answer;
  for (const bool restarted : {false, true}) {
    WindowModel model;
    EngineServiceOptions options;
    options.prefix_dir = folder;
    auto service = MakeEngineService(model.loaded->model(), model.loaded->pool(),
                                     model.loaded->threads(), options);
    const auto ask = [&](const std::vector<int32_t>& prompt, int64_t count) {
      const Answer got = Collect(**service->Submit(Greedy(prompt, count)));
      EXPECT_TRUE(got.finished) << got.status.ToString();
      return got;
    };
    if (restarted) {
      // From the folder: both the end of a turn, to the last whole page, and where texts diverge.
      EXPECT_GE(ask(Join(system, Ids(100, 14)), 2).cached_tokens, 320);
      const Answer next = ask(Join(Join(system, Ids(100, 4)), answer), 2);
      EXPECT_EQ(next.cached_tokens, (330 + 100 + 90 - 1) / 64 * 64);
      continue;
    }
    const std::vector<int32_t> first = Join(system, Ids(100, 4));
    const Answer one = ask(first, 90);
    EXPECT_EQ(one.cached_tokens, 0);
    answer = one.tokens;
    // The next turn: all but the last sampled token.
    const std::vector<int32_t> turn = Join(Join(first, answer), Ids(30, 5));
    EXPECT_EQ(ask(turn, 5).cached_tokens, 330 + 100 + 90 - 1);
    // Again from the same place, another way.
    EXPECT_GE(ask(Join(Join(first, answer), Ids(30, 6)), 5).cached_tokens, 330 + 100 + 90 - 1);
    // Texts that diverge in the middle: the sink, and from then on all that is shared.
    EXPECT_LE(ask(Join(system, Ids(100, 11)), 5).cached_tokens, 64);
    for (const uint64_t seed : {12, 13}) {
      const int64_t cached = ask(Join(system, Ids(100, seed)), 5).cached_tokens;
      EXPECT_GE(cached, 320);
      EXPECT_LE(cached, 331);  // rows of a page that the one before left open
    }
  }
  std::filesystem::remove_all(folder);
}

// Pages that were open where a sequence ended, between the sealed ones and what windows see.
TEST(WindowCache, OpenPagesSurviveARestart) {
  const auto folder = std::filesystem::path(testing::TempDir()) /
                      ("oscar_window_open_" + std::to_string(::getpid()));
  const std::vector<int32_t> prompt = Ids(430, 3);
  std::vector<int32_t> next;
  for (const bool restarted : {false, true}) {
    WindowModel model("oscar+", uint64_t{1} << 28, /*recent=*/192);
    EngineServiceOptions options;
    options.prefix_dir = folder;
    auto service = MakeEngineService(model.loaded->model(), model.loaded->pool(),
                                     model.loaded->threads(), options);
    const Answer answer = Collect(**service->Submit(Greedy(restarted ? next : prompt, 90)));
    ASSERT_TRUE(answer.finished) << answer.status.ToString();
    EXPECT_EQ(answer.cached_tokens, restarted ? 512 : 0);
    next = Join(Join(prompt, answer.tokens), Ids(20, 4));
  }
  std::filesystem::remove_all(folder);
}

// Of several at once that share a prompt, one computes it.
TEST(WindowCache, RequestsAtOnceShareTheirPrompt) {
  WindowModel model;
  EngineServiceOptions options;
  options.step_tokens = 64;
  // Without a service, so that all of them are there before the first step.
  Scheduler scheduler(model.loaded->model(), model.loaded->pool(), model.loaded->threads(),
                      options);
  constexpr int64_t kAnswer = 20;
  std::vector<std::shared_ptr<EventChannel>> channels;
  for (int i = 0; i < 3; ++i) {
    channels.push_back(std::make_shared<EventChannel>(kAnswer));
    scheduler.Enqueue(std::make_unique<Sequence>(Greedy(Ids(400, 3), kAnswer), channels.back(),
                                                 kAnswer, model.config(), model.loaded->pool()));
  }
  while (!scheduler.idle()) ASSERT_TRUE(scheduler.Step().ok());
  for (int i = 0; i < 3; ++i) {
    const EngineEvent started =
        channels[static_cast<size_t>(i)]->Next(std::chrono::milliseconds(1));
    ASSERT_EQ(started.kind, EngineEvent::Kind::kStarted);
    EXPECT_EQ(started.cached_tokens, i == 0 ? 0 : 384);
  }
}

// Little memory changes no answer, and the budget holds.
TEST(WindowCache, ATightPoolGivesTheSameAnswers) {
  for (const bool deterministic : {true, false}) {
    std::vector<std::vector<int32_t>> expected;
    for (const bool tight : {false, true}) {
      WindowModel plan;
      const uint64_t budget =
          tight ? PeakBytes(plan.config(), 201, 301) + 2 * plan.config().open.bytes()
                : uint64_t{1} << 28;
      WindowModel model("oscar+", budget);
      EngineServiceOptions options;
      options.prefix_cache = deterministic;  // hits that are not exact may change an answer
      options.deterministic = deterministic;
      auto service = MakeEngineService(model.loaded->model(), model.loaded->pool(),
                                       model.loaded->threads(), options);
      std::vector<std::unique_ptr<RequestHandle>> handles;
      for (uint64_t i = 0; i < 6; ++i) {
        handles.push_back(*service->Submit(Greedy(Ids(i < 5 ? 40 + 10 * i : 200, i), 90)));
      }
      for (size_t i = 0; i < handles.size(); ++i) {
        const Answer answer = Collect(*handles[i]);
        EXPECT_TRUE(answer.finished) << answer.status.ToString();
        if (!tight) {
          expected.push_back(answer.tokens);
        } else {
          EXPECT_EQ(answer.tokens, expected[i]) << i;
        }
      }
      EXPECT_LE(model.loaded->pool().peak_bytes(), budget);
    }
  }
}

// A cell that goes through one layer after the other gives the same tokens.
TEST(WindowCache, ReadingByLayerIsTheSame) {
  const TinyCheckpoint checkpoint(Config());
  KvPlanOptions kv;
  kv.recent = 64;
  kv.prefill_cell = 1024;
  TinyModel roomy(checkpoint.path(), kv);
  ASSERT_TRUE(roomy.status.ok()) << roomy.status.ToString();
  const CacheConfig& config = roomy.plan->cache();
  const std::vector<int32_t> ids = Ids(1500, 5);
  const uint64_t peak = PeakBytes(config, 1500, 1520, Reading::kByLayer);
  ASSERT_LT(peak, PeakBytes(config, 1500, 1520));
  TinyModel tight(checkpoint.path(), kv, 2, {}, false, peak);
  auto service = MakeEngineService(*tight.model, *tight.pool, tight.threads, {});
  const Answer answer = Collect(**service->Submit(Greedy(ids, 20)));
  EXPECT_TRUE(answer.finished) << answer.status.ToString();
  EXPECT_EQ(answer.tokens, roomy.Greedy(ids, 20));
  EXPECT_LE(tight.pool->peak_bytes(), peak);
  EXPECT_TRUE(Eventually([&] { return service->Stats().cells_by_layer == 2; }));
}

// A rotation for the layers that quantise, with gaps in its ids, and one for all of them.
TEST(WindowCache, RotationsMayHaveGaps) {
  WindowModel model;
  for (const std::vector<int>& ids : {std::vector<int>{1}, {0, 1, 2}}) {
    KvPlanOptions options;
    options.method = "oscar";
    options.rotation = *MakeDataFreeRotation("hadamard", ids, 64);
    const auto plan = KvPlan::Make(model.loaded->spec(), options, EncodeBlocks);
    ASSERT_TRUE(plan.has_value()) << plan.error().ToString();
    EXPECT_EQ((*plan)->k(0).kind, RotationKind::kNone);
    EXPECT_EQ((*plan)->k(1).kind, RotationKind::kCalibrated);
  }
  KvPlanOptions missing;
  missing.method = "oscar";
  missing.rotation = *MakeDataFreeRotation("hadamard", std::vector<int>{0, 2}, 64);
  EXPECT_FALSE(KvPlan::Make(model.loaded->spec(), missing, EncodeBlocks).has_value());
  // A recent window that is shorter than what a layer sees would lose some of it.
  KvPlanOptions narrow;
  narrow.recent = 0;
  const auto refused = KvPlan::Make(model.loaded->spec(), narrow, EncodeBlocks);
  ASSERT_FALSE(refused.has_value());
  EXPECT_NE(refused.error().message().find("sliding window"), std::string::npos);
}

}  // namespace
}  // namespace oscar
