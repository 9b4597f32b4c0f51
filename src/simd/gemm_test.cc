#include "simd/gemm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "base/rng.h"
#include "simd/dispatch.h"

namespace oscar::simd {
namespace {

struct Problem {
  int outputs, inputs;
  std::vector<Bf16> w;
  std::vector<float> x;  // [rows, inputs]
  Problem(int n, int k, int rows) : outputs(n), inputs(k) {
    const Philox wr(3, 1), xr(3, 2);
    w.resize(static_cast<size_t>(n) * static_cast<size_t>(k));
    for (size_t i = 0; i < w.size(); ++i) w[i] = ToBf16(wr.Normal(i));
    x.resize(static_cast<size_t>(rows) * static_cast<size_t>(k));
    for (size_t i = 0; i < x.size(); ++i) x[i] = xr.Normal(i);
  }
};

std::vector<float> Multiply(ThreadPool& pool, const PackedMatrix& w, const Problem& p,
                            int first_row, int rows, const float* bias = nullptr) {
  GemmWorkspace workspace;
  const auto n = static_cast<size_t>(p.outputs), k = static_cast<size_t>(p.inputs);
  std::vector<float> y(static_cast<size_t>(rows) * n, -1.0f);
  Gemm(pool, workspace, p.x.data() + static_cast<size_t>(first_row) * k, rows, k, w, bias, y.data(),
       n);
  return y;
}

class GemmTest : public testing::TestWithParam<std::tuple<Target, GemmPath>> {
 protected:
  void SetUp() override {
    if (!IsSupported(path())) GTEST_SKIP() << GemmPathName(path()) << " is not on this machine";
  }
  static GemmPath path() { return std::get<1>(GetParam()); }
  ScopedTarget target_{std::get<0>(GetParam())};
};

TEST_P(GemmTest, MatchesTheReferenceForAnyShape) {
  ThreadPool pool(2);
  for (const auto& [n, k, m] : {std::tuple{1, 1, 1},
                                {31, 17, 1},
                                {33, 64, 2},
                                {64, 300, 13},
                                {96, 257, 25},
                                {100, 513, 12},
                                {40, 33, 250},
                                {70, 2100, 20},     // more than one slice of inputs
                                {70, 4200, 40}}) {  // and more than stay in a cache
    const Problem p(n, k, m);
    PackedMatrix w(n, k, path());
    w.PackRows(pool, 0, n, std::span<const Bf16>(p.w));
    std::vector<float> bias(static_cast<size_t>(n));
    for (int j = 0; j < n; ++j) bias[static_cast<size_t>(j)] = static_cast<float>(j);
    const auto y = Multiply(pool, w, p, 0, m, bias.data());
    for (int r = 0; r < m; ++r) {
      for (int j = 0; j < n; ++j) {
        double sum = j;
        float fused = 0.0f;
        for (int i = 0; i < k; ++i) {
          float x = p.x[static_cast<size_t>(r * k + i)];
          if (path() != GemmPath::kFma) x = ToFloat(ToBf16(x));
          const float weight = ToFloat(p.w[static_cast<size_t>(j * k + i)]);
          sum += static_cast<double>(x) * weight;
          fused = std::fma(x, weight, fused);
        }
        const float actual = y[static_cast<size_t>(r * n + j)];
        if (path() == GemmPath::kFma) {
          // Exactly the stated arithmetic: one fused chain, then the bias.
          ASSERT_EQ(actual, fused + bias[static_cast<size_t>(j)]) << n << "x" << k << " row " << r;
        }
        ASSERT_NEAR(actual, sum, 1e-5 * std::sqrt(k) * 4 + 1e-6 * n);
      }
    }
  }
}

TEST_P(GemmTest, ARowDoesNotDependOnItsCompanyOrTheThreads) {
  ThreadPool one(1), three(3);
  for (const auto& [n, k, m] : {std::tuple{70, 600, 300},
                                {300, 2100, 140},
                                {40, 4200, 50},
                                {1060, 1600, 140}}) {  // large tasks where there are few threads
    const Problem p(n, k, m);
    PackedMatrix w(n, k, path());
    w.PackRows(three, 0, n, std::span<const Bf16>(p.w));
    const auto whole = Multiply(three, w, p, 0, m);
    EXPECT_EQ(whole, Multiply(one, w, p, 0, m));
    for (const auto& [first, rows] : {std::pair{0, 1},
                                      {17, 1},
                                      {5, 2},
                                      {3, 31},
                                      {3, 33},
                                      {100, 16},
                                      {239, 13},
                                      {3, 130},
                                      {3, 250}}) {
      if (first + rows > m) continue;
      const auto part = Multiply(three, w, p, first, rows);
      for (size_t i = 0; i < part.size(); ++i) {
        ASSERT_EQ(part[i], whole[static_cast<size_t>(first * n) + i]) << first << " " << rows;
      }
    }
  }
}

// Times the identity, activations come back as the path rounded them.
TEST_P(GemmTest, RoundsActivationsToNearestEven) {
  ThreadPool pool(2);
  const int n = 45, m = 37;
  Problem p(n, n, m);
  for (int i = 0; i < n * n; ++i) {
    p.w[static_cast<size_t>(i)] = ToBf16(i % (n + 1) == 0 ? 1.0f : 0.0f);
  }
  for (int i = 0; i < 2 * n; ++i) {  // ties, both signs, and their neighbours
    const float tie = 1.0f + static_cast<float>(2 * (i % 20) + 1) / 256.0f;
    const float near = i % 3 == 0 ? tie : std::nextafter(tie, i % 3 == 1 ? 0.0f : 9.0f);
    p.x[static_cast<size_t>(i)] = i % 2 == 0 ? near : -near;
  }
  p.x[static_cast<size_t>(20 * n + 7)] = std::numeric_limits<float>::quiet_NaN();
  PackedMatrix w(n, n, path());
  w.PackRows(pool, 0, n, std::span<const Bf16>(p.w));
  const auto y = Multiply(pool, w, p, 0, m);
  for (int i = 0; i < m * n; ++i) {
    const float x = p.x[static_cast<size_t>(i)], actual = y[static_cast<size_t>(i)];
    if (i / n == 20) {
      ASSERT_TRUE(std::isnan(actual)) << i;
    } else {
      ASSERT_EQ(actual, path() == GemmPath::kFma ? x : ToFloat(ToBf16(x))) << i;
    }
  }
}

TEST_P(GemmTest, PacksEverySourceTypeAndStacks) {
  ThreadPool pool(2);
  const int k = 50;
  const Problem p(40, k, 1);
  std::vector<float> f32;
  std::vector<Fp16> f16;
  for (const Bf16 w : p.w) {
    f32.push_back(ToFloat(w) * 1.001f);
    f16.push_back(ToFp16(ToFloat(w)));
  }
  PackedMatrix w(120, k, path());
  w.PackRows(pool, 0, 40, std::span<const Bf16>(p.w));
  w.PackRows(pool, 40, 40, std::span<const float>(f32));
  w.PackRows(pool, 80, 40, std::span<const Fp16>(f16));
  for (int n = 0; n < 40; ++n) {
    for (int i = 0; i < k; ++i) {
      const auto at = static_cast<size_t>(n * k + i);
      ASSERT_EQ(w.At(n, i), p.w[at]);
      ASSERT_EQ(w.At(n + 40, i), ToBf16(f32[at]));
      ASSERT_EQ(w.At(n + 80, i), ToBf16(ToFloat(f16[at])));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Paths, GemmTest,
    testing::Combine(testing::ValuesIn(SupportedTargets().begin(), SupportedTargets().end()),
                     testing::Values(GemmPath::kFma, GemmPath::kAvx512Bf16, GemmPath::kAmxBf16)));

}  // namespace
}  // namespace oscar::simd
