#include "engine/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <set>

namespace oscar {
namespace {

SamplingOptions Seeded(float temperature) {
  SamplingOptions options;
  options.temperature = temperature;
  options.seed = 5;
  return options;
}

TEST(Sampler, GreedyTakesTheLowestIdAmongEquals) {
  Sampler sampler(Seeded(0.0f));
  EXPECT_EQ(sampler.Sample(std::vector<float>{1, 3, 3, 2}), 1);
}

TEST(Sampler, FrequenciesFollowTheSoftmax) {
  const std::vector<float> logits = {0.0f, 1.0f, 2.0f, -1.0f};
  for (float temperature : {0.5f, 1.0f, 2.0f}) {
    Sampler sampler(Seeded(temperature));
    std::map<int32_t, int> counts;
    constexpr int kSamples = 40000;
    for (int i = 0; i < kSamples; ++i) ++counts[sampler.Sample(logits)];
    double sum = 0;
    for (float logit : logits) sum += std::exp(logit / temperature);
    for (int t = 0; t < 4; ++t) {
      const double p = std::exp(logits[static_cast<size_t>(t)] / temperature) / sum;
      EXPECT_NEAR(counts[t] / double{kSamples}, p, 4.5 * std::sqrt(p * (1 - p) / kSamples) + 1e-4);
    }
  }
}

TEST(Sampler, FiltersKeepExactlyTheRightTokens) {
  // Probabilities 0.5, 0.25, 0.125, 0.0625, ... in a shuffled order of ids.
  std::vector<float> logits(200, -50.0f);
  const std::vector<int> ids = {7, 150, 3, 90, 12};
  for (size_t i = 0; i < ids.size(); ++i) {
    logits[static_cast<size_t>(ids[i])] = -static_cast<float>(i) * std::log(2.0f);
  }
  const auto sampled = [&](const SamplingOptions& options) {
    Sampler sampler(options);
    std::set<int32_t> seen;
    for (int i = 0; i < 3000; ++i) seen.insert(sampler.Sample(logits));
    return seen;
  };
  SamplingOptions options = Seeded(1.0f);
  options.top_k = 2;
  EXPECT_EQ(sampled(options), (std::set<int32_t>{7, 150}));
  options = Seeded(1.0f);
  options.top_p = 0.7f;  // 0.516 + 0.258 reaches it
  EXPECT_EQ(sampled(options), (std::set<int32_t>{7, 150}));
  options.top_p = 0.01f;  // never empty
  EXPECT_EQ(sampled(options), (std::set<int32_t>{7}));
  options = Seeded(1.0f);
  options.min_p = 0.2f;
  EXPECT_EQ(sampled(options), (std::set<int32_t>{3, 7, 150}));
}

TEST(Sampler, TopPComesBeforeMinP) {
  // 0.4, 0.3, 0.2, 0.1: top-p 0.5 of everything keeps two, and min-p both of them; the other way
  // round, 0.4 would be more than half of what min-p had left.
  const std::vector<float> logits = {std::log(0.4f), std::log(0.3f), std::log(0.2f),
                                     std::log(0.1f)};
  SamplingOptions options = Seeded(1.0f);
  options.top_p = 0.5f;
  options.min_p = 0.6f;
  Sampler sampler(options);
  std::set<int32_t> seen;
  for (int i = 0; i < 1000; ++i) seen.insert(sampler.Sample(logits));
  EXPECT_EQ(seen, (std::set<int32_t>{0, 1}));
}

TEST(Sampler, SameSeedSameSamplesAndStepsDiffer) {
  const std::vector<float> logits(1000, 0.0f);
  Sampler a(Seeded(1.0f)), b(Seeded(1.0f));
  std::set<int32_t> seen;
  for (int i = 0; i < 50; ++i) {
    const int32_t token = a.Sample(logits);
    EXPECT_EQ(token, b.Sample(logits));
    seen.insert(token);
  }
  EXPECT_GT(seen.size(), 40u);
}

TEST(Sampler, PenaltiesAndBias) {
  SamplingOptions options = Seeded(0.0f);
  options.frequency_penalty = 1.0f;
  Sampler frequency(options);
  const std::vector<float> logits = {2.5f, 1.0f, 0.0f};
  EXPECT_EQ(frequency.Sample(logits), 0);
  EXPECT_EQ(frequency.Sample(logits), 0);  // 1.5 > 1
  EXPECT_EQ(frequency.Sample(logits), 1);  // 0.5 < 1
  options = Seeded(0.0f);
  options.repetition_penalty = 3.0f;
  Sampler repetition(options);
  repetition.ObservePrompt(std::vector<int32_t>{0});
  EXPECT_EQ(repetition.Sample(logits), 1);
  options = Seeded(0.0f);
  options.logit_bias = {{2, 10.0f}};
  EXPECT_EQ(Sampler(options).Sample(logits), 2);
}

TEST(Sampler, ValidationNamesTheField) {
  SamplingOptions options;
  EXPECT_TRUE(options.Validate(10).ok());
  options.top_p = 1.5f;
  EXPECT_EQ(options.Validate(10).param(), "top_p");
  options = {};
  options.temperature = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(options.Validate(10).param(), "temperature");
  options = {};
  options.logit_bias = {{10, 1.0f}};
  EXPECT_EQ(options.Validate(10).param(), "logit_bias");
}

TEST(Logprobs, MatchTheDefinition) {
  const std::vector<float> logits = {1.0f, 2.0f, 3.0f};
  const double sum = std::exp(1.0) + std::exp(2.0) + std::exp(3.0);
  EXPECT_NEAR(LogProbability(logits, 1), std::log(std::exp(2.0) / sum), 1e-6);
  const auto top = TopLogprobs(logits, 2);
  ASSERT_EQ(top.size(), 2u);
  EXPECT_EQ(top[0].token, 2);
  EXPECT_NEAR(top[1].logprob, std::log(std::exp(2.0) / sum), 1e-6);
}

TEST(Sampler, MaskedTokensAreNotSampled) {
  const std::vector<float> logits = {1.0f, 9.0f, 3.0f, 8.0f};
  const std::vector<int32_t> masked = {1, 3};
  SamplingOptions options;
  options.temperature = 0.0f;
  EXPECT_EQ(Sampler(options).Sample(logits, masked), 2);
  EXPECT_EQ(Sampler(options).Sample(logits), 1);
  options.temperature = 5.0f;
  options.seed = 1;
  Sampler sampler(options);
  for (int i = 0; i < 200; ++i) {
    const int32_t token = sampler.Sample(logits, masked);
    EXPECT_TRUE(token == 0 || token == 2);
  }
}

// Only what a mask leaves is there for the other options to choose from.
TEST(Sampler, WithAMaskOnlyItsTokensExist) {
  const std::vector<float> logits = {1.0f, 9.0f, 3.0f, 8.0f, -4.0f};
  const uint32_t mask = 0b10101 | 0xffffffe0u;  // bits beyond the vocabulary mean nothing
  for (const float temperature : {0.0f, 1.0f, 5.0f}) {
    for (const int top_k : {0, 1, 3}) {
      for (const float top_p : {1.0f, 0.5f}) {
        for (const float penalty : {0.0f, 2.0f}) {
          SamplingOptions options;
          options.temperature = temperature;
          options.top_k = top_k;
          options.top_p = top_p;
          options.frequency_penalty = penalty;
          options.logit_bias = {{1, 100.0f}, {4, penalty * 40.0f}};
          options.seed = 3;
          Sampler sampler(options);
          for (int i = 0; i < 50; ++i) {
            const int32_t token = sampler.Sample(logits, {}, &mask);
            EXPECT_TRUE(token == 0 || token == 2 || token == 4) << token;
          }
        }
      }
    }
  }
  // The same as if the others had never been in the vocabulary.
  SamplingOptions options;
  options.temperature = 1.0f;
  options.top_k = 2;
  options.seed = 9;
  Sampler masked(options), small(options);
  const std::vector<float> left = {1.0f, 3.0f, -4.0f};
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(masked.Sample(logits, {}, &mask), 2 * small.Sample(left));
  }
}

// A stop token that may not come yet comes all the same where the mask leaves nothing else.
TEST(Sampler, AMaskGoesBeforeMaskedTokens) {
  const std::vector<float> logits = {1.0f, 9.0f, 3.0f};
  SamplingOptions options;
  options.temperature = 0.0f;
  const uint32_t both = 0b011, only = 0b010;
  const std::vector<int32_t> stops = {1, 2, 1};
  EXPECT_EQ(Sampler(options).Sample(logits, stops, &both), 0);
  EXPECT_EQ(Sampler(options).Sample(logits, stops, &only), 1);
}

TEST(Sampler, ValuesThatAreNotFiniteShowBehindAMask) {
  std::vector<float> logits = {1.0f, 9.0f, 3.0f};
  logits[1] = std::numeric_limits<float>::quiet_NaN();
  const uint32_t mask = 0b101;
  EXPECT_EQ(Sampler(SamplingOptions()).Sample(logits, {}, &mask), SampleParams::kNotFinite);
}

}  // namespace
}  // namespace oscar
