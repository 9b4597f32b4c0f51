#include "bench/workload.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

namespace oscar {
namespace {

using Json = nlohmann::json;

TEST(Workload, RandomPromptsShareTheirBeginningAlone) {
  Workload work;
  work.prompt_tokens = 20, work.shared_tokens = 30, work.max_tokens = 9, work.vocab_size = 4096;
  const auto body = [&](uint64_t number) {
    return Json::parse(RequestBody(work, "m", number, LengthsOf(work, number)));
  };
  const Json first = body(0), second = body(1);
  EXPECT_EQ(first, body(0));
  EXPECT_EQ(first["model"], "m");
  EXPECT_EQ(first["max_tokens"], 9);
  EXPECT_EQ(first["ignore_eos"], true);
  EXPECT_EQ(first["stream_options"]["include_usage"], true);
  const auto ids = first["prompt"].get<std::vector<int>>();
  const auto others = second["prompt"].get<std::vector<int>>();
  ASSERT_EQ(ids.size(), 50u);
  EXPECT_TRUE(std::equal(ids.begin(), ids.begin() + 30, others.begin()));
  EXPECT_NE(ids[30], others[30]);
  for (const int id : ids) EXPECT_TRUE(id >= 64 && id < 4096) << id;
  work.seed = 2;
  EXPECT_NE(body(0), first);
  work.format = PromptFormat::kText;
  const std::string text = body(0)["prompt"];
  EXPECT_EQ(std::count(text.begin(), text.end(), ' '), 49);
  EXPECT_FALSE(Json::parse(RequestBody(work, "", 0, {1, 1})).contains("model"));
}

// The figures that the header states.
TEST(Workload, ChatsHaveTheStatedLengths) {
  Workload work;
  work.dataset = Dataset::kShareGptLike;
  constexpr int kCount = 40000;
  std::vector<int64_t> prompts, outputs;
  double prompt = 0, output = 0;
  for (uint64_t i = 0; i < kCount; ++i) {
    const RequestLengths lengths = LengthsOf(work, i);
    ASSERT_TRUE(lengths.prompt >= 4 && lengths.prompt <= 1024);
    ASSERT_TRUE(lengths.output >= 4 && lengths.output <= 1024);
    prompts.push_back(lengths.prompt), outputs.push_back(lengths.output);
    prompt += static_cast<double>(lengths.prompt) / kCount;
    output += static_cast<double>(lengths.output) / kCount;
  }
  EXPECT_NEAR(prompt, 215, 5);
  EXPECT_NEAR(output, 203, 4);
  std::ranges::nth_element(prompts, prompts.begin() + kCount / 2);
  std::ranges::nth_element(outputs, outputs.begin() + kCount / 2);
  EXPECT_NEAR(static_cast<double>(prompts[kCount / 2]), 95, 4);
  EXPECT_NEAR(static_cast<double>(outputs[kCount / 2]), 120, 4);
}

// Gaps of a Poisson process: exponential, so their mean is their deviation, and a share of exp(-1)
// is longer than the mean.
TEST(Workload, ArrivalsAreAPoissonProcess) {
  constexpr int kCount = 20000;
  const std::vector<double> times = Arrivals(4.0, kCount, 7);
  EXPECT_EQ(times, Arrivals(4.0, kCount, 7));
  EXPECT_NE(times, Arrivals(4.0, kCount, 8));
  EXPECT_EQ(times[0], 0.0);
  double sum = 0, squares = 0, longer = 0;
  for (size_t i = 1; i < times.size(); ++i) {
    const double gap = times[i] - times[i - 1];
    ASSERT_GE(gap, 0.0);
    sum += gap, squares += gap * gap;
    longer += gap > 0.25 ? 1 : 0;
  }
  const double mean = sum / (kCount - 1);
  EXPECT_NEAR(mean, 0.25, 0.006);
  EXPECT_NEAR(std::sqrt(squares / (kCount - 1) - mean * mean), 0.25, 0.01);
  EXPECT_NEAR(longer / (kCount - 1), std::exp(-1.0), 0.01);
  for (const double time : Arrivals(INFINITY, 5, 7)) EXPECT_EQ(time, 0.0);
}

TEST(Workload, RatesAreNumbersOrInf) {
  EXPECT_EQ(*ParseRate("2.5"), 2.5);
  EXPECT_TRUE(std::isinf(*ParseRate("inf")));
  for (const char* bad : {"", "0", "-1", "nan", "infinity", "1e999", "2x"}) {
    EXPECT_FALSE(ParseRate(bad).has_value()) << bad;
  }
}

}  // namespace
}  // namespace oscar
