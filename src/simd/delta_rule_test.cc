#include "simd/delta_rule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "base/rng.h"
#include "numeric/delta_rule.h"
#include "simd/dispatch.h"

namespace oscar::simd {
namespace {

// One head of made-up tokens, keys of length 1.
struct Head {
  int tokens, key_dim, value_dim;
  std::vector<float> qkv, decay, beta, state, out;
  size_t width() const { return static_cast<size_t>(2 * key_dim + value_dim); }

  Head(int num_tokens, int keys, int values)
      : tokens(num_tokens), key_dim(keys), value_dim(values) {
    const Philox rng(11, 0);
    uint64_t next = 0;
    const auto fill = [&](std::vector<float>* x, size_t size) {
      x->resize(size);
      for (float& value : *x) value = rng.Normal(next++);
    };
    fill(&qkv, static_cast<size_t>(tokens) * width());
    fill(&state, static_cast<size_t>(key_dim * value_dim));
    for (int t = 0; t < tokens; ++t) {
      for (int part = 0; part < 2; ++part) {
        float* const x = qkv.data() + static_cast<size_t>(t) * width() + part * key_dim;
        double squares = 0.0;
        for (int d = 0; d < key_dim; ++d) squares += static_cast<double>(x[d]) * x[d];
        for (int d = 0; d < key_dim; ++d) x[d] /= static_cast<float>(std::sqrt(squares));
      }
      decay.push_back(t % 5 == 0 ? 1.0f : 0.5f + 0.01f * static_cast<float>(t % 50));
      beta.push_back(t % 7 == 0 ? 1.0f : 0.3f);
    }
    out.resize(static_cast<size_t>(tokens * value_dim));
  }
  // Tokens [first, end), columns [column, column + count).
  void Run(int first, int end, int column, int count) {
    const float* const row = qkv.data() + static_cast<size_t>(first) * width();
    RunDeltaRule({row, row + key_dim, row + 2 * key_dim + column, width(), decay.data() + first,
                  beta.data() + first, 1, state.data() + column, static_cast<size_t>(value_dim),
                  out.data() + first * value_dim + column, static_cast<size_t>(value_dim),
                  end - first, key_dim, count});
  }
};

class DeltaRuleTest : public testing::TestWithParam<Target> {
 protected:
  ScopedTarget target_{GetParam()};
};

TEST_P(DeltaRuleTest, MatchesTheSpecification) {
  for (const auto& [keys, values] : {std::pair{128, 128}, {16, 40}, {17, 7}, {1, 1}, {64, 33}}) {
    Head head(70, keys, values);
    std::vector<double> q, k, v, log_decay, beta(head.beta.begin(), head.beta.end());
    for (int t = 0; t < head.tokens; ++t) {
      const float* row = head.qkv.data() + static_cast<size_t>(t) * head.width();
      q.insert(q.end(), row, row + keys);
      k.insert(k.end(), row + keys, row + 2 * keys);
      v.insert(v.end(), row + 2 * keys, row + 2 * keys + values);
      log_decay.push_back(std::log(static_cast<double>(head.decay[static_cast<size_t>(t)])));
    }
    std::vector<double> state(head.state.begin(), head.state.end()), out(head.out.size());
    DeltaRuleRecurrent({q, k, v, log_decay, beta}, state, out);
    head.Run(0, head.tokens, 0, values);
    for (size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(head.out[i], out[i], 2e-5) << keys;
    for (size_t i = 0; i < state.size(); ++i) EXPECT_NEAR(head.state[i], state[i], 2e-5) << keys;
  }
}

// However tokens and columns are divided, and on every instruction set: the same bits.
TEST_P(DeltaRuleTest, DivisionsDoNotShow) {
  Head whole(45, 24, 100);
  {
    const ScopedTarget narrow(Target::kAvx2);
    whole.Run(0, 45, 0, 100);
  }
  Head parts(45, 24, 100);
  for (const auto& [first, end] : {std::pair{0, 1}, {1, 20}, {20, 45}}) {
    for (int column = 0; column < 100; column += 32) {
      parts.Run(first, end, column, std::min(32, 100 - column));
    }
  }
  EXPECT_EQ(parts.out, whole.out);
  EXPECT_EQ(parts.state, whole.state);
}

INSTANTIATE_TEST_SUITE_P(Targets, DeltaRuleTest,
                         testing::ValuesIn(SupportedTargets().begin(), SupportedTargets().end()));

}  // namespace
}  // namespace oscar::simd
