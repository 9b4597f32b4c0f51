#include "measure/head_sensitivity.h"

#include <gtest/gtest.h>

#include "base/rng.h"

namespace oscar {
namespace {

Sensitivities Of(std::vector<double> keys) {
  Sensitivities out;
  for (size_t i = 0; i < keys.size(); ++i) out.layers[static_cast<int>(i)] = {{keys[i], 0.0}};
  return out;
}

TEST(RankCorrelation, IsSpearmans) {
  EXPECT_NEAR(RankCorrelation(Of({1, 2, 3}), Of({10, 20, 30})), 1.0, 1e-12);
  // Half of the sides are tied at 0: 2, 3, 4 of ranks 3, 4, 5 in the other order.
  EXPECT_LT(RankCorrelation(Of({1, 2, 3}), Of({3, 2, 1})), 1.0);
  EXPECT_EQ(RankCorrelation(Of({0, 0}), Of({1, 2})), 0.0);
}

std::vector<std::vector<int32_t>> Texts(size_t length) {
  std::vector<std::vector<int32_t>> out;
  const Philox random(7, 0);
  for (uint64_t s = 0; s < 2; ++s) {
    auto& text = out.emplace_back(length);
    for (size_t i = 0; i < length; ++i) {
      text[i] = static_cast<int32_t>(10 + random.Below(s * length + i, 2000));
    }
  }
  return out;
}

TEST(MeasureSensitivities, EveryHeadOfTheModelHasAPlace) {
  SensitivityOptions options;
  options.model.model = OSCAR_DEMO_MODEL;
  options.model.num_threads = 2;
  options.show_progress = false;
  for (const bool proxy : {false, true}) {
    options.use_proxy = proxy;
    const auto measured = MeasureSensitivities(options, Texts(640));
    ASSERT_TRUE(measured.has_value()) << measured.error().ToString();
    const Sensitivities& found = measured->sensitivities;
    EXPECT_EQ(found.rotation, "hadamard");
    EXPECT_EQ(found.measure, proxy ? "proxy" : "kl");
    EXPECT_EQ(found.tokens, 2 * 48);  // no answers
    EXPECT_EQ(measured->num_sequences, 2);
    ASSERT_EQ(found.layers.size(), 8u);
    double largest = 0;
    for (const auto& [id, heads] : found.layers) {
      ASSERT_EQ(heads.size(), 2u);
      for (const HeadSensitivity& head : heads) largest = std::max({largest, head.k, head.v});
    }
    EXPECT_GT(largest, 0.0);
    if (!proxy) {
      EXPECT_GT(measured->kl_at_2, measured->kl_at_4);
    }
    // The same again: it is written to a file.
    const auto again = MeasureSensitivities(options, Texts(640));
    ASSERT_TRUE(again.has_value());
    EXPECT_EQ(again->sensitivities, found);
  }
}

TEST(MeasureSensitivities, AnswersAreComparedAsFarAsHistoryReaches) {
  SensitivityOptions options;
  options.model.model = OSCAR_DEMO_MODEL;
  options.model.num_threads = 2;
  options.use_proxy = true;
  options.show_progress = false;
  const auto compared = [&](size_t length, int64_t answer) {
    const auto measured = MeasureSensitivities(options, Texts(length), std::vector{answer, answer});
    return measured.has_value() ? measured->sensitivities.tokens : -1;
  };
  EXPECT_EQ(compared(900, 300), 2 * 256);  // at most
  EXPECT_EQ(compared(900, 20), 2 * 20);
  EXPECT_EQ(compared(600, 300), 2 * (600 - 64 - 256 - 2 * 64));  // the rest sees no history
}

TEST(MeasureSensitivities, TextsThatStayInTheWindowsAreRefused) {
  SensitivityOptions options;
  options.model.model = OSCAR_DEMO_MODEL;
  options.show_progress = false;
  const auto measured = MeasureSensitivities(options, Texts(400));
  ASSERT_FALSE(measured.has_value());
  EXPECT_EQ(measured.error().code(), StatusCode::kOutOfRange);
}

}  // namespace
}  // namespace oscar
