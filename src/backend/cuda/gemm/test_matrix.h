// For tests: matrices of every format on the device, and what their weights are.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/fp8.h"
#include "base/rng.h"
#include "cuda/device/device_buffer.h"
#include "cuda/gemm/gemm_arguments.h"
#include "io/dtype.h"

namespace oscar::cuda {

enum class Kind {
  kBf16,
  kRows,
  kBlocks,
  kBlockRows,  // a scale for each row and block
  kMxfp4
};

class Random {
 public:
  explicit Random(uint64_t seed) : rng_(seed, 0) {}
  uint32_t Bits() { return rng_.Bits(next_++); }
  float Normal() {  // near enough
    float sum = 0.0f;
    for (int i = 0; i < 4; ++i) sum += static_cast<float>(Bits()) * 0x1p-32f - 0.5f;
    return sum * 1.7f;
  }

 private:
  Philox rng_;
  uint64_t next_ = 0;
};

// A matrix on the device and what its weights are.
struct TestMatrix {
  DeviceMatrix on_device;
  DeviceBuffer<Bf16> weights;
  DeviceBuffer<uint32_t> words;
  DeviceBuffer<float> scales;
  DeviceBuffer<uint8_t> blocks;
  std::vector<double> values;  // [outputs, inputs]
};

inline TestMatrix MakeMatrix(Kind kind, int outputs, int inputs, Random& random) {
  TestMatrix matrix;
  const auto size = static_cast<size_t>(outputs) * static_cast<size_t>(inputs);
  matrix.on_device.outputs = outputs;
  matrix.on_device.inputs = inputs;
  matrix.values.resize(size);
  if (kind == Kind::kBf16) {
    std::vector<Bf16> host(size);
    for (size_t i = 0; i < size; ++i) {
      host[i] = ToBf16(random.Normal() * 0.05f);
      matrix.values[i] = ToFloat(host[i]);
    }
    matrix.weights = *DeviceBuffer<Bf16>::Copy(host);
    matrix.on_device.weights = matrix.weights.data();
    return matrix;
  }
  if (kind == Kind::kMxfp4) {
    // Rows as base/mxfp4.h has them; scales up to the ends of their range, in blocks of zeros too.
    const auto row_bytes = static_cast<size_t>(Mxfp4RowBytes(inputs));
    std::vector<uint8_t> host(static_cast<size_t>(outputs) * row_bytes, 0);
    for (size_t row = 0; row < static_cast<size_t>(outputs); ++row) {
      uint8_t* const at = &host[row * row_bytes];
      for (int block = 0; block < inputs / kMxfp4Block; ++block) {
        // Large ones in few rows: other rows' sums would be nothing beside them, but are their own.
        const uint8_t scale = row % 16 == 5    ? static_cast<uint8_t>(155 + random.Bits() % 4)
                              : row % 16 == 11 ? static_cast<uint8_t>(70 + random.Bits() % 4)
                                               : static_cast<uint8_t>(118 + random.Bits() % 6);
        at[Mxfp4ScaleAt(block)] = scale;
        for (int word = 0; word < 4; ++word) {
          const uint32_t codes = random.Bits() % 8 == 0 ? 0x80000008u : random.Bits();
          const uint32_t packed = PackMxfp4(codes);
          std::memcpy(at + Mxfp4CodesAt(block) + word * 4, &packed, 4);
          for (int i = 0; i < 8; ++i) {
            const auto k = static_cast<size_t>(block * kMxfp4Block + word * 8 + i);
            matrix.values[row * static_cast<size_t>(inputs) + k] =
                ToFloat(Mxfp4ToBf16(static_cast<uint8_t>(codes >> (4 * i) & 15), scale));
          }
        }
      }
    }
    matrix.blocks = *DeviceBuffer<uint8_t>::Copy(host);
    matrix.on_device.mxfp4 = matrix.blocks.data();
    return matrix;
  }
  std::vector<uint8_t> codes(size);
  for (uint8_t& code : codes) {
    code = static_cast<uint8_t>(random.Bits());  // every code but NaN, subnormal ones included
    if ((code & 0x7f) == kF8E4M3Nan) code = 1;
  }
  DeviceMatrix& device = matrix.on_device;
  device.scale_rows = kind == Kind::kBlocks ? 16 : 1;
  device.scale_columns = kind == Kind::kRows ? 1 : inputs / kScaleInputs;
  std::vector<float> scales(static_cast<size_t>(outputs / device.scale_rows) *
                            static_cast<size_t>(device.scale_columns));
  for (float& scale : scales) scale = 1e-3f * (1.0f + std::fabs(random.Normal()));
  for (size_t i = 0; i < size; ++i) {
    const size_t row = i / static_cast<size_t>(inputs), k = i % static_cast<size_t>(inputs);
    const size_t column = kind == Kind::kRows ? 0 : k / kScaleInputs;
    matrix.values[i] = static_cast<double>(F8E4M3ToFloat(codes[i])) *
                       scales[row / static_cast<size_t>(device.scale_rows) *
                                  static_cast<size_t>(device.scale_columns) +
                              column];
  }
  std::vector<uint32_t> words(size / 4);
  for (size_t i = 0; i < words.size(); ++i) {
    words[i] = PackFp8(codes[4 * i] | uint32_t{codes[4 * i + 1]} << 8 |
                       uint32_t{codes[4 * i + 2]} << 16 | uint32_t{codes[4 * i + 3]} << 24);
  }
  matrix.words = *DeviceBuffer<uint32_t>::Copy(words);
  matrix.scales = *DeviceBuffer<float>::Copy(scales);
  device.codes = matrix.words.data();
  device.scales = matrix.scales.data();
  return matrix;
}

}  // namespace oscar::cuda
