// GemmDispatch of BF16 and FP8 matrices on the GPU against sums in double precision.
#include "cuda/gemm/gemm_dispatch.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/fp8.h"
#include "base/rng.h"
#include "cuda/device/device_buffer.h"
#include "cuda/gemm/batch_gemm.h"
#include "cuda/gemm/fp8_kernels.h"
#include "cuda/gemm/gemv.h"
#include "cuda/gemm/test_matrix.h"
#include "io/dtype.h"
#include "weights/source.h"

namespace oscar::cuda {
namespace {

struct Case {
  Kind kind;
  int outputs, inputs, rows;
  GemmOutput output;
  bool normed = false, invariant = false, skinny = true;
};

std::string NameOf(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  const char* kinds[] = {"Bf16", "Rows", "Blocks", "BlockRows"};
  const char* outputs[] = {"Float", "Add", "SiluMul"};
  return std::string(kinds[static_cast<int>(c.kind)]) + std::to_string(c.outputs) + "x" +
         std::to_string(c.inputs) + "x" + std::to_string(c.rows) +
         outputs[static_cast<int>(c.output)] + (c.normed ? "Normed" : "") +
         (c.invariant ? "Invariant" : "") + (c.skinny ? "" : "Library");
}

class GemmTest : public testing::TestWithParam<Case> {};

TEST_P(GemmTest, AsInDoublePrecision) {
  const Case& c = GetParam();
  Random random(17);
  const TestMatrix matrix = MakeMatrix(c.kind, c.outputs, c.inputs, random);
  const bool pair = c.output == GemmOutput::kSiluMul;
  const int width = pair ? c.outputs / 2 : c.outputs, stride = width + 8;
  const auto rows = static_cast<size_t>(c.rows), inputs = static_cast<size_t>(c.inputs);
  std::vector<float> residual(rows * inputs), norm(inputs), bias(static_cast<size_t>(width));
  std::vector<Bf16> x(rows * inputs);
  for (float& v : residual) v = random.Normal() * 2.0f;
  for (float& v : norm) v = 1.0f + 0.3f * random.Normal();
  for (float& v : bias) v = random.Normal();
  std::vector<double> exact(rows * inputs);
  for (size_t n = 0; n < rows; ++n) {
    double sum = 0.0;
    for (size_t k = 0; k < inputs; ++k) sum += std::pow(double{residual[n * inputs + k]}, 2);
    const double factor = 1.0 / std::sqrt(sum / static_cast<double>(inputs) + 1e-6);
    for (size_t k = 0; k < inputs; ++k) {
      x[n * inputs + k] = ToBf16(residual[n * inputs + k]);
      exact[n * inputs + k] =
          c.normed ? residual[n * inputs + k] * factor * norm[k] : ToFloat(x[n * inputs + k]);
    }
  }
  const auto device_x = *DeviceBuffer<Bf16>::Copy(x);
  const auto device_residual = *DeviceBuffer<float>::Copy(residual);
  const auto device_norm = *DeviceBuffer<float>::Copy(norm);
  const auto device_bias = *DeviceBuffer<float>::Copy(bias);
  auto scratch = *DeviceBuffer<Bf16>::Allocate(rows * inputs);
  auto multiplied = *DeviceBuffer<Bf16>::Allocate(static_cast<size_t>(c.outputs) * inputs);
  auto blas_workspace = *DeviceBuffer<std::byte>::Allocate(Blas::kWorkspaceBytes);
  const bool bf16 = pair;
  const size_t element = bf16 ? 2 : 4;
  auto out = *DeviceBuffer<std::byte>::Allocate(rows * static_cast<size_t>(stride) * element);
  ASSERT_TRUE(out.Fill(bf16 ? 0xff : 0).ok());
  std::unique_ptr<Blas> blas;
  if (!c.invariant) {
    auto loaded = Blas::Load(blas_workspace.data());
    ASSERT_TRUE(loaded.has_value()) << loaded.error().ToString();
    blas = std::move(*loaded);
  }
  GemmDispatch products(std::move(blas), multiplied.data(), c.invariant, c.skinny);
  ASSERT_TRUE(!pair || products.TakesSiluMul(matrix.on_device, c.rows));
  const float* b = pair ? nullptr : device_bias.data();
  const Status status =
      c.normed
          ? products.OfNormed(matrix.on_device,
                              {device_residual.data(), device_norm.data(), 1e-6f, scratch.data()},
                              out.data(), stride, c.rows, c.output, b, nullptr)
          : products.Of(matrix.on_device, device_x.data(), out.data(), stride, c.rows, c.output, b,
                        nullptr);
  ASSERT_TRUE(status.ok()) << status.ToString();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const auto bytes = *out.ToHost();
  double error = 0.0, energy = 0.0;
  for (size_t n = 0; n < rows; ++n) {
    const auto sum_of = [&](size_t m) {
      double sum = 0.0;
      for (size_t k = 0; k < inputs; ++k) {
        sum += matrix.values[m * inputs + k] * exact[n * inputs + k];
      }
      return sum;
    };
    for (size_t m = 0; m < static_cast<size_t>(width); ++m) {
      double expected = sum_of(m);
      if (pair) {
        expected = expected / (1.0 + std::exp(-expected)) * sum_of(m + static_cast<size_t>(width));
      } else {
        expected += bias[m];
      }
      const size_t at = n * static_cast<size_t>(stride) + m;
      double got;
      if (bf16) {
        Bf16 value;
        std::memcpy(&value, bytes.data() + at * 2, 2);
        got = ToFloat(value);
      } else {
        float value;
        std::memcpy(&value, bytes.data() + at * 4, 4);
        got = value;
      }
      ASSERT_FALSE(std::isnan(got)) << "row " << n << " output " << m;
      error += (got - expected) * (got - expected);
      energy += expected * expected;
    }
    // What lies between the rows was not touched.
    for (size_t i = (n * static_cast<size_t>(stride) + static_cast<size_t>(width)) * element;
         i < (n + 1) * static_cast<size_t>(stride) * element; ++i) {
      ASSERT_EQ(static_cast<int>(bytes[i]), bf16 ? 0xff : 0);
    }
  }
  // BF16 activations or results: 2^-9 each; weights multiplied out are rounded once more.
  const bool multiplied_out = c.kind != Kind::kBf16 && (c.rows > 64 || !c.skinny);
  const bool rounds = bf16 || c.normed || multiplied_out;
  // Else the sums' own: tensor cores cut bits off in every step, which adds up over long rows.
  EXPECT_LE(std::sqrt(error / energy), rounds ? 5e-3 : 2e-6 * std::max(1.0, c.inputs / 4096.0));
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const Kind kind : {Kind::kBf16, Kind::kRows, Kind::kBlocks, Kind::kBlockRows}) {
    for (const auto output : {GemmOutput::kFloat, GemmOutput::kAdd, GemmOutput::kSiluMul}) {
      cases.push_back({kind, 160, 384, 1, output});
      cases.push_back({kind, 96, 4224, 5, output});  // more than a stage, and not a whole one
      const bool whole = kind == Kind::kBf16 && output == GemmOutput::kSiluMul;
      cases.push_back({kind, 4096, 1152, whole ? 8 : 16, output});
      cases.push_back({kind, 64, 2176, 9, output, false, true});
      if (output != GemmOutput::kAdd) cases.push_back({kind, 160, 2432, 3, output, true});
      for (const int rows : {1, 2}) {                       // by gemv, FP8's two rows not
        cases.push_back({kind, 4384, 4224, rows, output});  // stages and tiles of all kinds
        cases.push_back({kind, 480, 12288, rows, output, true});
        cases.push_back({kind, 32, 60032, rows, output});  // does not fit shared memory
      }
      if (kind == Kind::kBf16) cases.push_back({kind, 44, 32, 2, output});
    }
    cases.push_back({kind, 160, 384, 40, GemmOutput::kFloat});
    if (kind == Kind::kBf16) continue;
    for (const auto output : {GemmOutput::kFloat, GemmOutput::kAdd, GemmOutput::kSiluMul}) {
      cases.push_back({kind, 160, 384, 17, output});
      cases.push_back({kind, 4192, 2176, 57, output});
      // Batches: every number of columns, odd numbers of outputs, less k than blocks of a cluster.
      cases.push_back({kind, 96, 256, 9, output});
      cases.push_back({kind, 480, 2176, 24, output, true});
      cases.push_back({kind, 2080, 1152, 33, output});
      cases.push_back({kind, 224, 4224, 64, output});
      if (kind == Kind::kRows && output != GemmOutput::kSiluMul) {
        cases.push_back({kind, 331, 640, 41, output});
      }
    }
  }
  for (const Kind kind : {Kind::kBf16, Kind::kRows, Kind::kBlocks, Kind::kBlockRows}) {
    cases.push_back({kind, 160, 384, 200, GemmOutput::kFloat});
    cases.push_back({kind, 160, 384, 200, GemmOutput::kFloat, true});
    // Tiles: not whole ones along rows, outputs and inputs; more items than blocks.
    for (const auto output : {GemmOutput::kFloat, GemmOutput::kAdd, GemmOutput::kSiluMul}) {
      cases.push_back({kind, 352, 384, 520, output, output == GemmOutput::kFloat});
      cases.push_back({kind, 288, 128, 577, output});
      cases.push_back({kind, 5152, 128, 1100, output});
    }
    // As on devices without room for the skinny kernels.
    cases.push_back({kind, 160, 384, 1, GemmOutput::kAdd, false, false, /*skinny=*/false});
    cases.push_back({kind, 160, 384, 3, GemmOutput::kFloat, true, false, /*skinny=*/false});
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(All, GemmTest, testing::ValuesIn(Cases()), NameOf);

// The other row of a launch changes nothing.
TEST(Gemv, RowsDoNotShow) {
  constexpr int kOutputs = 80, kInputs = 4224;
  Random random(7);
  const TestMatrix matrix = MakeMatrix(Kind::kBf16, kOutputs, kInputs, random);
  ASSERT_TRUE(FitsGemv(matrix.on_device, 2));
  std::vector<float> residual(2 * kInputs), norm(kInputs);
  for (float& v : residual) v = random.Normal();
  for (float& v : norm) v = random.Normal();
  const auto device_residual = *DeviceBuffer<float>::Copy(residual);
  const auto device_norm = *DeviceBuffer<float>::Copy(norm);
  auto out = *DeviceBuffer<float>::Allocate(2 * kOutputs);
  const auto product = [&](int first, int rows) {
    GemmArguments args;
    args.matrix = matrix.on_device;
    args.residual = device_residual.data() + first * kInputs;
    args.norm_weight = device_norm.data();
    args.norm_epsilon = 1e-6f;
    args.out = out.data();
    args.out_stride = kOutputs;
    args.rows = rows;
    EXPECT_TRUE(LaunchGemv(args, nullptr).ok());
    std::vector<float> all = *out.ToHost();
    all.resize(static_cast<size_t>(rows * kOutputs));
    return all;
  };
  std::vector<float> alone = product(0, 1);
  const std::vector<float> second = product(1, 1);
  alone.insert(alone.end(), second.begin(), second.end());
  EXPECT_EQ(product(0, 2), alone);
}

// Every way to share a matrix among multiprocessors; and which other rows there are changes
// nothing.
TEST(BatchGemm, EveryPlan) {
  if (!HasBatchGemm()) GTEST_SKIP() << "not for this device";
  constexpr int kOutputs = 1184, kInputs = 1408, kRows = 21, kMost = 32;  // 11 blocks of k
  Random random(11);
  std::vector<Bf16> x(size_t{kMost} * kInputs);
  for (Bf16& v : x) v = ToBf16(random.Normal());
  const auto device_x = *DeviceBuffer<Bf16>::Copy(x);
  for (const Kind kind : {Kind::kRows, Kind::kBlocks}) {
    const TestMatrix matrix = MakeMatrix(kind, kOutputs, kInputs, random);
    std::vector<double> expected(size_t{kMost} * kOutputs);
    for (size_t n = 0; n < kMost; ++n) {
      for (size_t m = 0; m < kOutputs; ++m) {
        double sum = 0.0;
        for (size_t k = 0; k < kInputs; ++k) {
          sum += matrix.values[m * kInputs + k] * ToFloat(x[n * kInputs + k]);
        }
        expected[n * kOutputs + m] = sum;
      }
    }
    for (const int cluster : {1, 2, 4, 8}) {
      for (int groups = 1; groups <= 4; ++groups) {
        SCOPED_TRACE(testing::Message() << cluster << " blocks, " << groups << " groups");
        const auto product = [&](int rows) {
          auto out = *DeviceBuffer<float>::Allocate(size_t{kMost} * kOutputs);
          GemmArguments args;
          args.matrix = matrix.on_device;
          args.x = device_x.data();
          args.out = out.data();
          args.out_stride = kOutputs;
          args.rows = rows;
          EXPECT_TRUE(LaunchBatchGemm(args, {.groups = groups, .cluster = cluster}, nullptr).ok());
          return *out.ToHost();
        };
        const std::vector<float> some = product(kRows), all = product(kMost);
        double error = 0.0, energy = 0.0;
        for (size_t i = 0; i < all.size(); ++i) {
          error += (all[i] - expected[i]) * (all[i] - expected[i]);
          energy += expected[i] * expected[i];
          if (i < size_t{kRows} * kOutputs) {
            ASSERT_EQ(some[i], all[i]) << i;
          }
        }
        EXPECT_LE(std::sqrt(error / energy), 2e-6);
      }
    }
  }
}

TEST(Fp8Kernels, QuantizeAsTheHostDoes) {
  constexpr int kRows = 37, kInputs = 640;
  Random random(3);
  std::vector<Bf16> weights(kRows * kInputs);
  for (Bf16& w : weights) w = ToBf16(random.Normal() * 0.1f);
  std::fill_n(weights.begin(), kInputs, Bf16{});  // a row of zeros
  const auto device = *DeviceBuffer<Bf16>::Copy(weights);
  auto words = *DeviceBuffer<uint32_t>::Allocate(weights.size() / 4);
  auto scales = *DeviceBuffer<float>::Allocate(kRows);
  ASSERT_TRUE(
      LaunchQuantize(device.data(), words.data(), scales.data(), kRows, kInputs, nullptr).ok());
  const auto got_words = *words.ToHost();
  const auto got_scales = *scales.ToHost();
  for (size_t row = 0; row < kRows; ++row) {
    std::vector<uint8_t> codes(kInputs);
    const float scale = QuantizeRowToFp8(std::span(weights).subspan(row * kInputs, kInputs), codes);
    EXPECT_EQ(got_scales[row], scale);
    for (size_t i = 0; i < kInputs / 4; ++i) {
      const uint32_t word =
          PackFp8(codes[4 * i] | uint32_t{codes[4 * i + 1]} << 8 |
                  uint32_t{codes[4 * i + 2]} << 16 | uint32_t{codes[4 * i + 3]} << 24);
      ASSERT_EQ(got_words[row * kInputs / 4 + i], word) << "row " << row << " word " << i;
    }
  }
}

TEST(Fp8Kernels, MultiplyOutRoundsOnce) {
  Random random(5);
  for (const Kind kind : {Kind::kRows, Kind::kBlocks, Kind::kBlockRows}) {
    const TestMatrix matrix = MakeMatrix(kind, 48, 256, random);
    auto out = *DeviceBuffer<Bf16>::Allocate(48 * 256);
    ASSERT_TRUE(out.Fill(0xff).ok());
    ASSERT_TRUE(LaunchMultiplyOut(matrix.on_device, out.data(), nullptr).ok());
    const auto host = *out.ToHost();
    for (size_t i = 0; i < host.size(); ++i) {
      EXPECT_EQ(host[i], ToBf16(static_cast<float>(matrix.values[i]))) << i;
    }
  }
}

}  // namespace
}  // namespace oscar::cuda
