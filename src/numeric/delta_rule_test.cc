#include "numeric/delta_rule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "base/rng.h"

namespace oscar {
namespace {

// By hand: write 2 by half, halve, then write 1 along another key.
TEST(DeltaRule, TwoTokensByHand) {
  const std::vector<double> q = {1, 0, 0, 1}, k = {1, 0, 0.6, 0.8}, v = {2, 1};
  const std::vector<double> log_decay = {0, std::log(0.5)}, beta = {0.5, 1};
  for (const int chunk : {0, 1, 2, 64}) {
    std::vector<double> state(2, 0.0), out(2);
    const DeltaRuleTokens tokens{q, k, v, log_decay, beta};
    if (chunk == 0) {
      DeltaRuleRecurrent(tokens, state, out);
    } else {
      DeltaRuleChunked(tokens, chunk, state, out);
    }
    EXPECT_NEAR(out[0], 1.0, 1e-15);
    EXPECT_NEAR(out[1], 0.56, 1e-15);
    EXPECT_NEAR(state[0], 0.92, 1e-15);
    EXPECT_NEAR(state[1], 0.56, 1e-15);
  }
}

// From a state that is not zero, with decays from none to nearly all.
TEST(DeltaRule, ChunkedIsRecurrent) {
  constexpr size_t kTokens = 150, kKey = 24, kValue = 20;
  const Philox rng(3, 0);
  uint64_t next = 0;
  const auto random = [&] { return static_cast<double>(rng.Bits(next++)) / 4294967296.0 - 0.5; };
  std::vector<double> q(kTokens * kKey), k(q.size()), v(kTokens * kValue), decay(kTokens),
      beta(kTokens), start(kKey * kValue);
  for (auto* values : {&q, &k, &v, &start}) {
    for (double& x : *values) x = random();
  }
  for (size_t t = 0; t < kTokens; ++t) {
    double squares = 0.0;
    for (size_t d = 0; d < kKey; ++d) squares += k[t * kKey + d] * k[t * kKey + d];
    for (size_t d = 0; d < kKey; ++d) k[t * kKey + d] /= std::sqrt(squares);
    decay[t] = t % 9 == 0 ? 0.0 : t % 11 == 0 ? -20.0 : random() - 0.5;
    beta[t] = t % 7 == 0 ? 1.0 : random() + 0.5;
  }
  const DeltaRuleTokens tokens{q, k, v, decay, beta};
  std::vector<double> state = start, out(kTokens * kValue);
  DeltaRuleRecurrent(tokens, state, out);
  double largest = 0.0;
  for (const double x : out) largest = std::max(largest, std::fabs(x));
  EXPECT_GT(largest, 0.1);
  for (const int chunk : {1, 7, 64, 150, 1000}) {
    std::vector<double> other = start, other_out(out.size());
    DeltaRuleChunked(tokens, chunk, other, other_out);
    for (size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(other_out[i], out[i], 1e-12) << chunk;
    for (size_t i = 0; i < state.size(); ++i) EXPECT_NEAR(other[i], state[i], 1e-12) << chunk;
  }
}

}  // namespace
}  // namespace oscar
