#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "base/fp8.h"
#include "base/mxfp4.h"
#include "base/rng.h"
#include "simd/dispatch.h"
#include "simd/gemm.h"
#include "simd/gemm_kernels.h"

namespace oscar::simd {
namespace {

float F8E4M3ToFloat(uint8_t code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

TEST(Fp8Kernels, ExpandGivesEveryCodeExactly) {
  for (const Target target : SupportedTargets()) {
    const ScopedTarget scoped(target);
    std::vector<uint8_t> codes;
    for (int i = 0; i < 256; ++i) {
      if ((i & 0x7f) != kF8E4M3Nan) codes.push_back(static_cast<uint8_t>(i));
    }
    codes.resize(256, 0x38);
    const size_t count = codes.size();
    codes.resize(count + kFp8Slack);
    std::vector<uint16_t> out(count + kFp8Slack);
    ActiveFp8Kernels().expand(codes.data(), out.data(), count);
    for (size_t i = 0; i < count; ++i) {
      ASSERT_EQ(out[i], ToBf16(F8E4M3ToFloat(codes[i])).bits) << static_cast<int>(codes[i]);
    }
  }
}

// `experts` matrices [n, k], each either BF16 or FP8 with scales for blocks of `rows` x `columns`.
struct Experts {
  int n, k;
  std::vector<std::vector<float>> values;         // as the kernels see weights, multiplied out
  std::vector<std::vector<float>> codes, scales;  // FP8: value = code * scale, scales [n, segments]
  std::vector<PackedMatrix> packed;

  Experts(ThreadPool& pool, int count, int outputs, int inputs, GemmPath path, int rows,
          int columns)
      : n(outputs), k(inputs) {
    for (int e = 0; e < count; ++e) {
      const Philox rng(7, static_cast<uint64_t>(e));
      const auto size = static_cast<size_t>(n) * static_cast<size_t>(k);
      std::vector<float> value(size), code(size), scale;
      if (columns == 0) {
        std::vector<Bf16> w(size);
        for (size_t i = 0; i < size; ++i) {
          w[i] = ToBf16(rng.Normal(i));
          value[i] = code[i] = ToFloat(w[i]);
        }
        packed.emplace_back(n, k, path);
        packed.back().PackRows(pool, 0, n, std::span<const Bf16>(w));
      } else {
        const int segments = (k + columns - 1) / columns;
        std::vector<uint8_t> bytes(size);
        scale.resize(static_cast<size_t>(n * segments));
        for (int r = 0; r < n; ++r) {
          for (int s = 0; s < segments; ++s) {
            const auto block = static_cast<uint64_t>(r / rows * segments + s);
            scale[static_cast<size_t>(r * segments + s)] =
                0.01f * (1.0f + std::fabs(rng.Normal((uint64_t{1} << 30) + block)));
          }
          for (int i = 0; i < k; ++i) {
            const auto at =
                static_cast<size_t>(r) * static_cast<size_t>(k) + static_cast<size_t>(i);
            // Subnormal codes among them.
            bytes[at] = ToF8E4M3(rng.Normal(at) * (i % 3 == 0 ? 0.01f : 20.0f));
            code[at] = F8E4M3ToFloat(bytes[at]);
            value[at] = code[at] * scale[static_cast<size_t>(r * segments + i / columns)];
          }
        }
        packed.push_back(PackedMatrix::Fp8(n, k, columns, path));
        // In two parts, as gate and up are.
        const int half = n / 2;
        const auto cut = static_cast<size_t>(half) * static_cast<size_t>(k);
        const auto scale_cut = static_cast<size_t>(half * segments);
        const std::span<const uint8_t> all(bytes);
        const std::span<const float> all_scales(scale);
        packed.back().PackFp8Rows(pool, 0, half, all.first(cut), all_scales.first(scale_cut));
        packed.back().PackFp8Rows(pool, half, n - half, all.subspan(cut),
                                  all_scales.subspan(scale_cut));
      }
      values.push_back(std::move(value));
      codes.push_back(std::move(code));
      scales.push_back(std::move(scale));
    }
  }
};

using Rows = std::vector<std::vector<int32_t>>;

// [expert][row] outputs.
std::vector<std::vector<float>> Multiply(ThreadPool& pool, const Experts& experts,
                                         const std::vector<float>& x, const Rows& rows) {
  GroupedGemmWorkspace workspace;
  std::vector<std::vector<float>> y(rows.size());
  std::vector<GemmGroup> groups;
  for (size_t e = 0; e < rows.size(); ++e) {
    y[e].assign(rows[e].size() * static_cast<size_t>(experts.n), -1.0f);
    if (!rows[e].empty()) groups.push_back({&experts.packed[e], rows[e], y[e].data()});
  }
  GroupedGemm(pool, workspace, x.data(), static_cast<size_t>(experts.k), groups);
  return y;
}

class GroupedGemmTest : public testing::TestWithParam<std::tuple<Target, GemmPath>> {
 protected:
  void SetUp() override {
    if (!IsSupported(path())) GTEST_SKIP() << GemmPathName(path()) << " is not on this machine";
  }
  static GemmPath path() { return std::get<1>(GetParam()); }
  ScopedTarget target_{std::get<0>(GetParam())};
};

TEST_P(GroupedGemmTest, MatchesThePlainSumsForAnyShape) {
  ThreadPool pool(2);
  struct Shape {
    int n, k, rows, columns;  // columns 0: BF16
  };
  for (const Shape& shape : {Shape{64, 128, 1, 0},
                             {70, 96, 1, 0},
                             {33, 257, 1, 0},
                             {64, 256, 128, 128},
                             {300, 320, 128, 128},  // blocks cut short at both ends
                             {96, 200, 1, 200},     // a scale per output
                             {46, 77, 1, 77},       // and an odd number of inputs
                             {46, 77, 46, 77},      // one for all
                             {40, 1000, 1, 1000},
                             {64, 192, 64, 64},
                             {34, 100, 5, 32}}) {
    const Experts experts(pool, 3, shape.n, shape.k, path(), shape.rows, shape.columns);
    const Philox rng(8, 1);
    std::vector<float> x(60 * static_cast<size_t>(shape.k));
    for (size_t i = 0; i < x.size(); ++i) x[i] = rng.Normal(i);
    Rows rows(3);
    rows[0] = {5};
    for (int32_t r = 59; r >= 0; --r) rows[2].push_back(r);  // 60: more than a chunk
    const auto y = Multiply(pool, experts, x, rows);
    EXPECT_TRUE(y[1].empty());
    for (const size_t e : {size_t{0}, size_t{2}}) {
      for (size_t r = 0; r < rows[e].size(); ++r) {
        for (int o = 0; o < shape.n; ++o) {
          double sum = 0.0, magnitude = 0.0;
          for (int i = 0; i < shape.k; ++i) {
            float value = x[static_cast<size_t>(rows[e][r]) * static_cast<size_t>(shape.k) +
                            static_cast<size_t>(i)];
            if (path() != GemmPath::kFma) value = ToFloat(ToBf16(value));
            const double term =
                static_cast<double>(value) *
                experts.values[e][static_cast<size_t>(o) * static_cast<size_t>(shape.k) +
                                  static_cast<size_t>(i)];
            sum += term;
            magnitude += std::fabs(term);
          }
          ASSERT_NEAR(y[e][r * static_cast<size_t>(shape.n) + static_cast<size_t>(o)], sum,
                      2e-6 * magnitude + 1e-7)
              << shape.n << " x " << shape.k << " by " << shape.columns << " row " << r;
        }
      }
    }
  }
}

// A row is what it is whatever is computed beside it, on any number of threads.
TEST_P(GroupedGemmTest, ARowDoesNotDependOnItsCompany) {
  ThreadPool one(1), three(3);
  for (const int columns : {0, 128, 320}) {
    const Experts experts(one, 4, 100, 320, path(), columns == 320 ? 1 : 128, columns);
    const Philox rng(9, 1);
    std::vector<float> x(70 * 320);
    for (size_t i = 0; i < x.size(); ++i) x[i] = rng.Normal(i);
    std::vector<int32_t> all(70);
    std::iota(all.begin(), all.end(), 0);
    const auto together = Multiply(three, experts, x, {all, {3, 4}, {}, all});
    for (const int32_t row : {0, 11, 12, 47, 48, 69}) {
      const auto alone = Multiply(one, experts, x, {{row}, {}, {}, {row}});
      for (const size_t e : {size_t{0}, size_t{3}}) {
        const std::vector<float> expected(
            together[e].begin() + static_cast<ptrdiff_t>(row) * experts.n,
            together[e].begin() + static_cast<ptrdiff_t>(row + 1) * experts.n);
        ASSERT_EQ(alone[e], expected) << "row " << row << ", scales for " << columns;
      }
    }
  }
}

// BF16 experts are exactly Gemm.
TEST_P(GroupedGemmTest, IsGemmWhereWeightsAreBf16) {
  ThreadPool pool(2);
  const Experts experts(pool, 1, 70, 300, path(), 1, 0);
  const Philox rng(10, 1);
  std::vector<float> x(20 * 300);
  for (size_t i = 0; i < x.size(); ++i) x[i] = rng.Normal(i);
  std::vector<int32_t> all(20);
  std::iota(all.begin(), all.end(), 0);
  GemmWorkspace workspace;
  std::vector<float> expected(20 * 70);
  Gemm(pool, workspace, x.data(), 20, 300, experts.packed[0], nullptr, expected.data(), 70);
  EXPECT_EQ(Multiply(pool, experts, x, {all})[0], expected);
}

// MXFP4 is, bit for bit, the BF16 that it stands for: every code and scale.
TEST_P(GroupedGemmTest, Mxfp4IsItsValuesInBf16) {
  ThreadPool pool(2);
  for (const auto& [n, k] : {std::pair{70, 96}, {32, 32}, {100, 320}}) {
    const Philox rng(12, static_cast<uint64_t>(n));
    const auto size = static_cast<size_t>(n) * static_cast<size_t>(k);
    std::vector<uint8_t> codes(size / 2), scales(size / kMxfp4Block);
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(rng.Bits(i));
    for (size_t i = 0; i < scales.size(); ++i) {
      scales[i] =
          static_cast<uint8_t>(kMxfp4MinScale + i * 7 % (kMxfp4MaxScale - kMxfp4MinScale + 1));
    }
    constexpr float kE2M1[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    std::vector<Bf16> values(size);
    for (size_t i = 0; i < size; ++i) {
      const int code = codes[i / 2] >> (i % 2 * 4) & 15, scale = scales[i / kMxfp4Block];
      const float value = std::ldexp(kE2M1[code & 7], scale - 127) * (code >= 8 ? -1.0f : 1.0f);
      values[i] = ToBf16(value);
      ASSERT_EQ(ToFloat(values[i]), value);
      ASSERT_EQ(Mxfp4ToBf16(static_cast<uint8_t>(code), scales[i / kMxfp4Block]), values[i]);
    }
    PackedMatrix plain(n, k, path()), packed = PackedMatrix::Mxfp4(n, k, path());
    plain.PackRows(pool, 0, n, std::span<const Bf16>(values));
    const int half = n / 2;  // in two parts
    const auto cut = static_cast<size_t>(half) * static_cast<size_t>(k);
    packed.PackMxfp4Rows(pool, 0, half, std::span(codes).first(cut / 2),
                         std::span(scales).first(cut / kMxfp4Block));
    packed.PackMxfp4Rows(pool, half, n - half, std::span(codes).subspan(cut / 2),
                         std::span(scales).subspan(cut / kMxfp4Block));
    EXPECT_EQ(packed.bytes(),
              static_cast<size_t>(packed.num_panels()) * 32 * static_cast<size_t>(k) / 32 * 17);
    std::vector<float> x(60 * static_cast<size_t>(k));
    // Small, so that sums of the largest scales stay finite.
    for (size_t i = 0; i < x.size(); ++i) x[i] = 1e-4f * rng.Normal(i);
    std::vector<int32_t> all(60);
    std::iota(all.begin(), all.end(), 0);
    GroupedGemmWorkspace workspace;
    std::vector<float> expected(60 * static_cast<size_t>(n)), actual(expected.size());
    for (auto& [matrix, y] : {std::pair{&plain, &expected}, {&packed, &actual}}) {
      const GemmGroup group{matrix, all, y->data()};
      GroupedGemm(pool, workspace, x.data(), static_cast<size_t>(k), {&group, 1});
    }
    EXPECT_EQ(actual, expected) << n << " x " << k;
  }
}

TEST(GroupedGemm, FmaGivesTheSameBitsOnEveryTarget) {
  ThreadPool pool(1);
  const Philox rng(11, 1);
  std::vector<float> x(13 * 256);
  for (size_t i = 0; i < x.size(); ++i) x[i] = rng.Normal(i);
  std::vector<int32_t> all(13);
  std::iota(all.begin(), all.end(), 0);
  for (const int columns : {0, 128, 256}) {
    std::vector<float> first;
    for (const Target target : SupportedTargets()) {
      const ScopedTarget scoped(target);
      const Experts experts(pool, 1, 72, 256, GemmPath::kFma, 128, columns);
      const std::vector<float> y = Multiply(pool, experts, x, {all})[0];
      if (first.empty()) first = y;
      ASSERT_EQ(y, first) << TargetName(target);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, GroupedGemmTest,
                         testing::Combine(testing::ValuesIn(SupportedTargets().begin(),
                                                            SupportedTargets().end()),
                                          testing::Values(GemmPath::kFma, GemmPath::kAvx512Bf16)));

}  // namespace
}  // namespace oscar::simd
