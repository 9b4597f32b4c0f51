// Models with a recurrent state: the state is part of a sequence wherever its pages are. Tiny
// checkpoints of every hybrid family, cells of 128 tokens so that a few hundred have many.
#include <gtest/gtest.h>

#include <cmath>

#include "engine/engine_test_util.h"
#include "engine/page_budget.h"
#include "engine/tiny_model.h"

namespace oscar {
namespace {

class HybridTest : public testing::TestWithParam<const char*> {
 protected:
  const TinyCheckpoint checkpoint_{ConfigOf(GetParam())};
};

EngineRequest Greedy(std::vector<int32_t> prompt, int64_t max_tokens) {
  EngineRequest request;
  request.prompt = std::move(prompt);
  request.max_tokens = max_tokens;
  request.sampling.temperature = 0.0f;
  return request;
}

std::vector<int32_t> Joined(std::vector<int32_t> first, const std::vector<int32_t>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

std::vector<int32_t> FirstOf(const std::vector<int32_t>& ids, size_t count) {
  return {ids.begin(), ids.begin() + static_cast<ptrdiff_t>(count)};
}

// A prompt goes through the rule in chunks, token by token through its recurrent form; the chunks
// end where the passes do.
TEST_P(HybridTest, ChunkedFormIsTheRecurrentOne) {
  TinyModel tiny(checkpoint_.path(), TinyModel::Bf16(), 1, {}, /*is_reference=*/true);
  ASSERT_TRUE(tiny.status.ok()) << tiny.status.ToString();
  const std::vector<int32_t> ids = SomeIds(90);
  const std::vector<float> chunked = tiny.Logits(ids), recurrent = tiny.Logits(ids, 1),
                           cut = tiny.Logits(ids, 37);
  double largest = 0.0;
  for (size_t i = 0; i < chunked.size(); ++i) {
    largest = std::max(largest, std::fabs(static_cast<double>(chunked[i]) - recurrent[i]));
    largest = std::max(largest, std::fabs(static_cast<double>(chunked[i]) - cut[i]));
  }
  EXPECT_LE(largest, 1e-4);
}

// Two conversations with one beginning, in one batch: each as if it were alone.
TEST_P(HybridTest, ForksAreIndependent) {
  TinyModel tiny(checkpoint_.path(), SmallWindows());
  const std::vector<int32_t> ids = SomeIds(70);
  const auto vocab = static_cast<size_t>(tiny.spec.vocab_size);
  const auto read = [&](SequenceCache& cache, std::span<const int32_t> tokens) {
    std::vector<float> logits(vocab);
    const ForwardItem item{&cache, tokens, /*is_prompt=*/true, 1};
    EXPECT_TRUE(tiny.model->Forward({&item, 1}, logits).ok());
    return logits;
  };
  const auto steps = [&](std::vector<SequenceCache*> caches, std::vector<int32_t> tokens) {
    std::vector<float> logits(caches.size() * vocab);
    for (int round = 0; round < 5; ++round) {
      std::vector<ForwardItem> items;
      for (size_t i = 0; i < caches.size(); ++i)
        items.push_back({caches[i], {&tokens[i], 1}, false, 1});
      EXPECT_TRUE(tiny.model->Forward(items, logits).ok());
      for (int32_t& token : tokens) token = 2 + (token * 7 + round) % 150;
    }
    return logits;
  };
  SequenceCache first(tiny.plan->cache(), *tiny.pool);
  read(first, ids);
  {
    SequenceCache second = first.Fork();
    EXPECT_EQ(first.state().data(), second.state().data());
    const std::vector<float> both = steps({&first, &second}, {11, 99});
    EXPECT_NE(first.state().data(), second.state().data());
    for (const auto& [index, token] : {std::pair<size_t, int32_t>{0, 11}, {1, 99}}) {
      SequenceCache alone(tiny.plan->cache(), *tiny.pool);
      read(alone, ids);
      const std::vector<float> expected = steps({&alone}, {token});
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(),
                             both.begin() + static_cast<ptrdiff_t>(index * vocab)));
    }
  }
  first.Trim(0);
  EXPECT_EQ(tiny.pool->bytes_in_use(), 0u);
}

// A state cannot lose tokens: a sequence goes back to a snapshot, or to nothing.
TEST_P(HybridTest, TrimGoesBackToASnapshot) {
  TinyModel tiny(checkpoint_.path(), TinyModel::Bf16());
  const std::vector<int32_t> ids = SomeIds(100);
  const auto vocab = static_cast<size_t>(tiny.spec.vocab_size);
  SequenceCache cache(tiny.plan->cache(), *tiny.pool);
  const auto read = [&](size_t from, size_t to) {
    std::vector<float> logits(vocab);
    const ForwardItem item{&cache, std::span(ids).subspan(from, to - from), true, 1};
    EXPECT_TRUE(tiny.model->Forward({&item, 1}, logits).ok());
    return logits;
  };
  read(0, 40);
  cache.KeepSnapshot();
  const uint64_t state = tiny.plan->cache().state.bytes();
  EXPECT_EQ(cache.Usage().state_bytes, state);  // it is the state itself
  const std::vector<float> expected = read(40, 100);
  EXPECT_EQ(cache.Usage().state_bytes, 2 * state);
  EXPECT_EQ(cache.Usage().bytes, tiny.pool->bytes_in_use());
  EXPECT_EQ(cache.Trim(100), 100);
  EXPECT_EQ(cache.Trim(99), 40);
  EXPECT_EQ(read(40, 100), expected);
  EXPECT_EQ(cache.Trim(39), 0);
  EXPECT_EQ(tiny.pool->bytes_in_use(), 0u);
  read(0, 40);
  EXPECT_EQ(read(40, 100), expected);
}

TEST_P(HybridTest, TheStateCountsAgainstTheBudget) {
  TinyModel tiny(checkpoint_.path(), SmallWindows());
  const CacheConfig& config = tiny.plan->cache();
  const LinearAttentionSpec& linear = *tiny.spec.linear_attention();
  EXPECT_EQ(config.state.bytes(),
            static_cast<size_t>(tiny.spec.num_state_layers()) * linear.state_bytes());
  CacheConfig without = config;
  without.state = PageLayout::OfBytes(0);
  EXPECT_EQ(PeakBytes(config, 300, 400), PeakBytes(without, 300, 400) + config.state.bytes());
  EXPECT_EQ(SequenceCache::BytesFor(config, 400),
            SequenceCache::BytesFor(without, 400) + config.state.bytes());
  // Just enough, and a byte less.
  for (const uint64_t less : {0, 1}) {
    TinyModel tight(checkpoint_.path(), SmallWindows(), 2, {}, false,
                    PeakBytes(config, 300, 300) - less);
    Generator generator(*tight.model, *tight.pool);
    const Status read = generator.Prefill(SomeIds(300), 1, [](int64_t, std::span<const float>) {});
    EXPECT_EQ(read.ok(), less == 0) << read.ToString();
  }
  EXPECT_FALSE(tiny.model->CanReadByLayer());
}

// `oscar chat` with a template that rewrites the last answer: what lies before it is not read
// again.
TEST_P(HybridTest, AGeneratorGoesBackToThePromptsLastWholePage) {
  TinyModel tiny(checkpoint_.path(), SmallWindows());
  Generator generator(*tiny.model, *tiny.pool);
  GenerateRequest request;
  request.prompt = SomeIds(150);
  request.sampling.temperature = 0.0f;
  request.max_tokens = 20;
  ASSERT_TRUE(generator.Generate(request).has_value());
  request.prompt = Joined(FirstOf(request.prompt, 140), SomeIds(30, 8));
  const auto second = generator.Generate(request);
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(second->reused_tokens, 128);
  EXPECT_EQ(second->tokens, tiny.Greedy(request.prompt, 20));
}

// The next turn of a chat computes its new tokens and the one that was never computed, and answers
// as if the conversation had not been interrupted.
TEST_P(HybridTest, AFollowUpComputesOnlyWhatIsNew) {
  TinyModel tiny(checkpoint_.path(), SmallWindows()), other(checkpoint_.path(), SmallWindows());
  auto service = MakeEngineService(*tiny.model, *tiny.pool, tiny.threads, {});
  Generator uninterrupted(*other.model, *other.pool);
  std::vector<int32_t> history;
  uint64_t computed = 0;
  for (const size_t turn : {size_t{300}, size_t{50}, size_t{1}, size_t{40}}) {
    const size_t known = history.size();
    history = Joined(history, SomeIds(turn, turn));
    const Answer answer = Collect(**service->Submit(Greedy(history, 30)));
    ASSERT_TRUE(answer.finished) << answer.status.ToString();
    EXPECT_EQ(answer.cached_tokens, known == 0 ? 0 : static_cast<int64_t>(known) - 1);
    GenerateRequest request;
    request.prompt = history;
    request.sampling.temperature = 0.0f;
    request.max_tokens = 30;
    EXPECT_EQ(answer.tokens, uninterrupted.Generate(request)->tokens) << turn;
    // Figures are published when the step is over, which is after its answer.
    ASSERT_TRUE(Eventually([&] { return service->Stats().running == 0; }));
    const uint64_t sum = service->Stats().batch_tokens.sum;
    EXPECT_EQ(sum - computed, turn + answer.tokens.size() - 1 + (known == 0 ? 0 : 1)) << turn;
    computed = sum;
    history = Joined(history, answer.tokens);
  }
  const EngineStats stats = service->Stats();
  EXPECT_EQ(stats.state_bytes, 0u);  // nothing runs
  EXPECT_GT(stats.snapshot_bytes, 0u);
  EXPECT_EQ(stats.snapshot_bytes % tiny.plan->cache().state.bytes(), 0u);
  EXPECT_LE(stats.snapshot_bytes, tiny.pool->budget() / 4);
}

// Where a prompt leaves what is stored, it is read from the newest snapshot before that on. With
// `deterministic`, its answer is the one it has alone.
TEST_P(HybridTest, AHitEndsAtASnapshot) {
  TinyModel tiny(checkpoint_.path(), SmallWindows()), alone(checkpoint_.path(), SmallWindows());
  EngineServiceOptions options;
  options.deterministic = true;
  auto service = MakeEngineService(*tiny.model, *tiny.pool, tiny.threads, options);
  const std::vector<int32_t> base = SomeIds(400);
  const auto ask = [&](const std::vector<int32_t>& prompt) {
    const Answer answer = Collect(**service->Submit(Greedy(prompt, 20)));
    EXPECT_EQ(answer.tokens, alone.Greedy(prompt, 20));
    return answer.cached_tokens;
  };
  EXPECT_EQ(ask(base), 0);
  EXPECT_EQ(ask(base), 384);  // the last whole page
  EXPECT_EQ(ask(Joined(FirstOf(base, 390), SomeIds(40, 6))), 384);
  EXPECT_EQ(ask(Joined(FirstOf(base, 383), SomeIds(40, 7))), 256);  // the last cell
  // It left where there was no snapshot, and left one there.
  EXPECT_EQ(ask(Joined(FirstOf(base, 350), SomeIds(40, 8))), 320);
  EXPECT_EQ(ask(Joined(FirstOf(base, 100), SomeIds(40, 9))), 0);
  EXPECT_EQ(ask(Joined(FirstOf(base, 100), SomeIds(40, 10))), 64);
}

// Where a pass has room for a page, chunks end with pages, though it has room for more: devices
// take them in tiles. The rest of a prompt is one chunk.
TEST_P(HybridTest, ChunksEndWithPages) {
  TinyModel tiny(checkpoint_.path(), SmallWindows());
  EngineServiceOptions options;
  options.step_tokens = 100;
  options.prefix_cache = false;
  auto service = MakeEngineService(*tiny.model, *tiny.pool, tiny.threads, options);
  const Answer answer = Collect(**service->Submit(Greedy(SomeIds(64 * 3 + 70), 1)));
  ASSERT_TRUE(answer.finished) << answer.status.ToString();
  ASSERT_TRUE(Eventually([&] { return service->Stats().running == 0; }));
  const BatchHistogram passes = service->Stats().batch_tokens;
  // 64 each, but for the last one.
  uint64_t up_to_64 = 0, all = 0;
  for (size_t i = 0; i < passes.counts.size(); ++i) {
    all += passes.counts[i];
    if (i <= 6) up_to_64 += passes.counts[i];  // 2^6
  }
  EXPECT_EQ(all, 5u);
  EXPECT_EQ(up_to_64, 5u);
}

TEST_P(HybridTest, SnapshotsHaveABudget) {
  TinyModel tiny(checkpoint_.path(), SmallWindows());
  const uint64_t state = tiny.plan->cache().state.bytes();
  const std::vector<int32_t> ids = SomeIds(400);
  std::vector<int32_t> expected;
  for (const uint64_t states : {0, 1, 3}) {
    EngineServiceOptions options;
    options.snapshot_bytes = states * state + state / 2;
    auto service = MakeEngineService(*tiny.model, *tiny.pool, tiny.threads, options);
    const Answer first = Collect(**service->Submit(Greedy(ids, 20)));
    if (expected.empty()) expected = first.tokens;
    EXPECT_EQ(first.tokens, expected);
    const Answer next =
        Collect(**service->Submit(Greedy(Joined(Joined(ids, first.tokens), SomeIds(5)), 20)));
    EXPECT_EQ(next.cached_tokens, states == 0 ? 0 : 419);
    // The newest stay.
    EXPECT_TRUE(Eventually([&] { return service->Stats().running == 0; }));
    EXPECT_EQ(service->Stats().snapshot_bytes, states * state);
  }
}

// As many snapshots as there are bytes, and no room for the next sequence but theirs.
TEST_P(HybridTest, SnapshotsGiveWay) {
  TinyModel alone(checkpoint_.path(), SmallWindows());
  const CacheConfig& config = alone.plan->cache();
  const uint64_t budget = PeakBytes(config, 300, 340);
  TinyModel tiny(checkpoint_.path(), SmallWindows(), 2, {}, false, budget);
  EngineServiceOptions options;
  options.snapshot_bytes = budget;
  auto service = MakeEngineService(*tiny.model, *tiny.pool, tiny.threads, options);
  for (uint64_t i = 0; i < 6; ++i) {
    const std::vector<int32_t> prompt = SomeIds(i % 2 == 0 ? 300 : 180, i);
    const Answer answer = Collect(**service->Submit(Greedy(prompt, 40)));
    ASSERT_TRUE(answer.finished) << answer.status.ToString();
    EXPECT_EQ(answer.tokens, alone.Greedy(prompt, 40)) << i;
  }
  EXPECT_LE(tiny.pool->peak_bytes(), budget);
}

INSTANTIATE_TEST_SUITE_P(Hybrids, HybridTest,
                         testing::Values("qwen3_5", "qwen3_5_moe", "qwen3_next"),
                         [](const auto& item) { return std::string(item.param); });

}  // namespace
}  // namespace oscar
