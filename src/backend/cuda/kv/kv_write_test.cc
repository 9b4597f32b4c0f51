#include "cuda/kv/kv_write.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "cuda/attention/test_cache.h"
#include "cuda/kv/token_write.h"

namespace oscar::cuda {
namespace {

// Mean of squares of consecutive numbers.
double MeanSquare(const float* row, size_t count) {
  double sum = 0.0;
  for (size_t i = 0; i < count; ++i) sum += static_cast<double>(row[i]) * row[i];
  return sum / static_cast<double>(count);
}

// Norm, RoPE of the first `rotary` dims, and rotation in fp64.
std::vector<double> ReferenceRow(const float* row, int dims, const float* norm, double mean_square,
                                 double epsilon, const float* cos_sin, int rotary,
                                 const std::vector<float>& rotation, double scale = 1.0) {
  const auto n = static_cast<size_t>(dims), half = static_cast<size_t>(rotary / 2);
  std::vector<double> x(row, row + n), out(n);
  if (norm != nullptr) {
    for (size_t d = 0; d < n; ++d) x[d] *= norm[d] / std::sqrt(mean_square + epsilon);
  }
  if (cos_sin != nullptr) {
    for (size_t d = 0; d < half; ++d) {
      const double c = cos_sin[2 * d], s = cos_sin[2 * d + 1], a = x[d], b = x[d + half];
      x[d] = a * c - b * s;
      x[d + half] = b * c + a * s;
    }
  }
  for (double& value : x) value *= scale;
  if (rotation.empty()) return x;
  for (size_t j = 0; j < n; ++j) {
    for (size_t d = 0; d < n; ++d) out[j] += x[d] * rotation[d * n + j];
  }
  return out;
}

std::vector<float> HadamardMatrix(int dims) {
  std::vector<float> m;
  for (int i = 0; i < dims; ++i) {
    for (int j = 0; j < dims; ++j) {
      const int sign = std::popcount(static_cast<unsigned>(i & j)) % 2 == 0 ? 1 : -1;
      m.push_back(static_cast<float>(sign / std::sqrt(static_cast<double>(dims))));
    }
  }
  return m;
}

// Orthogonal: a product of Householder reflections.
std::vector<float> RandomOrthogonal(int dims, uint64_t seed) {
  const auto n = static_cast<size_t>(dims);
  std::vector<double> m(n * n, 0.0);
  for (size_t i = 0; i < n; ++i) m[i * n + i] = 1.0;
  const Philox rng(seed, 0);
  for (size_t r = 0; r < 6; ++r) {
    std::vector<double> v(n);
    double norm = 0.0;
    for (size_t i = 0; i < n; ++i) {
      v[i] = rng.Normal(r * n + i);
      norm += v[i] * v[i];
    }
    for (size_t i = 0; i < n; ++i) {
      double dot = 0.0;
      for (size_t j = 0; j < n; ++j) dot += m[i * n + j] * v[j];
      for (size_t j = 0; j < n; ++j) m[i * n + j] -= 2.0 * dot / norm * v[j];
    }
  }
  return {m.begin(), m.end()};
}

struct WriteCase {
  int head_dim, q_heads, kv_heads, tokens;
  RotationKind rotation;
  bool per_head, norm, rope;
  int rotary = 0;          // 0: the whole head
  bool all_heads = false;  // norm over all heads
};

class KvWriteTest : public testing::TestWithParam<WriteCase> {};

TEST_P(KvWriteTest, MatchesTheReference) {
  const WriteCase& c = GetParam();
  const AttentionShape shape{.head_dim = c.head_dim,
                             .group_dims = c.head_dim,
                             .num_q_heads = c.q_heads,
                             .num_kv_heads = c.kv_heads};
  const auto dims = static_cast<size_t>(c.head_dim);
  const auto heads = static_cast<size_t>(c.q_heads + 2 * c.kv_heads);
  constexpr int kRows = 3, kRing = 4, kMaxPosition = 700;
  TestCache cache(shape, kRows, 1, kRing, 1);
  cache.Upload();
  const Philox rng(3, 0);
  const size_t stride = heads * dims + 8;
  std::vector<float> qkv(static_cast<size_t>(c.tokens) * stride);
  for (size_t i = 0; i < qkv.size(); ++i) qkv[i] = rng.Normal(i);
  // Token i: row i % 3, consecutive positions from one that wraps the ring; some are padding.
  std::vector<int32_t> positions, rows;
  for (int i = 0; i < c.tokens; ++i) {
    rows.push_back(i % kRows);
    positions.push_back(i % 7 == 5 ? -1 : 450 * (i % 2) + i / kRows);
  }
  const int rotary_dims = c.rotary > 0 ? c.rotary : c.head_dim;
  const auto rotary = static_cast<size_t>(rotary_dims), q_heads = static_cast<size_t>(c.q_heads),
             kv_heads = static_cast<size_t>(c.kv_heads);
  std::vector<float> cos_sin(static_cast<size_t>(kMaxPosition) * rotary);
  std::vector<float> q_norm(c.all_heads ? q_heads * dims : dims),
      k_norm(c.all_heads ? kv_heads * dims : dims);
  for (size_t p = 0; p < kMaxPosition; ++p) {
    for (size_t d = 0; d < rotary / 2; ++d) {
      const double angle =
          static_cast<double>(p) * std::pow(1e4, -2.0 * static_cast<double>(d) / rotary_dims);
      cos_sin[p * rotary + 2 * d] = static_cast<float>(std::cos(angle));
      cos_sin[p * rotary + 2 * d + 1] = static_cast<float>(std::sin(angle));
    }
  }
  for (size_t d = 0; d < q_norm.size(); ++d) q_norm[d] = 0.5f + rng.Uniform(d);
  for (size_t d = 0; d < k_norm.size(); ++d) k_norm[d] = 0.5f + rng.Uniform(100000 + d);
  const int matrices = c.per_head ? c.kv_heads : 1;
  std::vector<std::vector<float>> rotations;
  std::vector<uint32_t> fragments;
  for (int i = 0; i < matrices; ++i) {
    rotations.push_back(c.rotation == RotationKind::kNone ? std::vector<float>{}
                        : c.rotation == RotationKind::kHadamard
                            ? HadamardMatrix(c.head_dim)
                            : RandomOrthogonal(c.head_dim, static_cast<uint64_t>(i + 1)));
    if (c.rotation == RotationKind::kCalibrated) {
      const std::vector<uint32_t> words = PackRotation(rotations.back(), c.head_dim);
      fragments.insert(fragments.end(), words.begin(), words.end());
    }
  }
  const auto d_qkv = Unwrap(DeviceBuffer<float>::Copy(qkv));
  const auto d_positions = Unwrap(DeviceBuffer<int32_t>::Copy(positions));
  const auto d_rows = Unwrap(DeviceBuffer<int32_t>::Copy(rows));
  const auto d_cos_sin = Unwrap(DeviceBuffer<float>::Copy(cos_sin));
  const auto d_q_norm = Unwrap(DeviceBuffer<float>::Copy(q_norm));
  const auto d_k_norm = Unwrap(DeviceBuffer<float>::Copy(k_norm));
  const auto d_fragments = Unwrap(DeviceBuffer<uint32_t>::Copy(fragments));
  WriteArguments args;
  args.qkv = d_qkv.data();
  args.qkv_stride = static_cast<int64_t>(stride);
  args.positions = d_positions.data();
  args.table_rows = d_rows.data();
  args.cos_sin = c.rope ? d_cos_sin.data() : nullptr;
  args.rotary_dims = c.rotary;
  args.q_norm = c.norm ? d_q_norm.data() : nullptr;
  args.k_norm = c.norm ? d_k_norm.data() : nullptr;
  args.rotation = c.rotation;
  args.rotation_fragments = d_fragments.data();
  args.rotations = matrices;
  args.q_scale = 0.1275f;
  args.window_pool = cache.device_window();
  args.cache = cache.view();
  args.tokens = c.tokens;
  auto d_factors = Unwrap(DeviceBuffer<float>::Allocate(static_cast<size_t>(c.tokens) * 2));
  if (c.all_heads) {
    ASSERT_TRUE(LaunchHeadFactors(shape, args.qkv, args.qkv_stride, args.norm_epsilon,
                                  d_factors.data(), c.tokens, nullptr)
                    .ok());
    args.factors = d_factors.data();
  }
  // The norm of a head; what a row is multiplied with there.
  const auto norm_of = [&](bool is_q, int head) {
    const std::vector<float>& all = is_q ? q_norm : k_norm;
    return c.norm ? all.data() + (c.all_heads ? static_cast<size_t>(head) * dims : 0) : nullptr;
  };
  const auto mean_square = [&](const float* token, bool is_q, int head) {
    const float* side = token + (is_q ? 0 : q_heads * dims);
    return c.all_heads ? MeanSquare(side, (is_q ? q_heads : kv_heads) * dims)
                       : MeanSquare(side + static_cast<size_t>(head) * dims, dims);
  };
  const auto angles = [&](int position) {
    return c.rope ? &cos_sin[static_cast<size_t>(position) * rotary] : nullptr;
  };
  for (const bool tiles : {true, false}) {
    if (!tiles && !HasTokenWrite(shape, c.rotation)) continue;
    auto d_q =
        Unwrap(DeviceBuffer<Bf16>::Allocate(static_cast<size_t>(c.tokens * c.q_heads) * dims));
    ASSERT_TRUE(d_q.Fill(0xff).ok());
    args.q_out = d_q.data();
    const Status launched =
        tiles ? WriteTokens(shape, args, nullptr) : LaunchTokenWrite(shape, args, nullptr);
    ASSERT_TRUE(launched.ok()) << launched.ToString();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const std::vector<Bf16> q_out = Unwrap(d_q.ToHost());
    const std::vector<std::byte> window = cache.DownloadWindow();
    const BlockLayout layout = shape.window_layout();
    double worst = 0.0;
    size_t mismatches = 0, values = 0;
    // Within half a BF16 step plus 2e-5 of the row's length: the arithmetic's own error.
    const auto check = [&](const std::vector<double>& expected, auto at) {
      double length = 0.0;
      for (const double x : expected) length += x * x;
      length = std::sqrt(length / c.head_dim);
      for (size_t d = 0; d < dims; ++d) {
        const double actual = ToFloat(at(d));
        const double error =
            std::fabs(actual - expected[d]) - std::fabs(expected[d]) * 0x1p-8 * 1.001;
        worst = std::max(worst, error / length);
        mismatches += at(d) == ToBf16(static_cast<float>(expected[d])) ? 0 : 1;
        ++values;
      }
    };
    for (int i = 0; i < c.tokens; ++i) {
      const float* token = qkv.data() + static_cast<size_t>(i) * stride;
      const int position = positions[static_cast<size_t>(i)];
      for (int h = 0; h < c.q_heads; ++h) {
        const Bf16* out = &q_out[static_cast<size_t>(i * c.q_heads + h) * dims];
        if (position < 0) {
          for (size_t d = 0; d < dims; ++d) ASSERT_EQ(out[d].bits, 0xffff) << "padding was written";
          continue;
        }
        const int kv = h / (c.q_heads / c.kv_heads);
        check(ReferenceRow(token + static_cast<size_t>(h) * dims, c.head_dim, norm_of(true, h),
                           mean_square(token, true, h), args.norm_epsilon, angles(position),
                           rotary_dims, rotations[static_cast<size_t>(c.per_head ? kv : 0)],
                           args.q_scale),
              [&](size_t d) { return out[d]; });
      }
      if (position < 0) continue;
      for (int h = 0; h < c.kv_heads; ++h) {
        const std::byte* block =
            window.data() +
            (cache.window_block(rows[static_cast<size_t>(i)], position / 64, h) -
             cache.window_block(0, 0, 0)) +
            static_cast<ptrdiff_t>(static_cast<size_t>(cache.window_id(0, 0)) *
                                   cache.window_page_bytes());
        const auto read = [&](CodePosition at) {
          Bf16 value;
          std::memcpy(&value, block + at.offset + at.shift / 8, 2);
          return value;
        };
        check(ReferenceRow(token + static_cast<size_t>(c.q_heads + h) * dims, c.head_dim,
                           norm_of(false, h), mean_square(token, false, h), args.norm_epsilon,
                           angles(position), rotary_dims,
                           rotations[static_cast<size_t>(c.per_head ? h : 0)]),
              [&](size_t d) { return read(layout.KCode(position % 64, static_cast<int>(d))); });
        const float* v = token + static_cast<size_t>(c.q_heads + c.kv_heads + h) * dims;
        for (size_t d = 0; d < dims; ++d) {
          ASSERT_EQ(read(layout.VCode(position % 64, static_cast<int>(d))), ToBf16(v[d]));
        }
      }
    }
    EXPECT_LE(worst, 2e-5);
    // Rounding once: all but a few values near a tie are the correctly rounded ones.
    EXPECT_LE(static_cast<double>(mismatches) / static_cast<double>(values), 0.01);
  }
  // What calibration sees: the same rows in fp32, neither scaled nor rotated.
  auto d_tap = Unwrap(DeviceBuffer<float>::Allocate(qkv.size()));
  ASSERT_TRUE(d_tap.Fill(0xff).ok());
  ASSERT_TRUE(LaunchTap(shape, args, d_tap.data(), nullptr).ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<float> tap = Unwrap(d_tap.ToHost());
  for (int i = 0; i < c.tokens; ++i) {
    const int position = positions[static_cast<size_t>(i)];
    if (position < 0) continue;
    const size_t at = static_cast<size_t>(i) * stride;
    for (int h = 0; h < c.q_heads + 2 * c.kv_heads; ++h) {
      const size_t row = at + static_cast<size_t>(h) * dims;
      const bool is_q = h < c.q_heads, is_v = h >= c.q_heads + c.kv_heads;
      const int own = is_q ? h : h - c.q_heads;
      const std::vector<double> expected =
          is_v ? std::vector<double>(&qkv[row], &qkv[row] + dims)
               : ReferenceRow(&qkv[row], c.head_dim, norm_of(is_q, own),
                              mean_square(&qkv[at], is_q, own), args.norm_epsilon, angles(position),
                              rotary_dims, {});
      for (size_t d = 0; d < dims; ++d) ASSERT_NEAR(tap[row + d], expected[d], 1e-5) << h;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, KvWriteTest,
    testing::Values(WriteCase{128, 32, 8, 50, RotationKind::kCalibrated, true, true, true},
                    WriteCase{128, 32, 8, 3, RotationKind::kCalibrated, false, false, true},
                    WriteCase{128, 8, 8, 20, RotationKind::kHadamard, false, true, true},
                    WriteCase{128, 5, 1, 33, RotationKind::kNone, false, true, true},
                    WriteCase{64, 16, 2, 21, RotationKind::kCalibrated, true, true, true},
                    WriteCase{64, 4, 2, 21, RotationKind::kHadamard, false, false, false},
                    WriteCase{256, 8, 2, 21, RotationKind::kCalibrated, true, true, true},
                    WriteCase{256, 6, 2, 21, RotationKind::kHadamard, false, true, true},
                    // Part of a head turns: GLM's and MiniMax's halves, a quarter, and pairs that
                    // lie anywhere.
                    WriteCase{128, 16, 2, 21, RotationKind::kHadamard, false, true, true, 64},
                    WriteCase{128, 8, 2, 21, RotationKind::kCalibrated, true, false, true, 64},
                    WriteCase{64, 4, 2, 21, RotationKind::kNone, false, true, true, 32},
                    WriteCase{256, 4, 1, 21, RotationKind::kCalibrated, false, true, true, 64},
                    WriteCase{128, 4, 2, 9, RotationKind::kHadamard, false, true, true, 22},
                    WriteCase{64, 4, 2, 9, RotationKind::kCalibrated, false, true, true, 6},
                    // A norm over all heads.
                    WriteCase{128, 12, 2, 21, RotationKind::kHadamard, false, true, true, 64, true},
                    WriteCase{128, 6, 3, 21, RotationKind::kCalibrated, true, true, true, 64, true},
                    WriteCase{64, 9, 3, 21, RotationKind::kNone, false, true, true, 0, true},
                    WriteCase{256, 2, 1, 21, RotationKind::kHadamard, false, true, false, 0,
                              true}));

}  // namespace
}  // namespace oscar::cuda
