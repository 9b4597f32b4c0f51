// Rules by number: docs/engine-contract.md. Over 800 lines because one contract's rules, in its
// order, share one fake model and its helpers.
#include <gtest/gtest.h>

#include <atomic>
#include <cctype>
#include <chrono>
#include <cmath>
#include <latch>
#include <limits>
#include <set>
#include <string>
#include <thread>

#include "base/rng.h"
#include "engine/engine_test_util.h"
#include "engine/page_budget.h"

namespace oscar {
namespace {

using std::chrono::milliseconds;

std::vector<EngineRequest> RandomRequests(int count, uint64_t seed) {
  const Philox rng(seed, 0);
  std::vector<EngineRequest> requests;
  for (int i = 0; i < count; ++i) {
    const auto n = static_cast<uint64_t>(i);
    const size_t prompt =
        rng.Below(3 * n, 4) == 0 ? 1 + rng.Below(3 * n + 1, 30) : 1 + rng.Below(3 * n + 1, 900);
    requests.push_back(FakeRequest(seed * 1000 + n, prompt, 1 + rng.Below(3 * n + 2, 120)));
  }
  return requests;
}

void ExpectAsAlone(FakeEngine& engine, const std::vector<EngineRequest>& requests) {
  std::vector<std::unique_ptr<RequestHandle>> handles;
  handles.reserve(requests.size());
  for (const EngineRequest& request : requests) handles.push_back(engine.Submit(request));
  for (size_t i = 0; i < requests.size(); ++i) {
    const Answer answer = Collect(*handles[i]);
    EXPECT_TRUE(answer.finished) << answer.status.ToString();
    const Answer alone = FakeEngine::Alone(requests[i]);
    EXPECT_EQ(answer.tokens, alone.tokens) << "request " << i;
    EXPECT_EQ(answer.reason, alone.reason);
    EXPECT_EQ(answer.tokens.size(), static_cast<size_t>(requests[i].max_tokens));
  }
}

TEST(EngineService, Rule1_BatchedAsAlone) {
  for (int step_tokens : {512, 100, 17, 1}) {
    EngineServiceOptions options;
    options.step_tokens = step_tokens;
    FakeEngine engine(4096, options, {}, 2);
    ExpectAsAlone(engine, RandomRequests(step_tokens == 1 ? 5 : 20, 1));
  }
}

TEST(EngineService, Rule1_BatchedAsAloneInDeterministicMode) {
  EngineServiceOptions options;
  options.deterministic = true;
  FakeEngine engine(4096, options);
  auto requests = RandomRequests(12, 2);
  // Prompts that repeat others in part or whole: each is answered as if it were alone.
  for (size_t i = 0; i < 8; ++i) {
    EngineRequest request = requests[i];
    request.prompt.resize(1 + request.prompt.size() * (i + 1) / 8);
    request.prompt.back() = 7;
    requests.push_back(request);
    requests.push_back(requests[i]);
  }
  ExpectAsAlone(engine, requests);
  ExpectAsAlone(engine, requests);  // now everything is in the cache
  EXPECT_GT(engine.service->Stats().prefix_hits, 10u);
}

FakeModel::Options SamplesOnDevice() {
  FakeModel::Options options;
  options.samples = true;
  options.by_layer = false;  // the engine would sample from those logits itself, and otherwise
  return options;
}

// Requests whose tokens the device can sample by itself, some of which stop early.
std::vector<EngineRequest> DeviceRequests(int count, uint64_t seed) {
  auto requests = RandomRequests(count, seed);
  for (size_t i = 0; i < requests.size(); ++i) {
    SamplingOptions& sampling = requests[i].sampling;
    sampling.frequency_penalty = 0.0f;
    sampling.repetition_penalty = 1.0f;
    sampling.temperature = i % 2 == 0 ? 0.0f : 0.7f;
    sampling.top_k = 20;
    requests[i].max_tokens += 200;
    if (i % 3 == 1) requests[i].stop_tokens = {static_cast<int32_t>(i % FakeModel::kVocab), 7};
    if (i % 4 == 3) requests[i].min_tokens = 30;
  }
  return requests;
}

// Passes are launched before the one before has ended; the answers are those of a model that
// samples nothing ahead, those of one request at a time included.
TEST(EngineService, Rule2_RunningAheadChangesNoAnswer) {
  const auto requests = DeviceRequests(24, 11);
  // No second pass is ever launched while requests wait, so this engine never runs ahead.
  std::vector<Answer> expected;
  for (const EngineRequest& request : requests) {
    FakeModel::Options options = SamplesOnDevice();
    options.runs_ahead = false;
    expected.push_back(FakeEngine::Alone(request, options));
  }
  for (const bool deterministic : {false, true}) {
    EngineServiceOptions options;
    options.deterministic = deterministic;
    options.max_running = 8;
    FakeEngine engine(4096, options, SamplesOnDevice());
    std::vector<std::unique_ptr<RequestHandle>> handles;
    for (const EngineRequest& request : requests) handles.push_back(engine.Submit(request));
    for (size_t i = 0; i < requests.size(); ++i) {
      const Answer answer = Collect(*handles[i]);
      EXPECT_TRUE(answer.finished) << answer.status.ToString();
      EXPECT_EQ(answer.tokens, expected[i].tokens) << "request " << i;
      EXPECT_EQ(answer.reason, expected[i].reason) << "request " << i;
    }
    EXPECT_EQ(engine.model.most_launched, 2);
  }
}

// The next turn finds what a conversation left, to the bit and no more: the token that was computed
// ahead of the end is not in the cache, and no page was sealed for it.
TEST(EngineService, Rule4_NothingComputedAheadIsKept) {
  int ran_ahead = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    EngineRequest first = DeviceRequests(2, seed)[1];
    first.prompt.resize(first.prompt.size() % 300 + 1);
    first.min_tokens = 0;
    first.stop_tokens = {static_cast<int32_t>(seed), 7, 11, 13};
    std::vector<Answer> turns[2];
    for (const bool ahead : {false, true}) {
      FakeModel::Options options = SamplesOnDevice();
      options.runs_ahead = ahead;
      FakeEngine engine(4096, {}, options);
      turns[ahead].push_back(engine.Ask(first));
      EngineRequest second = first;
      const auto& tokens = turns[ahead].back().tokens;
      second.prompt.insert(second.prompt.end(), tokens.begin(), tokens.end());
      second.prompt.push_back(3);
      turns[ahead].push_back(engine.Ask(second));
      if (engine.model.most_launched == 2) ++ran_ahead;
    }
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(turns[1][i].tokens, turns[0][i].tokens) << "seed " << seed << " turn " << i;
      EXPECT_EQ(turns[1][i].cached_tokens, turns[0][i].cached_tokens) << "seed " << seed;
    }
  }
  EXPECT_GT(ran_ahead, 20);
}

TEST(EngineService, Rule2_RunningAheadUnderPressure) {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    EngineServiceOptions options;
    options.max_waiting = 1000;
    options.max_running = 6;
    FakeEngine engine(24, options, SamplesOnDevice(), 2);
    const Philox rng(seed, 7);
    auto requests = DeviceRequests(40, seed);
    std::vector<std::unique_ptr<RequestHandle>> handles;
    for (uint64_t i = 0; i < requests.size(); ++i) {
      handles.push_back(engine.Submit(requests[i]));
      if (rng.Below(i, 3) == 0) handles[rng.Below(100 + i, static_cast<uint32_t>(i + 1))]->Cancel();
      if (i % 8 == 7) std::this_thread::sleep_for(milliseconds(2));
    }
    for (size_t i = 0; i < handles.size(); ++i) {
      const Answer answer = Collect(*handles[i]);
      ASSERT_TRUE(answer.finished) << answer.status.ToString();
      if (answer.reason == FinishReason::kCancelled) continue;
      EXPECT_EQ(answer.tokens, FakeEngine::Alone(requests[i], SamplesOnDevice()).tokens) << i;
    }
    ASSERT_TRUE(Eventually([&] { return engine.Idle(); }));
    const EngineStats stats = engine.service->Stats();
    EXPECT_EQ(stats.prefix_bytes, stats.kv_bytes);
  }
}

TEST(EngineService, Rule5_AFailureWhileRunningAheadFailsEveryRequest) {
  FakeEngine engine(4096, {}, SamplesOnDevice());
  engine.model.fail_after = 30;
  std::vector<std::unique_ptr<RequestHandle>> handles;
  for (uint64_t i = 0; i < 3; ++i) {
    EngineRequest request = DeviceRequests(1, i + 1)[0];
    request.max_tokens = 1000;
    request.stop_tokens.clear();
    handles.push_back(engine.Submit(request));
  }
  for (auto& handle : handles)
    EXPECT_EQ(Collect(*handle).status.message(), "the device has failed");
  EXPECT_FALSE(engine.service->Health().ok());
}

TEST(Generator, AFailureWhileRunningAheadLeavesNothingUnderWay) {
  GenerateRequest request;
  request.prompt = FakeTokens(5, 20);
  request.sampling.temperature = 0.0f;
  request.max_tokens = 40;
  for (int passes = 1; passes < 12; ++passes) {
    ThreadPool threads(1);
    FakeModel model(SamplesOnDevice(), threads);
    PagePool pool(uint64_t{1} << 26, model.kv().host_sealer());
    Generator generator(model, pool), fresh(model, pool);
    model.fail_after = passes;
    const auto failed = generator.Generate(request);
    ASSERT_TRUE(failed.has_value());
    EXPECT_EQ(failed->status.message(), "the device has failed");
    EXPECT_EQ(model.num_launched(), 0u);
    model.fail_after = -1;
    EXPECT_EQ(generator.Generate(request)->tokens, fresh.Generate(request)->tokens) << passes;
  }
}

TEST(EngineService, Rule3_PreemptionChangesNoAnswer) {
  for (const bool deterministic : {false, true}) {
    for (const bool prefix_cache : {true, false}) {
      EngineServiceOptions options;
      options.deterministic = deterministic;
      options.prefix_cache = prefix_cache;
      options.step_tokens = 128;
      FakeEngine engine(16, options);  // a sequence of 900 tokens takes about 9 of them
      std::vector<EngineRequest> requests;
      for (uint64_t i = 0; i < 20; ++i) {
        requests.push_back(FakeRequest(100 + i, 20 + i * 17 % 200, 300 + static_cast<int64_t>(i)));
      }
      requests.push_back(FakeRequest(200, 900, 40));
      ExpectAsAlone(engine, requests);
      ASSERT_TRUE(Eventually([&] { return engine.Idle(); }));
      EXPECT_GT(engine.service->Stats().preemptions, 0u);
    }
  }
}

TEST(EngineService, Rule3_TokensDrawnBeforeAPreemptionAreKept) {
  EngineServiceOptions options;
  FakeEngine engine(10, options);
  std::vector<EngineRequest> requests;
  for (uint64_t i = 0; i < 6; ++i) {
    EngineRequest request = FakeRequest(15 * (i + 1), 30, 500);
    request.want_logprobs = true;
    request.top_logprobs = 3;
    request.want_prompt_logprobs = i % 2 == 0;
    requests.push_back(request);
  }
  std::vector<std::unique_ptr<RequestHandle>> handles;
  handles.reserve(requests.size());
  for (const auto& request : requests) handles.push_back(engine.Submit(request));
  for (size_t i = 0; i < requests.size(); ++i) {
    const Answer answer = Collect(*handles[i]);
    const Answer alone = FakeEngine::Alone(requests[i]);
    ASSERT_EQ(answer.tokens, alone.tokens);
    for (size_t t = 0; t < answer.details.size(); ++t) {
      EXPECT_EQ(answer.details[t].logprob, alone.details[t].logprob);
    }
    EXPECT_EQ(answer.prompt_logprobs.size(), alone.prompt_logprobs.size());
  }
  EXPECT_GT(engine.service->Stats().preemptions, 0u);
}

TEST(EngineService, Rule2_TheBudgetHoldsForAnyTraffic) {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    EngineServiceOptions options;
    options.max_waiting = 1000;
    options.step_tokens = 96;
    options.deterministic = seed == 4;
    FakeEngine engine(24, options, {}, 2);
    const Philox rng(seed, 7);
    std::vector<EngineRequest> requests;
    std::vector<std::unique_ptr<RequestHandle>> handles;
    for (uint64_t i = 0; i < 60; ++i) {
      EngineRequest request =
          FakeRequest(i, 1 + rng.Below(4 * i, 700), 1 + rng.Below(4 * i + 1, 100));
      if (i > 3 && rng.Below(4 * i + 2, 3) == 0) {  // shares a prefix with an earlier one
        const EngineRequest& other = requests[rng.Below(4 * i + 3, static_cast<uint32_t>(i))];
        const size_t shared = std::min(request.prompt.size(), other.prompt.size()) - 1;
        std::copy_n(other.prompt.begin(), shared, request.prompt.begin());
      }
      requests.push_back(request);
      handles.push_back(engine.Submit(request));
      if (rng.Below(1000 + i, 3) == 0)
        handles[rng.Below(2000 + i, static_cast<uint32_t>(i + 1))]->Cancel();
      if (i % 8 == 7) std::this_thread::sleep_for(milliseconds(2));
    }
    for (size_t i = 0; i < handles.size(); ++i) {
      const Answer answer = Collect(*handles[i]);
      EXPECT_TRUE(answer.finished) << answer.status.ToString();
      if (answer.reason != FinishReason::kCancelled) {
        EXPECT_EQ(answer.tokens.size(), static_cast<size_t>(requests[i].max_tokens));
      }
    }
    ASSERT_TRUE(Eventually([&] { return engine.Idle(); }));
    const EngineStats stats = engine.service->Stats();
    // All that is left belongs to the prefix cache, page by page.
    EXPECT_EQ(stats.prefix_bytes, stats.kv_bytes);
    EXPECT_EQ(stats.sink_bytes + stats.quantized_bytes + stats.recent_bytes, stats.kv_bytes);
    EXPECT_LE(engine.pool.peak_bytes(), engine.pool.budget());
  }
}

TEST(EngineService, Rule2_WithoutAPrefixCacheNothingIsLeft) {
  EngineServiceOptions options;
  options.prefix_cache = false;
  FakeEngine engine(40, options);
  ExpectAsAlone(engine, RandomRequests(10, 5));
  ASSERT_TRUE(Eventually([&] { return engine.Idle(); }));
  EXPECT_EQ(engine.service->Stats().kv_bytes, 0u);
}

TEST(EngineService, Rule2_WhatCanNeverFitIsRefused) {
  FakeEngine engine(6);
  auto refused = engine.service->Submit(FakeRequest(1, 600, 1));
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code(), StatusCode::kOutOfRange);
  EXPECT_NE(refused.error().message().find("600 tokens"), std::string::npos);
  EXPECT_NE(refused.error().message().find("768.0 KiB"), std::string::npos)
      << refused.error().message();
  refused = engine.service->Submit(FakeRequest(1, 100, 100000));
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code(), StatusCode::kOutOfRange);
  EXPECT_EQ(refused.error().param(), "max_tokens");
  // Without max_tokens the answer ends where the cache does, exactly.
  EngineRequest open_ended = FakeRequest(1, 100, 0);
  const Answer answer = engine.Ask(open_ended);
  EXPECT_EQ(answer.reason, FinishReason::kLength);
  const CacheConfig& config = engine.model.kv().cache();
  const auto total = static_cast<int64_t>(100 + answer.tokens.size() - 1);
  EXPECT_LE(PeakBytes(config, 100, total), engine.pool.budget());
  EXPECT_GT(PeakBytes(config, 100, total + 1), engine.pool.budget());
  open_ended.max_tokens = static_cast<int64_t>(answer.tokens.size());
  EXPECT_EQ(engine.Ask(open_ended).tokens.size(), answer.tokens.size());
  // A limit that is only a default does not refuse what an open end would take.
  EngineRequest by_default = FakeRequest(1, 100, 100000);
  by_default.may_shorten = true;
  EXPECT_EQ(engine.Ask(by_default).tokens, answer.tokens);
}

// Where a prompt's cell does not fit beside the others in BF16, it is read layer by layer: more
// conversations run at once, and none of them notices.
TEST(EngineService, Rule2_ReadsByLayerWhereChunksDoNotFit) {
  FakeModel::Options by_layer;
  by_layer.cell = 1024;
  FakeModel::Options by_chunk = by_layer;
  by_chunk.by_layer = false;
  EngineServiceOptions options;
  options.prefix_cache = false;
  options.step_tokens = 96;
  std::vector<EngineRequest> requests;
  for (uint64_t i = 0; i < 8; ++i) requests.push_back(FakeRequest(i, 1500 + i, 200));
  size_t most[2] = {0, 0};
  for (const bool layers : {true, false}) {
    // Eight at rest take about 8 x 8.5 open pages; a cell 20 or 11 more.
    FakeEngine engine(64, options, layers ? by_layer : by_chunk);
    engine.model.before_pass = [&](std::span<const ForwardItem> items) {
      const auto decoders =
          std::ranges::count_if(items, [](const auto& i) { return !i.is_prompt; });
      most[layers] = std::max(most[layers], static_cast<size_t>(decoders));
    };
    std::vector<std::unique_ptr<RequestHandle>> handles;
    handles.reserve(requests.size());
    for (const EngineRequest& request : requests) handles.push_back(engine.Submit(request));
    for (size_t i = 0; i < requests.size(); ++i) {
      EXPECT_EQ(Collect(*handles[i]).tokens, FakeEngine::Alone(requests[i], by_chunk).tokens) << i;
    }
    EXPECT_EQ(engine.model.cells_started > 0, layers);
    EXPECT_EQ(engine.service->Stats().preemptions, 0u);
    EXPECT_LE(engine.pool.peak_bytes(), engine.pool.budget());
  }
  EXPECT_GT(most[true], most[false]);
}

// A long common prefix is held once, whatever form its pages have: whoever shares it needs room for
// its own tokens only.
TEST(EngineService, Rule2_SharedPagesAreCountedOnce) {
  for (const char* method : {"bf16", "oscar+"}) {
    FakeModel::Options model;
    model.method = method;
    EngineServiceOptions options;
    options.step_tokens = 512;
    FakeEngine engine(40, options, model);
    size_t most = 0;
    std::atomic<bool> held{false};  // until all six are there, however slow this machine is
    engine.model.before_pass = [&](std::span<const ForwardItem> items) {
      while (held) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      most = std::max(most, items.size());
    };
    EngineRequest first = FakeRequest(2, 20 * kPageTokens, 1);
    engine.Ask(first);
    held = true;
    std::vector<std::unique_ptr<RequestHandle>> handles;
    for (uint64_t i = 0; i < 6; ++i) {
      EngineRequest request = first;
      request.max_tokens = 60;
      const auto own = FakeTokens(50 + i, 40);
      request.prompt.insert(request.prompt.end(), own.begin(), own.end());
      handles.push_back(engine.Submit(request));
    }
    held = false;
    for (const auto& handle : handles) EXPECT_EQ(Collect(*handle).tokens.size(), 60u);
    EXPECT_EQ(most, 6u) << method;
    EXPECT_EQ(engine.service->Stats().preemptions, 0u) << method;
  }
}

// A prompt that an empty cache can hold only when it is read layer by layer is served.
TEST(EngineService, Rule2_APromptThatFitsOnlyByLayer) {
  FakeModel::Options model;
  model.cell = 1024;
  for (const bool deterministic : {false, true}) {
    EngineServiceOptions options;
    options.deterministic = deterministic;
    options.step_tokens = 100;
    FakeEngine engine(15, options, model);
    const CacheConfig& config = engine.model.kv().cache();
    ASSERT_GT(PeakBytes(config, 1500, 1500), engine.pool.budget());
    ASSERT_LE(PeakBytes(config, 1500, 1560, Reading::kByLayer), engine.pool.budget());
    EngineRequest request = FakeRequest(4, 1500, 60);
    const Answer alone = FakeEngine::Alone(request, model);
    EXPECT_EQ(engine.Ask(request).tokens, alone.tokens);
    // Again, with what is left of it in the prefix cache, and beside one that began like it.
    EngineRequest other = request;
    other.prompt.resize(900);
    auto first = engine.Submit(other), second = engine.Submit(request);
    EXPECT_EQ(Collect(*first).tokens.size(), 60u);
    const Answer again = Collect(*second);
    EXPECT_EQ(again.tokens.size(), 60u);
    if (deterministic) {
      EXPECT_EQ(again.tokens, alone.tokens);
    }
    request.want_prompt_logprobs = true;  // these need chunks
    EXPECT_FALSE(engine.service->Submit(request).has_value());
  }
}

TEST(EngineService, Rule2_GeneratedTokensGoFirst) {
  EngineServiceOptions options;
  options.step_tokens = 64;
  FakeEngine engine(4096, options);
  int passes_with_both = 0, passes_without_decoder = 0;
  bool decoding = false;
  std::latch both_submitted(1);
  engine.model.before_pass = [&](std::span<const ForwardItem> items) {
    both_submitted.wait();
    const bool prompts = std::ranges::any_of(items, &ForwardItem::is_prompt);
    const bool decoders = !std::ranges::all_of(items, &ForwardItem::is_prompt);
    size_t total = 0;
    for (const ForwardItem& item : items) total += item.tokens.size();
    EXPECT_LE(total, 64u);
    if (decoders) {
      EXPECT_FALSE(items.front().is_prompt);
      decoding = true;
    }
    passes_with_both += prompts && decoders ? 1 : 0;
    passes_without_decoder += decoding && prompts && !decoders ? 1 : 0;
  };
  auto first = engine.Submit(FakeRequest(1, 20, 100));
  auto second = engine.Submit(FakeRequest(2, 3000, 5));
  both_submitted.count_down();
  const Answer a = Collect(*first), b = Collect(*second);
  EXPECT_EQ(a.tokens.size(), 100u);
  EXPECT_EQ(b.tokens.size(), 5u);
  EXPECT_GE(passes_with_both, 40);       // 3000 tokens in chunks of 63
  EXPECT_EQ(passes_without_decoder, 0);  // the first never waits for the second's prompt
}

TEST(EngineService, Rule2_DecodersTakeTurnsAndPromptsMoveOn) {
  EngineServiceOptions options;
  options.step_tokens = 4;
  FakeEngine engine(4096, options);
  std::vector<std::unique_ptr<RequestHandle>> handles;
  for (uint64_t i = 0; i < 12; ++i) handles.push_back(engine.Submit(FakeRequest(i, 5, 60)));
  auto late = engine.Submit(FakeRequest(50, 100, 3));
  EXPECT_EQ(Collect(*late).tokens.size(), 3u);
  for (auto& handle : handles) EXPECT_EQ(Collect(*handle).tokens.size(), 60u);
}

TEST(EngineService, Rule4_NextTurnReusesWhatWasGenerated) {
  FakeEngine engine;
  EngineRequest request = FakeRequest(4, 700, 50);
  const Answer first = engine.Ask(request);
  EXPECT_EQ(first.cached_tokens, 0);
  EngineRequest next = request;
  next.prompt.insert(next.prompt.end(), first.tokens.begin(), first.tokens.end());
  const auto user = FakeTokens(77, 40);
  next.prompt.insert(next.prompt.end(), user.begin(), user.end());
  const Answer second = engine.Ask(next);
  EXPECT_EQ(second.cached_tokens, 749);  // the last token sampled was never computed
  const EngineStats stats = engine.service->Stats();
  EXPECT_EQ(stats.cached_prompt_tokens, 749u);
  EXPECT_EQ(stats.prefix_queries, 2u);
  EXPECT_EQ(stats.prefix_hits, 1u);

  // As if uninterrupted: the same tokens in one cache, the answer's computed as generated.
  ThreadPool threads(1);
  FakeModel model({}, threads);
  PagePool pool(uint64_t{64} << 20, model.kv().host_sealer());
  SequenceCache cache(model.kv().cache(), pool);
  std::vector<float> logits;
  std::vector<int32_t> expected;
  std::vector<int32_t> tokens = next.prompt;
  while (expected.size() < second.tokens.size()) {
    const int64_t at = cache.length();
    const bool generated =
        (at >= 700 && at < 749) || at >= static_cast<int64_t>(next.prompt.size());
    int64_t end = at < 700 ? 700 : static_cast<int64_t>(next.prompt.size());
    end = generated ? at + 1 : std::min(end, (at / 256 + 1) * 256);
    const bool samples = end == static_cast<int64_t>(tokens.size());
    logits.resize(samples ? FakeModel::kVocab : 0);
    const ForwardItem item{
        &cache, std::span(tokens).subspan(static_cast<size_t>(at), static_cast<size_t>(end - at)),
        !generated, samples ? 1 : 0};
    ASSERT_TRUE(model.Forward({&item, 1}, logits).ok());
    if (!samples) continue;
    expected.push_back(static_cast<int32_t>(std::ranges::max_element(logits) - logits.begin()));
    tokens.push_back(expected.back());
  }
  EXPECT_EQ(second.tokens, expected);
}

TEST(EngineService, Rule4_DeterministicReusesOnlyPrompts) {
  EngineServiceOptions options;
  options.deterministic = true;
  FakeEngine engine(4096, options);
  EngineRequest request = FakeRequest(4, 700, 50);
  const Answer first = engine.Ask(request);
  EngineRequest next = request;
  next.prompt.insert(next.prompt.end(), first.tokens.begin(), first.tokens.end());
  next.prompt.push_back(3);
  const Answer second = engine.Ask(next);
  EXPECT_EQ(second.cached_tokens, 700);  // the first prompt, nothing generated
  EXPECT_EQ(second.tokens, FakeEngine::Alone(next).tokens);
  EXPECT_EQ(engine.Ask(request).tokens, first.tokens);
}

TEST(EngineService, Rule4_SaltsAreApart) {
  FakeEngine engine;
  EngineRequest request = FakeRequest(1, 300, 3);
  request.cache_salt = "alice";
  engine.Ask(request);
  EXPECT_EQ(engine.Ask(request).cached_tokens, 299);
  request.cache_salt = "bob";
  EXPECT_EQ(engine.Ask(request).cached_tokens, 0);
}

TEST(EngineService, Rule4_ConcurrentRequestsComputeASharedPrefixOnce) {
  EngineServiceOptions options;
  options.step_tokens = 128;
  FakeEngine engine(4096, options);
  const auto shared = FakeTokens(9, 2048);
  std::atomic<uint64_t> computed{0};
  engine.model.before_pass = [&](std::span<const ForwardItem> items) {
    for (const ForwardItem& item : items) computed += item.tokens.size();
  };
  std::vector<std::unique_ptr<RequestHandle>> handles;
  for (uint64_t i = 0; i < 8; ++i) {
    EngineRequest request = FakeRequest(i, 30, 10);
    request.prompt.insert(request.prompt.begin(), shared.begin(), shared.end());
    handles.push_back(engine.Submit(request));
  }
  for (auto& handle : handles) EXPECT_EQ(Collect(*handle).tokens.size(), 10u);
  EXPECT_LT(computed.load(), 2048u + 8 * (256 + 30 + 10));
  EXPECT_EQ(engine.service->Stats().prefix_hits, 7u);
}

TEST(EngineService, Rule5_CancelFreesPagesWithinAStep) {
  EngineServiceOptions options;
  options.step_tokens = 32;
  options.prefix_cache = false;
  FakeEngine engine(4096, options);
  engine.model.pass_time = milliseconds(2);
  // While reading a prompt, while generating, and before it was admitted.
  auto reading = engine.Submit(FakeRequest(1, 3000, 10));
  ASSERT_TRUE(Eventually([&] { return engine.service->Stats().kv_bytes > 0; }));
  reading->Cancel();
  EXPECT_EQ(Collect(*reading).reason, FinishReason::kCancelled);
  ASSERT_TRUE(Eventually([&] { return engine.Idle(); }));
  EXPECT_EQ(engine.service->Stats().kv_bytes, 0u);

  auto generating = engine.Submit(FakeRequest(2, 10, 100000));
  EXPECT_EQ(generating->Next(milliseconds(5000)).kind, EngineEvent::Kind::kStarted);
  EXPECT_EQ(generating->Next(milliseconds(5000)).kind, EngineEvent::Kind::kToken);
  generating.reset();  // a dropped handle cancels
  const uint64_t cancelled_at = engine.service->Stats().steps;
  ASSERT_TRUE(Eventually([&] { return engine.Idle(); }));
  const EngineStats stats = engine.service->Stats();
  // The step in progress, whose number may not have been published yet, and no other.
  EXPECT_LE(stats.steps, cancelled_at + 2);
  EXPECT_EQ(stats.kv_bytes, 0u);
  EXPECT_EQ(stats.cancelled, 2u);
}

TEST(EngineService, Rule5_AFullQueueRefuses) {
  EngineServiceOptions options;
  options.max_running = 1;
  options.max_waiting = 2;
  FakeEngine engine(4096, options);
  engine.model.pass_time = milliseconds(1);
  auto running = engine.Submit(FakeRequest(1, 10, 100000));
  ASSERT_TRUE(Eventually([&] { return engine.service->Stats().running == 1; }));
  auto second = engine.Submit(FakeRequest(2, 10, 5));
  auto third = engine.Submit(FakeRequest(3, 10, 5));
  const auto refused = engine.service->Submit(FakeRequest(4, 10, 5));
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code(), StatusCode::kResourceExhausted);
  // A waiting request that is cancelled makes room, too.
  third->Cancel();
  EXPECT_EQ(Collect(*third).reason, FinishReason::kCancelled);
  running->Cancel();
  EXPECT_EQ(Collect(*second).tokens.size(), 5u);
  EXPECT_EQ(engine.Ask(FakeRequest(4, 10, 5)).tokens.size(), 5u);
}

TEST(EngineService, Rule5_WhatTheBatchHasRoomForDoesNotQueue) {
  EngineServiceOptions options;
  options.max_running = 4;
  options.max_waiting = 0;
  FakeEngine engine(4096, options);
  engine.model.pass_time = milliseconds(1);
  std::vector<std::unique_ptr<RequestHandle>> handles;
  // The choices of one request: all at once, before the engine has looked.
  for (int i = 0; i < 4; ++i) handles.push_back(engine.Submit(FakeRequest(i, 10, 100000)));
  EXPECT_EQ(engine.service->Submit(FakeRequest(4, 10, 5)).error().code(),
            StatusCode::kResourceExhausted);
  ASSERT_TRUE(Eventually([&] { return engine.service->Stats().running == 4; }));
  EXPECT_EQ(engine.service->Submit(FakeRequest(4, 10, 5)).error().code(),
            StatusCode::kResourceExhausted);
  handles.clear();
  ASSERT_TRUE(Eventually([&] { return engine.Idle(); }));
  EXPECT_EQ(engine.Ask(FakeRequest(4, 10, 5)).tokens.size(), 5u);
}

TEST(EngineService, Rule5_DrainLetsRunningRequestsFinish) {
  FakeEngine engine;
  auto handle = engine.Submit(FakeRequest(1, 500, 200));
  EXPECT_TRUE(engine.service->Health().ok());
  EXPECT_FALSE(engine.service->Drained());
  engine.service->Drain();
  EXPECT_EQ(engine.service->Health().code(), StatusCode::kUnavailable);
  EXPECT_EQ(engine.service->Submit(FakeRequest(2, 5, 5)).error().code(), StatusCode::kUnavailable);
  EXPECT_EQ(Collect(*handle).tokens.size(), 200u);
  EXPECT_TRUE(Eventually([&] { return engine.service->Drained(); }));
}

TEST(EngineService, Rule5_HandlesOutliveTheService) {
  std::vector<std::unique_ptr<RequestHandle>> handles;
  {
    EngineServiceOptions options;
    options.max_running = 2;
    FakeEngine engine(4096, options);
    engine.model.pass_time = milliseconds(1);
    for (uint64_t i = 0; i < 5; ++i) handles.push_back(engine.Submit(FakeRequest(i, 9, 100000)));
  }
  for (auto& handle : handles) {
    EXPECT_EQ(Collect(*handle).status.code(), StatusCode::kUnavailable);
    EXPECT_EQ(handle->Next(milliseconds(0)).kind, EngineEvent::Kind::kFailed);
    handle->Cancel();
  }
}

TEST(EngineService, Rule5_AFailingModelFailsTheService) {
  FakeEngine engine;
  engine.model.fail_after = 5;
  auto a = engine.Submit(FakeRequest(1, 100, 1000));
  auto b = engine.Submit(FakeRequest(2, 100, 1000));
  EXPECT_EQ(Collect(*a).status.code(), StatusCode::kInternal);
  const Answer second = Collect(*b);
  EXPECT_FALSE(second.finished);
  EXPECT_EQ(engine.service->Health().code(), StatusCode::kUnavailable);
  EXPECT_EQ(engine.service->Submit(FakeRequest(3, 5, 5)).error().code(), StatusCode::kUnavailable);
}

TEST(EngineService, Rule5_LogitsThatAreNotFiniteFailTheirRequestAlone) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float broken : {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity}) {
    for (const bool samples : {false, true}) {
      for (const float temperature : {0.0f, 1.0f}) {
        FakeModel::Options model = samples ? SamplesOnDevice() : FakeModel::Options{};
        model.by_layer = false;
        FakeEngine engine(4096, {}, model);
        engine.model.broken_at = 104;
        engine.model.broken_logit = broken;
        EngineRequest request = FakeRequest(1, 100, 50);
        request.sampling.temperature = temperature;
        auto bad = engine.Submit(request);
        auto good = engine.Submit(FakeRequest(2, 300, 50));
        const Answer answer = Collect(*bad);
        EXPECT_EQ(answer.status.code(), StatusCode::kInternal);
        EXPECT_NE(answer.status.message().find("not finite at token 105;"), std::string::npos)
            << answer.status.message();
        EXPECT_EQ(answer.tokens.size(), 5u);
        EXPECT_EQ(Collect(*good).tokens.size(), 50u);
        EXPECT_TRUE(engine.service->Health().ok());
      }
    }
  }
}

TEST(EngineService, Rule6_AReaderThatDoesNotReadHoldsNobodyBack) {
  FakeEngine engine;
  auto slow = engine.Submit(FakeRequest(1, 10, 3000));
  EXPECT_EQ(engine.Ask(FakeRequest(2, 10, 50)).tokens.size(), 50u);
  ASSERT_TRUE(Eventually([&] { return engine.Idle(); }));  // all of it was computed and freed
  EXPECT_EQ(Collect(*slow).tokens.size(), 3000u);
}

TEST(EngineService, Rule7_StopTokensAndMinTokens) {
  FakeEngine engine;
  EngineRequest request = FakeRequest(2, 20, 100);
  const Answer free = engine.Ask(request);
  request.stop_tokens = {free.tokens[10], free.tokens[3]};
  const auto stop = static_cast<size_t>(
      std::ranges::find_first_of(free.tokens, request.stop_tokens) - free.tokens.begin());
  Answer answer = engine.Ask(request);
  EXPECT_EQ(answer.reason, FinishReason::kStop);
  EXPECT_EQ(answer.tokens.size(), stop + 1);  // the stop token is delivered
  request.min_tokens = 30;
  answer = engine.Ask(request);
  EXPECT_GE(answer.tokens.size(), 30u);
  for (size_t i = 0; i < 30; ++i) {
    EXPECT_EQ(std::ranges::count(request.stop_tokens, answer.tokens[i]), 0) << i;
  }
}

// A third of the vocabulary, another one after every token; complete after `length` tokens, whose
// last is kEnd. Complains of every token that it did not allow.
class ThirdConstraint : public TokenConstraint {
 public:
  static constexpr int32_t kEnd = 5;
  explicit ThirdConstraint(int length, int fails_at = -1) : left_(length), fails_at_(fails_at) {}
  Status Fill(std::span<uint32_t> mask) override {
    EXPECT_EQ(mask.size(), MaskWords(FakeModel::kVocab));
    EXPECT_FALSE(finished_);
    if (seen_ == fails_at_) return InvalidArgument("nothing may follow");
    std::ranges::fill(mask, 0);
    for (int32_t token = 0; token < FakeModel::kVocab; ++token) {
      if (Allows(token)) mask[static_cast<size_t>(token) / 32] |= uint32_t{1} << (token % 32);
    }
    return {};
  }
  Status Accept(int32_t token) override {
    EXPECT_TRUE(Allows(token)) << token;
    finished_ = left_ == 0;
    --left_, ++seen_;
    state_ = (state_ * 31 + token) % 97;
    return {};
  }
  bool finished() const override { return finished_; }

 private:
  bool Allows(int32_t token) const {
    return left_ == 0 ? token == kEnd : token != kEnd && (token + state_) % 3 == 0;
  }
  int left_, fails_at_, seen_ = 0, state_ = 0;
  bool finished_ = false;
};

std::vector<EngineRequest> ConstrainedRequests(int count, uint64_t seed) {
  auto requests = DeviceRequests(count, seed);
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].max_tokens = 150;
    requests[i].min_tokens = i % 4 == 1 ? 400 : 0;  // gives way
    if (requests[i].min_tokens > 0) requests[i].max_tokens = 500;
    requests[i].stop_tokens = {ThirdConstraint::kEnd};
    if (i % 5 == 4) requests[i].stop_tokens.clear();  // the constraint alone ends it
    if (i % 6 == 5) requests[i].want_logprobs = true;
    if (i % 7 == 6) continue;  // free ones among them
    const int length = static_cast<int>(20 + 17 * i % 200);
    requests[i].make_constraint = [length] { return std::make_unique<ThirdConstraint>(length); };
  }
  return requests;
}

// Masks are filled while a pass runs, and after the tokens of the one before it: whoever samples,
// however far ahead, the constraint sees the same tokens.
TEST(EngineService, Rule7_ConstrainedAnswersAreTheSameForAnySchedule) {
  const auto requests = ConstrainedRequests(28, 5);
  for (const bool on_device : {false, true}) {
    FakeModel::Options model = on_device ? SamplesOnDevice() : FakeModel::Options();
    std::vector<Answer> expected;
    for (size_t i = 0; i < requests.size(); ++i) {
      model.runs_ahead = false;
      expected.push_back(FakeEngine::Alone(requests[i], model));
      ASSERT_TRUE(expected[i].finished) << expected[i].status.ToString();
      if (!requests[i].make_constraint || expected[i].reason == FinishReason::kLength) continue;
      EXPECT_EQ(expected[i].tokens.back(), ThirdConstraint::kEnd);
      EXPECT_EQ(expected[i].tokens.size(), 21 + 17 * i % 200);
    }
    model.runs_ahead = true;
    for (const uint64_t pages : {4096, 30}) {
      EngineServiceOptions options;
      options.max_running = 8;
      FakeEngine engine(pages, options, model, 2);
      std::vector<std::unique_ptr<RequestHandle>> handles;
      for (const EngineRequest& request : requests) handles.push_back(engine.Submit(request));
      for (size_t i = 0; i < requests.size(); ++i) {
        const Answer answer = Collect(*handles[i]);
        EXPECT_TRUE(answer.finished) << answer.status.ToString();
        EXPECT_EQ(answer.tokens, expected[i].tokens) << "request " << i;
        EXPECT_EQ(answer.reason, expected[i].reason) << "request " << i;
      }
      if (on_device && pages == 4096) {
        EXPECT_EQ(engine.model.most_launched, 2);
      }
    }
  }
}

TEST(EngineService, Rule7_ConstraintsOutliveAPreemption) {
  FakeEngine engine(10);
  std::vector<EngineRequest> requests;
  for (uint64_t i = 0; i < 6; ++i) {
    requests.push_back(FakeRequest(15 * (i + 1), 30, 500));
    requests[i].make_constraint = [i] {
      return std::make_unique<ThirdConstraint>(400 + static_cast<int>(i));
    };
  }
  std::vector<std::unique_ptr<RequestHandle>> handles;
  for (const auto& request : requests) handles.push_back(engine.Submit(request));
  for (size_t i = 0; i < requests.size(); ++i) {
    const Answer answer = Collect(*handles[i]);
    EXPECT_EQ(answer.tokens.size(), 401 + i) << answer.status.ToString();
    EXPECT_EQ(answer.tokens, FakeEngine::Alone(requests[i]).tokens);
  }
  EXPECT_GT(engine.service->Stats().preemptions, 0u);
}

TEST(EngineService, Rule7_AConstraintThatFailsFailsItsRequestAlone) {
  for (const bool on_device : {false, true}) {
    for (const int fails_at : {0, 1, 40}) {
      FakeEngine engine(4096, {}, on_device ? SamplesOnDevice() : FakeModel::Options());
      EngineRequest request = DeviceRequests(1, 3)[0];
      const auto other = engine.Submit(request);
      request.make_constraint = [=] { return std::make_unique<ThirdConstraint>(90, fails_at); };
      const Answer answer = engine.Ask(request);
      EXPECT_FALSE(answer.finished);
      EXPECT_EQ(answer.status.message(), "nothing may follow");
      EXPECT_EQ(answer.tokens.size(), static_cast<size_t>(fails_at));
      EXPECT_TRUE(Collect(*other).finished);
    }
  }
}

TEST(EngineService, Rule7_Logprobs) {
  EngineServiceOptions options;
  options.step_tokens = 50;
  FakeEngine engine(4096, options);
  EngineRequest request = FakeRequest(2, 130, 8);
  request.want_logprobs = true;
  request.top_logprobs = 4;
  const Answer plain = engine.Ask(request);
  request.want_prompt_logprobs = true;
  const Answer answer = engine.Ask(request);
  EXPECT_EQ(answer.cached_tokens, 0);  // never from the prefix cache
  EXPECT_EQ(answer.tokens, plain.tokens);
  ASSERT_EQ(answer.prompt_logprobs.size(), 129u);
  for (size_t i = 0; i < 129; ++i) {
    const GeneratedToken& entry = answer.prompt_logprobs[i];
    EXPECT_EQ(entry.token, request.prompt[i + 1]);
    EXPECT_LT(entry.logprob, 0.0f);
    ASSERT_EQ(entry.top.size(), 4u);
    EXPECT_GE(entry.top[0].logprob, entry.logprob);
  }
  for (const GeneratedToken& token : answer.details) {  // greedy: the most likely
    EXPECT_EQ(token.top[0].token, token.token);
    EXPECT_EQ(token.top[0].logprob, token.logprob);
  }
  // The prompt's logprobs say what generation would have sampled.
  EngineRequest shorter = FakeRequest(2, 129, 1);
  shorter.want_logprobs = true;
  shorter.top_logprobs = 4;
  const Answer last = FakeEngine::Alone(shorter);
  EXPECT_EQ(last.details[0].top[0].token, answer.prompt_logprobs[128].top[0].token);
  EXPECT_EQ(last.details[0].top[0].logprob, answer.prompt_logprobs[128].top[0].logprob);
}

TEST(EngineService, Rule7_BadRequestsAreRefused) {
  EngineServiceOptions options;
  options.max_context = 100;
  FakeEngine engine(4096, options);
  EXPECT_EQ(engine.service->max_context(), 100);
  const auto code = [&](const std::function<void(EngineRequest&)>& change) {
    EngineRequest request = FakeRequest(1, 10, 5);
    change(request);
    const auto result = engine.service->Submit(request);
    return result.has_value() ? StatusCode::kOk : result.error().code();
  };
  EXPECT_EQ(code([](EngineRequest& r) { r.prompt.clear(); }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](EngineRequest& r) { r.prompt[3] = -1; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](EngineRequest& r) { r.prompt[3] = FakeModel::kVocab; }),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](EngineRequest& r) { r.stop_tokens = {999}; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](EngineRequest& r) { r.max_tokens = -1; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](EngineRequest& r) { r.min_tokens = 6; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](EngineRequest& r) { r.top_logprobs = -1; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](EngineRequest& r) { r.sampling.temperature = NAN; }),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](EngineRequest& r) { r.prompt = FakeTokens(1, 100); }), StatusCode::kOutOfRange);
  EXPECT_EQ(code([](EngineRequest& r) { r.prompt = FakeTokens(1, 99); }), StatusCode::kOk);
  // The context ends an answer.
  EngineRequest request = FakeRequest(1, 90, 0);
  EXPECT_EQ(engine.Ask(request).tokens.size(), 10u);
}

TEST(EngineService, Rule8_SnapshotsAddUp) {
  FakeEngine engine;
  engine.model.pass_time = milliseconds(1);
  auto handle = engine.Submit(FakeRequest(1, 900, 100000));
  ASSERT_TRUE(Eventually([&] {
    const auto infos = engine.service->Sequences();
    return infos.size() == 1 && infos[0].usage.sealed_pages > 12;
  }));
  const SequenceInfo info = engine.service->Sequences()[0];
  EXPECT_EQ(info.request_id, "r1");
  EXPECT_TRUE(info.running);
  EXPECT_EQ(info.pages.size(), info.usage.open_pages + info.usage.sealed_pages);
  EXPECT_EQ(info.pages.substr(0, 3), "SQQ");  // shared with the prefix index
  EXPECT_EQ(info.pages.back(), 'r');
  const EngineStats stats = engine.service->Stats();
  EXPECT_EQ(stats.running, 1);
  EXPECT_GT(stats.bits_per_element, 2.25);
  EXPECT_LT(stats.bits_per_element, 8.0);
  EXPECT_EQ(stats.kv_budget_bytes, engine.pool.budget());
  handle.reset();
  ASSERT_TRUE(Eventually([&] { return engine.Idle(); }));
  const auto kept = engine.service->Sequences();
  ASSERT_EQ(kept.size(), 1u);
  EXPECT_FALSE(kept[0].running);
  EXPECT_EQ(kept[0].pages.substr(0, 3), "sqq");
  EXPECT_EQ(engine.service->Stats().prefix_bytes, kept[0].usage.bytes);
  EXPECT_LT(kept[0].usage.bits_per_element, 8.0);
}

TEST(EngineService, Rule8_KeptBranchesShareWhatLiesAboveTheirFork) {
  FakeEngine engine;
  EngineRequest first = FakeRequest(1, 900, 1), second = first;
  second.prompt[650] = (second.prompt[650] + 1) % FakeModel::kVocab;  // page 10
  engine.Ask(first);
  engine.Ask(second);
  ASSERT_TRUE(Eventually([&] { return engine.Idle(); }));
  const auto kept = engine.service->Sequences();
  ASSERT_EQ(kept.size(), 2u);
  for (const SequenceInfo& branch : kept) {
    ASSERT_EQ(branch.pages.size(), 15u);
    for (size_t page = 0; page < branch.pages.size(); ++page) {
      EXPECT_EQ(std::isupper(branch.pages[page]) != 0, page < 10) << branch.pages << " at " << page;
    }
    EXPECT_EQ(branch.usage.shared_pages, 10u);
  }
}

// Who asked is known of running, waiting and kept sequences alike.
TEST(EngineService, Rule8_SequencesCarryTheirSalt) {
  FakeEngine engine;
  for (const char* salt : {"alice", ""}) {
    EngineRequest request = FakeRequest(1, 200, 1);
    request.cache_salt = salt;
    engine.Ask(request);
  }
  ASSERT_TRUE(Eventually([&] { return engine.Idle(); }));
  std::multiset<std::string> salts;
  for (const SequenceInfo& kept : engine.service->Sequences()) salts.insert(kept.cache_salt);
  EXPECT_EQ(salts, (std::multiset<std::string>{"", "alice"}));
}

// A page that is open and not full counts the rows it holds: a short branch is BF16, no more.
TEST(EngineService, Rule8_AShortBranchTakesSixteenBits) {
  FakeEngine engine;
  engine.Ask(FakeRequest(1, 20, 1));
  ASSERT_TRUE(Eventually([&] { return engine.Idle(); }));
  const auto kept = engine.service->Sequences();
  ASSERT_EQ(kept.size(), 1u);
  EXPECT_NEAR(kept[0].usage.bits_per_element, 16.0, 1e-9);
}

TEST(EngineService, ManyThreadsSubmitReadAndCancel) {
  EngineServiceOptions options;
  options.max_waiting = 1000;
  options.step_tokens = 64;
  FakeEngine engine(40, options, {}, 2);
  std::vector<std::thread> clients;
  std::atomic<int> wrong{0}, finished{0};
  for (uint64_t c = 0; c < 6; ++c) {
    clients.emplace_back([&, c] {
      for (uint64_t i = 0; i < 6; ++i) {
        EngineRequest request = FakeRequest(10 * c + i, 10 + 60 * i, 30);
        const Answer alone = i < 3 ? FakeEngine::Alone(request) : Answer{};
        auto handle = engine.Submit(request);
        if (i % 3 == 2) {
          handle->Next(milliseconds(static_cast<int>(c)));
          continue;  // walks away
        }
        const Answer answer = Collect(*handle);
        finished += answer.finished ? 1 : 0;
        if (i < 3 && answer.tokens != alone.tokens) ++wrong;
        engine.service->Stats();
        engine.service->Sequences();
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(wrong.load(), 0);
  EXPECT_EQ(finished.load(), 24);
  ASSERT_TRUE(Eventually([&] { return engine.Idle(); }));
  const EngineStats stats = engine.service->Stats();
  EXPECT_EQ(stats.prefix_bytes, stats.kv_bytes);
}

}  // namespace
}  // namespace oscar
