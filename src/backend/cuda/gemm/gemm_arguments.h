// What the GEMMs of a pass take: a matrix in device memory, rows of activations, where the
// result goes.
#pragma once

#include <cstdint>

#include "base/half.h"
#include "base/mxfp4.h"
#include "cuda/attention/cache_view.h"

namespace oscar::cuda {

enum class GemmOutput : uint8_t {
  kFloat,    // out[n][m] = sum + bias, fp32
  kAdd,      // out[n][m] += sum + bias, fp32: the residual stream
  kSiluMul,  // weights are gate rows, then up rows; out[n][m] = silu(gate) * up, BF16
};

// A matrix in device memory: BF16, FP8 codes with scales or, of experts, MXFP4. Does not own them.
struct DeviceMatrix {
  Bf16* weights = nullptr;    // [outputs, inputs]; or
  uint8_t* mxfp4 = nullptr;   // [outputs, Mxfp4RowBytes(inputs)], rows of base/mxfp4.h; or
  uint32_t* codes = nullptr;  // [outputs, inputs / 4], words of base/fp8.h, with
  float* scales = nullptr;    // [outputs / scale_rows, scale_columns]
  int scale_rows = 1;
  int scale_columns = 1;  // 1: of whole rows; else inputs / kScaleInputs
  int outputs = 0, inputs = 0;

  bool is_fp8() const { return codes != nullptr; }
  bool is_mxfp4() const { return mxfp4 != nullptr; }
  uint64_t bytes() const {
    const auto size = static_cast<uint64_t>(outputs) * static_cast<uint64_t>(inputs);
    if (is_mxfp4()) {
      return static_cast<uint64_t>(outputs) * static_cast<uint64_t>(Mxfp4RowBytes(inputs));
    }
    if (!is_fp8()) return size * sizeof(Bf16);
    return size + static_cast<uint64_t>(outputs / scale_rows) *
                      static_cast<uint64_t>(scale_columns) * sizeof(float);
  }
};
inline constexpr int kScaleInputs = 128;  // inputs per block scale

// Whether our kernels take matrices of this width: 64 bytes of a row at a time, and whole blocks.
inline bool FitsGemmKernels(int inputs, bool fp8) {
  return inputs > 0 && inputs % (fp8 ? kScaleInputs : 32) == 0;
}

struct GemmArguments {
  DeviceMatrix matrix;                 // kSiluMul: gate rows, then as many up rows
  const Bf16* x = nullptr;             // [rows, inputs]; or, for gemv,
  const float* residual = nullptr;     // [rows, inputs], to be normed with
  const float* norm_weight = nullptr;  // [inputs] and
  float norm_epsilon = 0.0f;
  void* out = nullptr;  // [rows, out_stride], of which each row's first numbers are written
  int out_stride = 0;
  const float* bias = nullptr;  // [outputs]; null: none; not for kSiluMul
  int rows = 0;
  GemmOutput output = GemmOutput::kFloat;

  int outputs() const {
    return output == GemmOutput::kSiluMul ? matrix.outputs / 2 : matrix.outputs;
  }
};

}  // namespace oscar::cuda
