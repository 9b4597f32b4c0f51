// The micro-kernels behind gemm.h, one table a path and target. Internal to the module.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/gemm.h"

namespace oscar::simd {

// Widest register block of any fp32 kernel.
inline constexpr int kMaxTileRows = 12;

struct FmaKernels {
  int tile_rows;  // rows of X that one call takes at most; the row stride of packed X
  // c[r, 0..32) (+)= sum over k of x[k, r] w[k, 0..32), k ascending, one fused chain an element.
  // x: [k_count, x_stride], `rows` of each used; w: [k_count, 16, 2] of a panel; c starts at zero
  // where `first`.
  void (*tile)(const float* x, int x_stride, int rows, const uint16_t* w, int k_count, float* c,
               size_t c_stride, bool first);
};
const FmaKernels& ActiveFmaKernels();

// gemm_fp8.cc. Codes that may be read, and words that may be written, past the end.
inline constexpr size_t kFp8Slack = 64;
struct Fp8Kernels {
  // FP8 E4M3 codes, none of them NaN, as BF16: exact, in the same order.
  void (*expand)(const uint8_t* codes, uint16_t* out, size_t count);
  // sums[r, 0..32) = fma(scales[0..32), parts[r, 0..32), sums[r, 0..32)); `first`: sums are zero.
  void (*add_scaled)(const float* parts, const float* scales, int rows, float* sums, bool first);
};
const Fp8Kernels& ActiveFp8Kernels();

// gemm_mxfp4.cc. A block of a panel: codes of 32 inputs and 32 outputs, two to a byte in the order
// that PackedMatrix::PackMxfp4Rows has, and the scale of each output, as BF16 in the order of a
// BF16 panel: of pairs of inputs (kAvx512Bf16), or not (kFma). Exact.
using Mxfp4Expander = void (*)(const uint8_t* codes, const uint8_t* scales, bool in_pairs,
                               uint16_t* out);
Mxfp4Expander ActiveMxfp4Expander();

// gemm_amx.cc.
bool HasAmx();      // tiles of BF16
bool HasAmxInt8();  // and of bytes
bool HasAvx512Bf16();

inline constexpr int kAmxTileElements = 16 * 32;  // of x: 16 rows of 32 inputs
inline constexpr int kAmxSums = 2 * 16 * 16;      // 16 rows of a panel's 32 outputs
inline constexpr int kAmxResidentSteps = 128;     // tiles of inputs whose 128 rows stay in L2
// Rounds up to 16 rows of up to 32 inputs into a tile [16][32] of x; what is past them is zero.
void AmxPackTile(const float* x, size_t x_stride, int rows, int inputs, uint16_t* tile);
// The leading blocks of rows and panels of a call whose outputs are all real go straight into
// y [rows, outputs]; the others' sums stay for the caller.
struct AmxOutput {
  float* y = nullptr;
  ptrdiff_t stride = 0;  // elements between rows
  int row_blocks = 0;
  int panels = 0;
};
// `num_panels` consecutive panels times `row_blocks` blocks of 16 rows. x: [pair of row blocks]
// [inputs / 32][2 blocks] tiles of [16][32]; sums: [panel][row block][2 halves of 16 outputs]
// [16 rows][16].
void AmxPanels(const uint16_t* x, int row_blocks, int padded_inputs, const uint16_t* panels,
               int num_panels, float* sums, const AmxOutput& output = {});
// x: [rows, inputs] BF16 bits with stride; `inputs`, an even number, of one panel; c: [rows, 32]
// with stride.
void Avx512Bf16Panel(const uint16_t* x, int rows, int x_stride, int inputs, const uint16_t* panel,
                     float* c, size_t c_stride);

// Runs `rounds` of the path's instruction from registers; how many operations those were. Not for
// kFma.
double Bf16PeakOperations(GemmPath path, int64_t rounds);

}  // namespace oscar::simd
