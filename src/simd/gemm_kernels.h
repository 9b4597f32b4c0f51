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

// gemm_amx.cc. x: [rows, padded_inputs] BF16 bits, for AMX a multiple of 16 rows (zero padded); one
// panel; c: [rows, 32] with stride.
bool HasAmx();
bool HasAvx512Bf16();
void AmxPanel(const uint16_t* x, int rows, int padded_inputs, const uint16_t* panel, float* c,
              size_t c_stride);
void Avx512Bf16Panel(const uint16_t* x, int rows, int padded_inputs, const uint16_t* panel,
                     float* c, size_t c_stride);

}  // namespace oscar::simd
