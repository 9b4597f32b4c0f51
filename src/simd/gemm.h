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

  // As FP8 E4M3 (base/fp8.h): a byte per weight and a scale for each output and `scale_inputs`
  // inputs. Only GroupedGemm multiplies these. REQUIRES: the path is not kAmxBf16; scale_inputs a
  // multiple of 32, or all inputs.
  static PackedMatrix Fp8(int num_outputs, int num_inputs, int scale_inputs, GemmPath path);
  // codes [rows, K], none of them NaN; scales [rows, ceil(K / scale_inputs)].
  void PackFp8Rows(ThreadPool& pool, int first_row, int rows, std::span<const uint8_t> codes,
                   std::span<const float> scales);
  bool is_fp8() const { return scale_inputs_ > 0; }

  // As MXFP4 (base/mxfp4.h): half a byte per weight and a byte for each output and 32 inputs. Only
  // GroupedGemm multiplies these; what comes out is, bit for bit, what their values in BF16 give.
  // REQUIRES: the path is not kAmxBf16; inputs a multiple of 32.
  static PackedMatrix Mxfp4(int num_outputs, int num_inputs, GemmPath path);
  // codes [rows, K / 2], scales [rows, K / 32], in the range that base/mxfp4.h names.
  void PackMxfp4Rows(ThreadPool& pool, int first_row, int rows, std::span<const uint8_t> codes,
                     std::span<const uint8_t> scales);
  bool is_mxfp4() const { return block_scales_.size() > 0; }
  // A panel's inputs [32 block, 32 block + 32): 32 codes each, and a scale of each output.
  const uint8_t* Mxfp4Codes(int panel, int block) const {
    return codes_.data() + BlockIndex(panel, block) * kPanel * 16;
  }
  const uint8_t* Mxfp4Scales(int panel, int block) const {
    return block_scales_.data() + BlockIndex(panel, block) * kPanel;
  }
  int scale_inputs() const { return scale_inputs_; }
  const uint8_t* CodePanel(int panel) const {
    return codes_.data() +
           static_cast<size_t>(panel) * kPanel * static_cast<size_t>(padded_inputs_);
  }
  // Of a panel's 32 outputs, for inputs [segment * scale_inputs, ...).
  const float* Scales(int panel, int segment) const {
    return scales_.data() + (static_cast<size_t>(panel) * static_cast<size_t>(num_segments_) +
                             static_cast<size_t>(segment)) *
                                kPanel;
  }

  int num_outputs() const { return num_outputs_; }
  int num_inputs() const { return num_inputs_; }
  GemmPath path() const { return path_; }
  size_t bytes() const {
    return data_.size() * sizeof(uint16_t) + codes_.size() + scales_.size() * sizeof(float) +
           block_scales_.size();
  }
  Bf16 At(int output, int input) const;  // for tests and inspection; not of FP8 or MXFP4

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
  size_t BlockIndex(int panel, int block) const {
    return static_cast<size_t>(panel) * static_cast<size_t>(num_inputs_ / 32) +
           static_cast<size_t>(block);
  }

  int num_outputs_ = 0, num_inputs_ = 0, padded_inputs_ = 0;
  GemmPath path_ = GemmPath::kFma;
  AlignedBuffer<uint16_t> data_;
  int scale_inputs_ = 0, num_segments_ = 0;  // 0: BF16
  AlignedBuffer<uint8_t> codes_;             // in the order of data_; of MXFP4: see above
  AlignedBuffer<uint8_t> block_scales_;      // MXFP4: [panel][block][kPanel]
  AlignedBuffer<float> scales_;              // [panel][segment][kPanel]
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

// Several matrices of one shape and path at once, each times its own rows of x: experts, where a
// GEMM each would leave threads waiting for one another. FP8 weights are multiplied as codes, which
// BF16 holds exactly, in slices of inputs whose sums are then scaled and added; MXFP4 weights as
// the BF16 that they are. A row's result is a function of that row and its matrix alone, as in
// Gemm.
struct GemmGroup {
  const PackedMatrix* w = nullptr;
  std::span<const int32_t> rows;  // of x
  float* y = nullptr;             // [rows, N]
};
class GroupedGemmWorkspace {
 public:
  AlignedBuffer<float> x;          // packed activations of kFma
  AlignedBuffer<uint16_t> x_bf16;  // and of kAvx512Bf16
  AlignedBuffer<uint16_t> slices;  // each thread's weights as BF16
};
// The path that GroupedGemm has for a machine whose GEMMs take `path`: AMX needs more rows than
// experts see, and is not used.
GemmPath GroupedGemmPath(GemmPath path);
void GroupedGemm(ThreadPool& pool, GroupedGemmWorkspace& workspace, const float* x, size_t x_stride,
                 std::span<const GemmGroup> groups);

// Operations a second (a multiply-add is two) that all threads reach together on the path's own
// instruction, from registers: what the path is measured against. REQUIRES: IsSupported(path).
double MeasurePeak(ThreadPool& pool, GemmPath path);

}  // namespace oscar::simd
