#include "engine/page_budget.h"

#include <gtest/gtest.h>

#include <cstring>

#include "base/rng.h"
#include "engine/fake_model.h"
#include "engine/prompt_reader.h"

namespace oscar {
namespace {

// The most bytes in use after any pass of a real sequence, token by token and chunk by chunk.
uint64_t MeasuredPeak(FakeModel& model, int64_t prompt, int64_t total, int64_t chunk) {
  PagePool pool(uint64_t{1} << 30, model.kv().host_sealer());
  SequenceCache cache(model.kv().cache(), pool);
  const auto ids = FakeTokens(1, static_cast<size_t>(total));
  const std::span<const int32_t> tokens = ids;
  uint64_t peak = 0;
  while (cache.length() < total) {
    const auto at = static_cast<size_t>(cache.length());
    const ForwardItem item =
        cache.length() < prompt ? NextChunk(cache, tokens.first(static_cast<size_t>(prompt)), chunk)
                                : ForwardItem{&cache, tokens.subspan(at, 1), false, 0};
    EXPECT_TRUE(model.Forward({&item, 1}, {}).ok());
    peak = std::max(peak, pool.bytes_in_use());
  }
  return peak;
}

TEST(PageBudget, PeakIsExactlyWhatASequenceHolds) {
  ThreadPool threads(1);
  for (const char* method : {"oscar+", "bf16", "kivi-sink"}) {
    FakeModel::Options options;
    options.method = method;
    FakeModel model(options, threads);
    const Philox rng(3, 0);
    for (uint64_t i = 0; i < 30; ++i) {
      const int64_t prompt = 1 + rng.Below(2 * i, 900);
      const int64_t total = prompt + rng.Below(2 * i + 1, 300);
      EXPECT_EQ(PeakBytes(model.kv().cache(), prompt, total),
                MeasuredPeak(model, prompt, total, 1 + rng.Below(i, 500)))
          << method << " " << prompt << " of " << total;
    }
  }
}

uint64_t MeasuredPeakByLayer(FakeModel& model, int64_t prompt, int64_t total) {
  PagePool pool(uint64_t{1} << 30, model.kv().host_sealer());
  model.pool_of_cells = &pool;
  SequenceCache cache(model.kv().cache(), pool);
  const auto tokens = FakeTokens(1, static_cast<size_t>(total));
  uint64_t peak = 0;
  while (cache.length() < prompt) {
    const auto whole = std::span(tokens).first(static_cast<size_t>(prompt));
    auto read = model.StartCell(cache, NextChunk(cache, whole, prompt).tokens);
    EXPECT_TRUE(read.has_value());
    peak = std::max(peak, pool.bytes_in_use());
    while (!*model.ContinueCell(**read, 100, {})) {
    }
  }
  while (cache.length() < total) {
    const ForwardItem item{
        &cache, std::span(tokens).subspan(static_cast<size_t>(cache.length()), 1), false, 0};
    EXPECT_TRUE(model.Forward({&item, 1}, {}).ok());
    peak = std::max(peak, pool.bytes_in_use());
  }
  return peak;
}

TEST(PageBudget, PeakByLayerIsExactlyWhatASequenceHolds) {
  ThreadPool threads(1);
  for (const char* method : {"oscar+", "bf16", "kivi-sink"}) {
    FakeModel::Options options;
    options.method = method;
    FakeModel model(options, threads);
    const Philox rng(4, 0);
    for (uint64_t i = 0; i < 20; ++i) {
      const int64_t prompt = 1 + rng.Below(2 * i, 900);
      const int64_t total = prompt + rng.Below(2 * i + 1, 200);
      EXPECT_EQ(PeakBytes(model.kv().cache(), prompt, total, Reading::kByLayer),
                MeasuredPeakByLayer(model, prompt, total))
          << method << " " << prompt << " of " << total;
    }
  }
}

// The cache a prompt leaves behind is the same, page for page and byte for byte.
TEST(PageBudget, ReadingByLayerLeavesTheSamePages) {
  ThreadPool threads(1);
  for (const char* method : {"oscar+", "kivi-sink"}) {
    FakeModel::Options options;
    options.method = method;
    FakeModel model(options, threads);
    PagePool pool(uint64_t{1} << 30, model.kv().host_sealer());
    model.pool_of_cells = &pool;
    const CacheConfig& config = model.kv().cache();
    const auto tokens = FakeTokens(9, 1000);
    const Philox rng(6, 0);
    for (uint64_t round = 0; round < 12; ++round) {
      SequenceCache chunked(config, pool), layered(config, pool);
      std::vector<SequenceCache> forks;
      const int64_t prompt = 1 + rng.Below(round, 900);
      for (uint64_t step = 0; chunked.length() < prompt; ++step) {
        // By layer to the cell's end, from anywhere in it, a shared page included.
        const bool by_layer = rng.Below(100 * round + step, 2) == 0;
        const auto whole = std::span(tokens).first(static_cast<size_t>(prompt));
        const ForwardItem item = NextChunk(chunked, whole, by_layer ? prompt : 90);
        const auto span = item.tokens;
        ASSERT_TRUE(model.Forward({&item, 1}, {}).ok());
        if (by_layer) {
          forks.push_back(layered.Fork());
          auto read = model.StartCell(layered, span);
          ASSERT_TRUE(read.has_value());
          while (!*model.ContinueCell(**read, 77, {})) {
          }
        } else {
          const ForwardItem same{&layered, span, true, 0};
          ASSERT_TRUE(model.Forward({&same, 1}, {}).ok());
        }
      }
      ASSERT_TRUE(chunked.SealForGeneration(threads).ok());
      ASSERT_TRUE(layered.SealForGeneration(threads).ok());
      ASSERT_EQ(chunked.num_pages(), layered.num_pages());
      for (int64_t j = 0; j < chunked.num_pages(); ++j) {
        ASSERT_EQ(chunked.is_sealed(j), layered.is_sealed(j)) << method << " page " << j;
        const int64_t rows = std::min<int64_t>(kPageTokens, prompt - j * kPageTokens);
        for (int layer = 0; layer < FakeModel::kLayers; ++layer) {
          const size_t bytes = chunked.is_sealed(j) ? 512 : static_cast<size_t>(rows) * 128;
          EXPECT_EQ(0, std::memcmp(chunked.page(j).Block(layer, 0).data(),
                                   layered.page(j).Block(layer, 0).data(), bytes))
              << method << " page " << j << " layer " << layer;
        }
      }
    }
  }
}

// The bar: where BF16 holds four conversations of 14,000 tokens, INT2 holds 24, the last one being
// read. The demo model's shape.
TEST(PageBudget, TwentyFourConversationsWhereBf16HoldsFour) {
  ModelSpec spec;
  spec.vocab_size = 16;
  AttentionSpec attention;
  attention.num_heads = 8;
  attention.num_kv_heads = 2;
  attention.head_dim = 128;
  SetLayers({attention, DenseSpec{}}, 8, &spec);
  spec.max_positions = 32768;
  KvPlanOptions options;
  const auto int2 = KvPlan::Make(spec, options, FakeEncodePage);
  options.method = "bf16";
  const auto bf16 = KvPlan::Make(spec, options, FakeEncodePage);
  ASSERT_TRUE(int2.has_value() && bf16.has_value());
  const uint64_t budget = uint64_t{4} * 14000 * 2 * 2 * 2 * 128 * 8;  // 16 bits per element
  EXPECT_EQ(Conversations((*bf16)->cache(), 14000, budget, Reading::kByChunk), 3);  // whole pages
  EXPECT_EQ(Conversations((*bf16)->cache(), 13952, budget, Reading::kByChunk), 4);
  EXPECT_EQ(Conversations((*int2)->cache(), 14000, budget, Reading::kByChunk), 22);
  EXPECT_EQ(Conversations((*int2)->cache(), 14000, budget, Reading::kByLayer), 24);
}

TEST(PageBudget, LargestTotalIsTheLargest) {
  ThreadPool threads(1);
  FakeModel model({}, threads);
  const CacheConfig& config = model.kv().cache();
  for (int64_t prompt : {1, 64, 100, 256, 300, 700}) {
    for (uint64_t pages = 1; pages < 16; ++pages) {
      const uint64_t budget = pages * config.open.bytes();
      const int64_t total = LargestTotal(config, prompt, 2000, budget);
      if (total >= prompt) {
        EXPECT_LE(PeakBytes(config, prompt, total), budget);
        if (total < 2000) {
          EXPECT_GT(PeakBytes(config, prompt, total + 1), budget);
        }
      } else {
        EXPECT_GT(PeakBytes(config, prompt, prompt), budget);
      }
    }
  }
}

// What appending announces is what it takes, at any budget, shared or not.
TEST(PageBudget, CostOfAppendingIsNeverTooLittle) {
  ThreadPool threads(1);
  for (const char* method : {"oscar+", "kivi-sink"}) {
    FakeModel::Options options;
    options.method = method;
    FakeModel model(options, threads);
    const CacheConfig& config = model.kv().cache();
    const Philox rng(5, 0);
    uint64_t draw = 0;
    int refused = 0;
    for (int round = 0; round < 60; ++round) {
      PagePool pool(config.open.bytes() * (6 + rng.Below(draw++, 20)), model.kv().host_sealer());
      SequenceCache cache(config, pool);
      std::vector<SequenceCache> forks;
      const int64_t prompt = 1 + rng.Below(draw++, 1000);
      const auto tokens = FakeTokens(7, 2000);
      while (cache.length() < 1500) {
        const int64_t at = cache.length();
        const bool is_prompt = at < prompt;
        const int64_t count =
            is_prompt ? std::min<int64_t>({1 + rng.Below(draw++, 200), prompt - at, 256 - at % 256})
                      : 1;
        if (rng.Below(draw++, 8) == 0) forks.push_back(cache.Fork());
        if (rng.Below(draw++, 8) == 0) forks.clear();
        const AppendCost cost = cache.CostOf(count, is_prompt);
        const int64_t needed = std::max(cost.seal_peak, cost.seal_net + cost.reserve);
        const uint64_t before = pool.bytes_in_use();
        const bool fits = needed <= 0 || pool.CanAllocate(static_cast<uint64_t>(needed));
        const ForwardItem item{
            &cache, std::span(tokens).subspan(static_cast<size_t>(at), static_cast<size_t>(count)),
            is_prompt, 0};
        const bool done = model.Forward({&item, 1}, {}).ok();
        EXPECT_EQ(done, fits) << method << " at " << at << " + " << count;
        if (!done) {
          ++refused;
          break;
        }
        EXPECT_EQ(static_cast<int64_t>(pool.bytes_in_use()),
                  static_cast<int64_t>(before) + cost.seal_net + cost.reserve);
      }
      EXPECT_LE(pool.peak_bytes(), pool.budget());
    }
    EXPECT_GT(refused, 5);
  }
}

}  // namespace
}  // namespace oscar
