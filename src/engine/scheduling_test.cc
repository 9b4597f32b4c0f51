// How prompts share passes (docs/engine-contract.md, 2.1 to 2.1b), on the model whose answers tell
// every cache state apart.
#include <gtest/gtest.h>

#include <latch>
#include <set>

#include "engine/engine_test_util.h"

namespace oscar {
namespace {

// One pass: prompt tokens by the sequence they are of, and how many sequences generated.
struct Pass {
  std::map<const SequenceCache*, size_t> prompts;
  int decoders = 0;
  size_t prompt_tokens() const {
    size_t sum = 0;
    for (const auto& [cache, count] : prompts) sum += count;
    return sum;
  }
};

// An engine whose passes are kept, and wait until everything has been submitted.
struct WatchedEngine {
  explicit WatchedEngine(const EngineServiceOptions& options,
                         const FakeModel::Options& model_options = {})
      : engine(4096, options, model_options) {
    engine.model.before_pass = [this](std::span<const ForwardItem> items) {
      submitted.wait();
      Pass& pass = passes.emplace_back();
      for (const ForwardItem& item : items) {
        if (item.is_prompt) {
          pass.prompts[item.cache] += item.tokens.size();
        } else {
          ++pass.decoders;
        }
      }
      if (per_token.count() > 0) std::this_thread::sleep_for(per_token * pass.prompt_tokens());
    };
  }
  std::vector<Answer> Ask(const std::vector<EngineRequest>& requests) {
    std::vector<std::unique_ptr<RequestHandle>> handles;
    for (const EngineRequest& request : requests) handles.push_back(engine.Submit(request));
    submitted.count_down();
    std::vector<Answer> answers;
    for (auto& handle : handles) answers.push_back(Collect(*handle));
    return answers;
  }
  std::latch submitted{1};
  std::vector<Pass> passes;  // of the engine's thread, until it is idle
  std::chrono::microseconds per_token{0};
  FakeEngine engine;  // last: its thread uses the others
};

EngineServiceOptions WithSteps(int step_tokens) {
  EngineServiceOptions options;
  options.step_tokens = step_tokens;
  options.prefix_cache = false;
  return options;
}

void ExpectAsAlone(const std::vector<EngineRequest>& requests, const std::vector<Answer>& answers,
                   const FakeModel::Options& model = {}) {
  ASSERT_EQ(requests.size(), answers.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(answers[i].tokens, FakeEngine::Alone(requests[i], model).tokens) << i;
  }
}

TEST(Scheduling, ShortPromptsShareAPass) {
  WatchedEngine watched(WithSteps(256));
  std::vector<EngineRequest> requests = {FakeRequest(99, 3, 2)};  // holds the first pass
  for (uint64_t i = 0; i < 12; ++i) requests.push_back(FakeRequest(i, 15 + i, 4));
  ExpectAsAlone(requests, watched.Ask(requests));
  // 12 prompts are 246 tokens. The first pass has as many of them as came before it was planned.
  const auto has_prompts = [](const Pass& pass) { return !pass.prompts.empty(); };
  EXPECT_LE(std::ranges::count_if(watched.passes, has_prompts), 3);
}

// The pass in which a prompt's last token was read: where its share of passes ends.
size_t LastPassOf(const std::vector<Pass>& passes, size_t tokens) {
  std::map<const SequenceCache*, size_t> read;
  for (size_t i = 0; i < passes.size(); ++i) {
    for (const auto& [cache, count] : passes[i].prompts) {
      if ((read[cache] += count) == tokens) return i;
    }
  }
  ADD_FAILURE() << "no prompt of " << tokens << " tokens was read";
  return 0;
}

TEST(Scheduling, ShortPromptsDoNotWaitForLongOnes) {
  WatchedEngine watched(WithSteps(64));
  std::vector<EngineRequest> requests;
  for (uint64_t i = 0; i < 5; ++i) requests.push_back(FakeRequest(i, 3000 + i, 2));
  requests.push_back(FakeRequest(5, 100, 2));
  requests.push_back(FakeRequest(6, 40, 2));
  ExpectAsAlone(requests, watched.Ask(requests));
  // 140 tokens at half a pass of 64, a few passes more for what generates meanwhile.
  EXPECT_LE(LastPassOf(watched.passes, 40), 4u);
  EXPECT_LE(LastPassOf(watched.passes, 100), 8u);
  // The first loses half of those at most, and the long ones end in their order.
  EXPECT_LE(LastPassOf(watched.passes, 3000), 3000u / 64 + 10);
  for (size_t i = 0; i + 1 < 5; ++i) {
    EXPECT_LT(LastPassOf(watched.passes, 3000 + i), LastPassOf(watched.passes, 3001 + i)) << i;
  }
}

// However many short prompts keep coming, the first in rank has half.
TEST(Scheduling, LongPromptsDoNotStarve) {
  WatchedEngine watched(WithSteps(64));
  std::vector<EngineRequest> requests = {FakeRequest(0, 2000, 2)};
  for (uint64_t i = 1; i <= 100; ++i) requests.push_back(FakeRequest(i, 61, 1));
  ExpectAsAlone(requests, watched.Ask(requests));
  const size_t last = LastPassOf(watched.passes, 2000);
  EXPECT_LE(last, 2000u / 28);  // an eighth of a pass may go to what generates
  size_t others = 0;
  for (size_t i = 0; i < last; ++i) others += watched.passes[i].prompt_tokens();
  EXPECT_GE(others, 2000u + 1500u);
}

TEST(Scheduling, PrioritiesComeBeforeLength) {
  WatchedEngine watched(WithSteps(64));
  std::vector<EngineRequest> requests = {FakeRequest(0, 3, 1), FakeRequest(1, 2000, 2),
                                         FakeRequest(2, 50, 2)};
  requests[1].priority = -1;
  ExpectAsAlone(requests, watched.Ask(requests));
  EXPECT_GE(LastPassOf(watched.passes, 50), LastPassOf(watched.passes, 2000));
}

// Passes with prompts keep near the target while somebody generates, and are full where nobody
// does. Sleeping takes longer than asked for, never less, so the bounds hold on a busy machine.
TEST(Scheduling, ChunksFollowTheTargetTime) {
  EngineServiceOptions options = WithSteps(512);
  options.target_pass_seconds = 0.004;
  FakeModel::Options model;
  model.cell = 4096;
  WatchedEngine watched(options, model);
  watched.per_token = std::chrono::microseconds(100);
  const std::vector<EngineRequest> requests = {FakeRequest(0, 10, 400), FakeRequest(1, 3500, 2)};
  ExpectAsAlone(requests, watched.Ask(requests), model);
  std::vector<size_t> mixed;
  for (const Pass& pass : watched.passes) {
    if (pass.decoders > 0 && !pass.prompts.empty()) mixed.push_back(pass.prompt_tokens());
  }
  ASSERT_GE(mixed.size(), 3500u / 64);
  for (size_t i = 0; i < mixed.size(); ++i) {
    EXPECT_LE(mixed[i], i < 4 ? 64u : 41u) << i;
    // The last has what is left of the prompt.
    if (i + 1 < mixed.size()) {
      EXPECT_GE(mixed[i], 4u) << i;
    }
  }
  WatchedEngine alone(options, model);
  alone.per_token = watched.per_token;
  const std::vector<EngineRequest> one = {FakeRequest(1, 3500, 2)};
  ExpectAsAlone(one, alone.Ask(one), model);
  EXPECT_EQ(alone.passes.front().prompt_tokens(), 512u);
  EXPECT_EQ(alone.passes[3].prompt_tokens(), 512u);
}

// Answers are those of each request alone for any target, pass size and memory.
TEST(Scheduling, ChangesNoAnswer) {
  for (const int step_tokens : {1, 7, 64, 300}) {
    for (const double target : {0.0, 1e-6, 0.001}) {
      EngineServiceOptions options = WithSteps(step_tokens);
      options.target_pass_seconds = target;
      FakeEngine engine(40, options);
      std::vector<EngineRequest> requests;
      for (uint64_t i = 0; i < 10; ++i) {
        requests.push_back(FakeRequest(i, 20 + (i * 137) % 500, 12));
      }
      std::vector<std::unique_ptr<RequestHandle>> handles;
      for (const EngineRequest& request : requests) handles.push_back(engine.Submit(request));
      std::vector<Answer> answers;
      for (auto& handle : handles) answers.push_back(Collect(*handle));
      ExpectAsAlone(requests, answers);
    }
  }
}

}  // namespace
}  // namespace oscar
