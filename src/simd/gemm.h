// Y = X W^T for linear layers: X [M, K] fp32, W [N, K] BF16 packed once, Y [M, N] fp32. This is the
// part without vectors: packing, partition and choice of path.
//
// Paths:
//   kFma      fp32 activations, BF16 weights promoted exactly, fp32 fused multiply-adds
//   kAmxBf16  activations rounded to BF16, tiles of AMX, fp32 sums (Intel, Sapphire Rapids on)
//   kAvx512Bf16  the same numbers through VDPBF16PS
// A row's result is a function of that row and W alone, whatever M, the rows beside it and the
// number of threads: each output is one chain of sums over K in one fixed order.
//
// PackedMatrix is immutable once packed and then safe from any thread; a GemmWorkspace belongs to
// one caller at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/half.h"
#include "base/thread_pool.h"
#include "simd/aligned_buffer.h"

namespace oscar::simd {

enum class GemmPath : uint8_t { kFma, kAvx512Bf16, kAmxBf16 };

// The fastest path of this machine: AMX, else AVX512-BF16, else FMA, the one whose arithmetic is
// the same everywhere. OSCAR_GEMM=fma|bf16|amx in the environment asks for another (ignored where
// the machine lacks it), OSCAR_DISABLE_AMX=1 leaves AMX out. Decided once.
GemmPath DefaultGemmPath();
std::string_view GemmPathName(GemmPath path);
bool IsSupported(GemmPath path);

class PackedMatrix {
 public:
  PackedMatrix() = default;
  // [N, K] = [num_outputs, num_inputs]; all zero until packed.
  PackedMatrix(int num_outputs, int num_inputs, GemmPath path = DefaultGemmPath());

  // Fills rows [first_row, first_row + rows) from row-major [rows, K] sources; call it several
  // times to stack matrices (q, k, v or gate, up). F32 and F16 are rounded to BF16.
  void PackRows(ThreadPool& pool, int first_row, int rows, std::span<const Bf16> source);
  void PackRows(ThreadPool& pool, int first_row, int rows, std::span<const float> source);
  void PackRows(ThreadPool& pool, int first_row, int rows, std::span<const Fp16> source);

  int num_outputs() const { return num_outputs_; }
  int num_inputs() const { return num_inputs_; }
  GemmPath path() const { return path_; }
  size_t bytes() const { return data_.size() * sizeof(uint16_t); }
  Bf16 At(int output, int input) const;  // for tests and inspection

  // Panels of kPanel outputs. kFma: [panel][k][lane][2], a 32-bit word = outputs (lane, lane + 16).
  // kAvx512Bf16: [panel][k / 2][32 outputs][2], a 32-bit word = inputs (k, k + 1) of one output.
  // kAmxBf16: the same in whole tiles, [panel][k / 32][half][k % 32 / 2][16 outputs][2].
  static constexpr int kPanel = 32;
  int num_panels() const { return (num_outputs_ + kPanel - 1) / kPanel; }
  int padded_inputs() const { return padded_inputs_; }
  const uint16_t* Panel(int panel) const {
    return data_.data() + static_cast<size_t>(panel) * kPanel * static_cast<size_t>(padded_inputs_);
  }

 private:
  template <typename T>
  void Pack(ThreadPool& pool, int first_row, int rows, std::span<const T> source);
  size_t Index(int output, int input) const;

  int num_outputs_ = 0, num_inputs_ = 0, padded_inputs_ = 0;
  GemmPath path_ = GemmPath::kFma;
  AlignedBuffer<uint16_t> data_;
};

class GemmWorkspace {
 public:
  AlignedBuffer<float> x;          // packed activations; AMX: each thread's sums
  AlignedBuffer<uint16_t> x_bf16;  // packed activations of the BF16 paths
};

// y[m, :] = x[m, :] W^T (+ bias). Strides in elements between rows. REQUIRES: num_rows >= 0; bias,
// if given, has N entries.
void Gemm(ThreadPool& pool, GemmWorkspace& workspace, const float* x, int num_rows, size_t x_stride,
          const PackedMatrix& w, const float* bias, float* y, size_t y_stride);

// Operations a second (a multiply-add is two) that all threads reach together on the path's own
// instruction, from registers: what the path is measured against. REQUIRES: IsSupported(path).
double MeasurePeak(ThreadPool& pool, GemmPath path);

}  // namespace oscar::simd
