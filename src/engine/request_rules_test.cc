// What a request rules out, and who comes first. Rules by number: docs/engine-contract.md.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <latch>
#include <mutex>

#include "engine/engine_test_util.h"
#include "engine/token_mask.h"

namespace oscar {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

std::shared_ptr<const TokenRules> Rules(std::vector<int32_t> allowed,
                                        std::vector<std::vector<int32_t>> bad_words) {
  return std::make_shared<TokenRules>(TokenRules{std::move(allowed), std::move(bad_words)});
}

struct Masked {
  bool some_left = false;
  std::vector<int32_t> tokens;
};

Masked MaskOf(const EngineRequest& request, const std::vector<int32_t>& generated) {
  Masked out;
  out.some_left = MaskTokens(request, generated, /*vocab_size=*/8, &out.tokens);
  return out;
}

TEST(TokenMask, StopTokensBeforeMinTokens) {
  EngineRequest request;
  EXPECT_THAT(MaskOf(request, {}).tokens, IsEmpty());
  request.stop_tokens = {5, 2, 5};
  request.min_tokens = 2;
  EXPECT_THAT(MaskOf(request, {1}).tokens, ElementsAre(2, 5));
  EXPECT_THAT(MaskOf(request, {1, 1}).tokens, IsEmpty());
}

TEST(TokenMask, BadWordsEndAtTheirLastToken) {
  EngineRequest request;
  request.rules = Rules({}, {{3}, {1, 2, 4}, {1, 2, 6}, {2, 7}});
  EXPECT_THAT(MaskOf(request, {}).tokens, ElementsAre(3));
  EXPECT_THAT(MaskOf(request, {1}).tokens, ElementsAre(3));
  EXPECT_THAT(MaskOf(request, {1, 2}).tokens, ElementsAre(3, 4, 6, 7));
  EXPECT_THAT(MaskOf(request, {2}).tokens, ElementsAre(3, 7));
  EXPECT_THAT(MaskOf(request, {1, 2, 0}).tokens, ElementsAre(3));
}

TEST(TokenMask, WhatIsAllowedAndWhatIsLeft) {
  EngineRequest request;
  request.rules = Rules({6, 1, 6}, {});
  EXPECT_THAT(MaskOf(request, {}).tokens, ElementsAre(0, 2, 3, 4, 5, 7));
  EXPECT_TRUE(MaskOf(request, {}).some_left);
  request.rules = Rules({6, 1}, {{1}, {1, 6}});
  EXPECT_TRUE(MaskOf(request, {6}).some_left);
  EXPECT_FALSE(MaskOf(request, {1}).some_left);
  request.rules = nullptr;
  request.stop_tokens = {0, 1, 2, 3, 4, 5, 6, 7};
  request.min_tokens = 1;
  EXPECT_FALSE(MaskOf(request, {}).some_left);
}

TEST(EngineService, Rule7_AllowedTokensAndBadWords) {
  for (const bool on_device : {false, true}) {
    FakeModel::Options model;
    model.samples = on_device;
    FakeEngine engine(4096, {}, model);
    for (const uint64_t seed : {2, 7}) {  // greedy, and not
      EngineRequest request = FakeRequest(seed, 20, 40);
      request.sampling.frequency_penalty = 0;
      request.sampling.repetition_penalty = 1;
      const Answer free = engine.Ask(request);
      // A run of the free answer is ruled out: the same up to it, then another token.
      request.rules = Rules({}, {{free.tokens[4], free.tokens[5]}, {free.tokens[11]}});
      const Answer without = engine.Ask(request);
      ASSERT_EQ(without.tokens.size(), 40u) << without.status.ToString();
      EXPECT_EQ(std::ranges::count(without.tokens, free.tokens[11]), 0);
      for (size_t i = 1; i < without.tokens.size(); ++i) {
        EXPECT_FALSE(without.tokens[i - 1] == free.tokens[4] && without.tokens[i] == free.tokens[5])
            << i;
      }
      EXPECT_EQ(engine.Ask(request).tokens, without.tokens) << "the same again";
      request.rules = Rules({3, 9, 4}, {{3, 9}});
      const Answer few = engine.Ask(request);
      ASSERT_EQ(few.tokens.size(), 40u);
      for (size_t i = 0; i < few.tokens.size(); ++i) {
        EXPECT_THAT(few.tokens[i], testing::AnyOf(3, 4, 9));
        EXPECT_FALSE(i > 0 && few.tokens[i - 1] == 3 && few.tokens[i] == 9);
      }
    }
  }
}

TEST(EngineService, Rule7_ARequestThatLeavesNoTokenFailsAlone) {
  FakeEngine engine;
  EngineRequest impossible = FakeRequest(2, 20, 40);
  impossible.rules = Rules({3}, {{3, 3}});
  auto other = engine.Submit(FakeRequest(4, 20, 40));
  const Answer answer = engine.Ask(impossible);
  EXPECT_FALSE(answer.finished);
  EXPECT_EQ(answer.status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(answer.tokens, std::vector<int32_t>({3}));
  EXPECT_EQ(Collect(*other).tokens.size(), 40u);
  for (const auto& rules : {Rules({-1}, {}), Rules({FakeModel::kVocab}, {}), Rules({}, {{}}),
                            Rules({}, {{1, FakeModel::kVocab}})}) {
    EngineRequest bad = FakeRequest(2, 20, 40);
    bad.rules = rules;
    EXPECT_EQ(engine.service->Submit(bad).error().code(), StatusCode::kInvalidArgument);
  }
}

TEST(EngineService, Rule2_LowerPrioritiesGoFirst) {
  EngineServiceOptions options;
  options.max_running = 1;
  FakeEngine engine(4096, options);
  std::latch all_submitted(1);
  engine.model.before_pass = [&](std::span<const ForwardItem>) { all_submitted.wait(); };
  std::mutex mutex;
  std::vector<int> order;
  std::vector<std::unique_ptr<RequestHandle>> handles;
  const std::vector<int64_t> priorities = {0, 5, 0, -3, 0, 5, -3};
  for (int i = 0; i < static_cast<int>(priorities.size()); ++i) {
    EngineRequest request = FakeRequest(static_cast<uint64_t>(i), 20, 3);
    request.priority = priorities[static_cast<size_t>(i)];
    request.on_event = [&, i] {
      const std::lock_guard lock(mutex);
      if (std::ranges::find(order, i) == order.end()) order.push_back(i);
    };
    handles.push_back(engine.Submit(std::move(request)));
    // The first one runs before the others come.
    if (i == 0) {
      ASSERT_TRUE(Eventually([&] {
        const std::lock_guard lock(mutex);
        return !order.empty();
      }));
    }
  }
  all_submitted.count_down();
  for (auto& handle : handles) EXPECT_EQ(Collect(*handle).tokens.size(), 3u);
  const std::lock_guard lock(mutex);
  EXPECT_THAT(order, ElementsAre(0, 3, 6, 2, 4, 1, 5));
}

TEST(EngineService, Rule3_PrioritiesChangeNoAnswer) {
  // So little room that sequences are preempted, the last of the lowest first.
  EngineServiceOptions options;
  options.max_running = 8;
  FakeEngine engine(24, options);
  std::vector<EngineRequest> requests;
  std::vector<std::unique_ptr<RequestHandle>> handles;
  for (uint64_t i = 0; i < 16; ++i) {
    requests.push_back(FakeRequest(100 + i, 30 + 23 * i, 150));
    requests.back().priority = static_cast<int64_t>(i % 3) - 1;
    handles.push_back(engine.Submit(requests.back()));
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    const Answer answer = Collect(*handles[i]);
    EXPECT_TRUE(answer.finished) << answer.status.ToString();
    EXPECT_EQ(answer.tokens, FakeEngine::Alone(requests[i]).tokens) << i;
  }
  EXPECT_GT(engine.service->Stats().preemptions, 0u);
}

}  // namespace
}  // namespace oscar
