#include "engine/page_budget.h"

#include <gtest/gtest.h>

#include "base/rng.h"
#include "engine/fake_model.h"

namespace oscar {
namespace {

// The most bytes in use after any pass of a real sequence, token by token and chunk by chunk.
uint64_t MeasuredPeak(FakeModel& model, int64_t prompt, int64_t total, int64_t chunk) {
  BlockPool pool(uint64_t{1} << 30);
  SequenceCache cache(model.kv().cache(), pool);
  const int64_t cell = model.kv().cache().cell;
  const auto tokens = FakeTokens(1, static_cast<size_t>(total));
  uint64_t peak = 0;
  while (cache.length() < total) {
    const int64_t at = cache.length();
    const bool is_prompt = at < prompt;
    const int64_t count = is_prompt ? std::min({chunk, prompt - at, cell - at % cell}) : 1;
    const ForwardItem item{
        &cache, std::span(tokens).subspan(static_cast<size_t>(at), static_cast<size_t>(count)),
        is_prompt, 0};
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
      BlockPool pool(config.open.bytes() * (6 + rng.Below(draw++, 20)));
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
