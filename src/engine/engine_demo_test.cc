// The batching engine on the demo model, against the single-sequence generator: the same tokens.
#include <gtest/gtest.h>

#include "base/rng.h"
#include "engine/demo_fixture.h"
#include "engine/engine_test_util.h"
#include "engine/page_budget.h"
#include "engine/prefix_store.h"

namespace oscar {
namespace {

// Small windows and cells, so that short prompts have all kinds of pages.
KvPlanOptions SmallWindows() {
  KvPlanOptions options = DemoModel::Method("oscar+", /*cell=*/128);
  options.recent = 64;
  return options;
}

EngineRequest DemoRequest(uint64_t seed, size_t prompt, int64_t max_tokens) {
  EngineRequest request;
  request.prompt = SomeTokens(prompt + seed % 97);
  std::rotate(request.prompt.begin(),
              request.prompt.begin() + static_cast<ptrdiff_t>(seed * 7 % prompt),
              request.prompt.end());
  request.max_tokens = max_tokens;
  request.sampling.temperature = seed % 2 == 0 ? 0.0f : 0.9f;
  request.sampling.top_p = 0.95f;
  request.sampling.repetition_penalty = seed % 3 == 0 ? 1.1f : 1.0f;
  request.sampling.seed = seed;
  return request;
}

GenerateRequest AsGenerate(const EngineRequest& request) {
  return {request.prompt, request.sampling, request.max_tokens, request.stop_tokens};
}

std::vector<int32_t> Alone(DemoModel& demo, const EngineRequest& request) {
  Generator generator(*demo.model, demo.pool);
  const auto result = generator.Generate(AsGenerate(request));
  EXPECT_TRUE(result.has_value());
  return result.has_value() ? result->tokens : std::vector<int32_t>{};
}

std::vector<EngineRequest> MixedRequests(int count) {
  const Philox rng(17, 0);
  std::vector<EngineRequest> requests;
  for (int i = 0; i < count; ++i) {
    const auto n = static_cast<uint64_t>(i);
    requests.push_back(DemoRequest(n, 5 + rng.Below(2 * n, 250),
                                   1 + static_cast<int64_t>(rng.Below(2 * n + 1, 16))));
  }
  return requests;
}

void ExpectAsAlone(DemoModel& reference, EngineService& service,
                   const std::vector<EngineRequest>& requests) {
  std::vector<std::unique_ptr<RequestHandle>> handles;
  for (const EngineRequest& request : requests) {
    auto handle = service.Submit(request);
    ASSERT_TRUE(handle.has_value()) << handle.error().ToString();
    handles.push_back(std::move(*handle));
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    const Answer answer = Collect(*handles[i]);
    EXPECT_TRUE(answer.finished) << answer.status.ToString();
    EXPECT_EQ(answer.tokens, Alone(reference, requests[i])) << "request " << i;
  }
}

TEST(EngineOnDemoModel, BatchedAsAlone) {
  DemoModel reference(SmallWindows()), demo(SmallWindows());
  EngineServiceOptions options;
  options.step_tokens = 100;
  auto service = MakeEngineService(*demo.model, demo.pool, demo.threads, options);
  ExpectAsAlone(reference, *service, MixedRequests(20));
  EXPECT_GT(service->Stats().steps, 10u);
}

// What one arithmetic has kept on disk is not the other's.
TEST(EngineOnDemoModel, PortablePagesAreKeptApart) {
  BackendOptions cpu;
  const DemoModel plain(SmallWindows()), again(SmallWindows());
  cpu.portable = true;
  const DemoModel portable(SmallWindows(), 2, uint64_t{1} << 30, WeightFormat::kCheckpoint, cpu);
  EXPECT_EQ(PrefixStoreKey(*plain.model), PrefixStoreKey(*again.model));
  EXPECT_NE(PrefixStoreKey(*plain.model), PrefixStoreKey(*portable.model));
}

TEST(EngineOnDemoModel, PreemptionChangesNoAnswer) {
  DemoModel reference(SmallWindows());
  const CacheConfig& config = reference.plan->cache();
  // Room for the longest request and a little more.
  const uint64_t budget = PeakBytes(config, 250, 400) + 3 * config.open.bytes();
  DemoModel demo(SmallWindows(), 2, budget);
  EngineServiceOptions options;
  options.step_tokens = 128;
  auto service = MakeEngineService(*demo.model, demo.pool, demo.threads, options);
  std::vector<EngineRequest> requests;
  for (uint64_t i = 0; i < 6; ++i) requests.push_back(DemoRequest(i, 40 + 10 * i, 80));
  requests.push_back(DemoRequest(9, 200, 10));
  ExpectAsAlone(reference, *service, requests);
  EXPECT_GT(service->Stats().preemptions, 0u);
  EXPECT_LE(demo.pool.peak_bytes(), demo.pool.budget());
}

// Prompts that fit only layer by layer give the same tokens and the same logprobs, to the bit.
TEST(EngineOnDemoModel, ReadingByLayerChangesNoBit) {
  KvPlanOptions windows = DemoModel::Method("oscar+", /*cell=*/512);
  windows.recent = 64;
  DemoModel roomy(windows);
  const CacheConfig& config = roomy.plan->cache();
  const uint64_t budget = PeakBytes(config, 800, 830, Reading::kByLayer);
  ASSERT_LT(budget, PeakBytes(config, 800, 800));
  DemoModel tight(windows, 2, budget);
  EngineServiceOptions options;
  options.step_tokens = 100;
  auto reference = MakeEngineService(*roomy.model, roomy.pool, roomy.threads, {});
  auto service = MakeEngineService(*tight.model, tight.pool, tight.threads, options);
  for (uint64_t seed : {2, 3}) {
    EngineRequest request = DemoRequest(seed, 790, 24);
    request.want_logprobs = true;
    const auto ask = [&](EngineService& engine) {
      auto handle = engine.Submit(request);
      EXPECT_TRUE(handle.has_value()) << handle.error().ToString();
      return Collect(**handle);
    };
    const Answer expected = ask(*reference), answer = ask(*service);
    ASSERT_EQ(answer.tokens, expected.tokens);
    for (size_t i = 0; i < answer.details.size(); ++i) {
      EXPECT_EQ(answer.details[i].logprob, expected.details[i].logprob) << i;
    }
  }
  EXPECT_LE(tight.pool.peak_bytes(), budget);
}

// The bar, through admission and all: a budget of exactly 4 x 14,000 BF16 tokens, and 24
// conversations that grow to 14,000 tokens, nothing shared, run at once. A model that hashes what
// it sees stands in for a real one, with the windows, cell and bits of the default cache.
TEST(EngineAtTheBar, TwentyFourConversationsRunAtOnce) {
  FakeModel::Options model;
  model.cell = 4096;
  model.recent = 256;
  model.head_dim = 128;
  model.max_batch_tokens = 4096;
  EngineServiceOptions options;
  options.prefix_cache = false;
  options.step_tokens = 4096;
  constexpr uint64_t kBudgetPages = 2 * 4 * 14000 / kPageTokens;  // twice: FakeEngine's have D 64
  FakeEngine engine(kBudgetPages, options, model, 2);
  const CacheConfig& config = engine.model.kv().cache();
  ASSERT_EQ(engine.pool.budget(), 4 * 14000 / kPageTokens * config.open.bytes());
  size_t most = 0;
  engine.model.before_pass = [&](std::span<const ForwardItem> items) {
    const auto decoders = std::ranges::count_if(items, [](const auto& i) { return !i.is_prompt; });
    most = std::max(most, static_cast<size_t>(decoders));
  };
  std::vector<std::unique_ptr<RequestHandle>> handles;
  for (uint64_t i = 0; i < 24; ++i) handles.push_back(engine.Submit(FakeRequest(i, 13800, 200)));
  for (const auto& handle : handles) EXPECT_EQ(Collect(*handle).tokens.size(), 200u);
  EXPECT_EQ(most, 24u);
  EXPECT_EQ(engine.service->Stats().preemptions, 0u);
  EXPECT_GT(engine.service->Stats().cells_by_layer, 0u);
  EXPECT_LE(engine.pool.peak_bytes(), engine.pool.budget());
}

TEST(EngineOnDemoModel, NextTurnContinuesAsUninterrupted) {
  DemoModel reference(DemoModel::Method("oscar+")), demo(DemoModel::Method("oscar+"));
  auto service = MakeEngineService(*demo.model, demo.pool, demo.threads, {});
  Generator generator(*reference.model, reference.pool);
  EngineRequest request = DemoRequest(2, 500, 30);
  for (int turn = 0; turn < 3; ++turn) {
    // The generator never lets go of its cache: that is what uninterrupted means.
    const auto expected = generator.Generate(AsGenerate(request));
    ASSERT_TRUE(expected.has_value());
    auto handle = service->Submit(request);
    ASSERT_TRUE(handle.has_value());
    const Answer answer = Collect(**handle);
    EXPECT_EQ(answer.tokens, expected->tokens) << "turn " << turn;
    EXPECT_EQ(answer.cached_tokens, expected->reused_tokens) << "turn " << turn;
    EXPECT_EQ(answer.cached_tokens > 0, turn > 0);
    request.prompt.insert(request.prompt.end(), answer.tokens.begin(), answer.tokens.end());
    const auto user = SomeTokens(50 + static_cast<size_t>(turn));
    request.prompt.insert(request.prompt.end(), user.begin(), user.end());
  }
}

TEST(EngineOnDemoModel, DeterministicHitsChangeNoAnswer) {
  DemoModel reference(SmallWindows()), demo(SmallWindows());
  EngineServiceOptions options;
  options.deterministic = true;
  auto service = MakeEngineService(*demo.model, demo.pool, demo.threads, options);
  std::vector<EngineRequest> requests = {DemoRequest(2, 350, 10), DemoRequest(2, 350, 10)};
  requests[1].prompt.resize(300);
  requests[1].prompt.back() = 17;
  ExpectAsAlone(reference, *service, requests);
  ExpectAsAlone(reference, *service, requests);
  EXPECT_GE(service->Stats().prefix_hits, 2u);
  EXPECT_GT(service->Stats().cached_prompt_tokens, 500u);
}

// A hit on sealed pages alone: the logits move by quantisation, no further.
TEST(EngineOnDemoModel, AHitWithoutTheTailDiffersByQuantisation) {
  DemoModel demo(DemoModel::Method("oscar+"));
  auto service = MakeEngineService(*demo.model, demo.pool, demo.threads, {});
  EngineRequest request = DemoRequest(2, 700, 4);
  request.want_logprobs = true;
  auto handle = service->Submit(request);
  const Answer fresh = Collect(**handle);
  // The same prompt with another ending: the kept tail does not apply to it.
  EngineRequest other = request;
  other.prompt[300] = (other.prompt[300] + 1) % 8192;
  handle = service->Submit(other);
  const Answer hit = Collect(**handle);
  EXPECT_EQ(hit.cached_tokens, 256);
  EngineRequest unshared = other;
  unshared.cache_salt = "another";
  handle = service->Submit(unshared);
  const Answer exact = Collect(**handle);
  EXPECT_EQ(exact.cached_tokens, 0);
  EXPECT_NEAR(hit.details[0].logprob, exact.details[0].logprob, 0.5f);
}

}  // namespace
}  // namespace oscar
