#include "cache/attention_reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

namespace oscar {
namespace {

TEST(AttentionReference, CaseNamesAreUnique) {
  std::set<std::string> names;
  for (const AttentionCase& c : AttentionCases()) EXPECT_TRUE(names.insert(c.Name()).second);
  EXPECT_GT(names.size(), 60u);
}

// Two tokens, worked by hand: logits 0 and ln 3 weigh the values 1/4 and 3/4.
TEST(AttentionReference, TwoTokensByHand) {
  const float log3 = std::log(3.0f);
  const std::vector<float> q = {1.0f, 0.0f}, k = {0.0f, 7.0f, log3, -2.0f},
                           v = {4.0f, 8.0f, 8.0f, 0.0f};
  std::vector<double> out(2);
  ReferenceAttention(q, k, v, 2, 1.0, out);
  EXPECT_NEAR(out[0], 7.0, 1e-6);
  EXPECT_NEAR(out[1], 2.0, 1e-6);
  ReferenceAttention(q, k, v, 1, 1.0, out);  // the limit hides the second token
  EXPECT_NEAR(out[0], 4.0, 1e-12);
}

TEST(AttentionReference, BothOrdersDecodeToTheSameRows) {
  const AttentionCase c{.head_dim = 64, .group_dims = 32, .num_pages = 2};
  const auto cpu = MakeAttentionInputs(c, CodeOrder::kCpu);
  const auto gpu = MakeAttentionInputs(c, CodeOrder::kTensorCore);
  for (int h = 0; h < c.kv_heads; ++h) {
    EXPECT_EQ(DecodeKvHead(c, cpu, h).k, DecodeKvHead(c, gpu, h).k);
    EXPECT_EQ(DecodeKvHead(c, cpu, h).v, DecodeKvHead(c, gpu, h).v);
  }
}

TEST(AttentionReference, RelativeL2SeesNaNAndZero) {
  const std::vector<double> zero(2, 0.0);
  EXPECT_EQ(RelativeL2(std::vector<float>{0.0f, 0.0f}, zero), 0.0);
  EXPECT_TRUE(std::isinf(RelativeL2(std::vector<float>{std::nanf(""), 0.0f}, zero)));
  const std::vector<double> nan = {1.0, std::nan("")};
  EXPECT_TRUE(std::isinf(RelativeL2(std::vector<float>{1.0f, 1.0f}, nan)));
  EXPECT_NEAR(RelativeL2(std::vector<float>{3.0f, 4.0f}, std::vector<double>{3.0, 0.0}), 4.0 / 3,
              1e-6);
}

}  // namespace
}  // namespace oscar
