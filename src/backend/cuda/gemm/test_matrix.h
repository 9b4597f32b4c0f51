// For tests: matrices of every format on the device, and what their weights are.
#pragma once

#include <cmath>
#include <cstdint>
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
  kBlockRows
};  // kBlockRows: a scale for each row and block

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
