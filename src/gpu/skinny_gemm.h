// Products of weights, BF16 or FP8, with few rows of activations, at the speed of reading the
// weights once; sums in fp32. A row's sum does not depend on the other rows; nor on how many there
// are, where that is asked for.
#pragma once

#include <cstdint>

#include "base/half.h"
#include "cuda/cache_view.h"
#include "oscar/status.h"

namespace oscar::gpu {

using cuda::Stream;

// Activations a launch, at most; FP8 matrices take more where sums need not be the same for any
// number of them.
inline constexpr int kSkinnyRows = 16, kFp8SkinnyRows = 32;
constexpr int SkinnyRows(bool wide) { return wide ? kFp8SkinnyRows : kSkinnyRows; }
// Whether this device has the shared memory for any of them (consumer cards have not), and for more
// than kSkinnyRows.
bool TakesSkinnyLaunches();
bool TakesWideLaunches();

enum class ProductOutput : uint8_t {
  kFloat,    // out[n][m] = sum + bias, fp32
  kAdd,      // out[n][m] += sum + bias, fp32: the residual stream
  kSiluMul,  // weights are gate rows, then up rows; out[n][m] = silu(gate) * up, BF16
};

// Rows for which a product may take the residual stream itself and do its RMSNorm on the way: few
// enough that every block can read them whole.
inline constexpr int kNormedRows = 4;

// A matrix in device memory: BF16, or FP8 codes with scales. Does not own them.
struct DeviceMatrix {
  Bf16* weights = nullptr;    // [outputs, inputs]; or
  uint32_t* codes = nullptr;  // [outputs, inputs / 4], words of base/fp8.h, with
  float* scales = nullptr;    // [outputs / scale_rows, scale_columns]
  int scale_rows = 1;
  int scale_columns = 1;  // 1: of whole rows; else inputs / kScaleInputs
  int outputs = 0, inputs = 0;

  bool is_fp8() const { return codes != nullptr; }
  uint64_t bytes() const;
};
inline constexpr int kScaleInputs = 128;  // inputs of a block with a scale of its own

struct SkinnyArguments {
  DeviceMatrix matrix;                 // kSiluMul: gate rows, then as many up rows
  const Bf16* x = nullptr;             // [rows, inputs]; or
  const float* residual = nullptr;     // [rows, inputs], at most kNormedRows, to be normed with
  const float* norm_weight = nullptr;  // [inputs] and
  float norm_epsilon = 0.0f;
  void* out = nullptr;  // [rows, out_stride], of which each row's first numbers are written
  int out_stride = 0;
  const float* bias = nullptr;  // [outputs]; null: none
  int rows = 0;                 // 1 to SkinnyRows
  ProductOutput output = ProductOutput::kFloat;
  // One kernel for any number of rows, so that launches of different sizes agree bit for bit.
  bool invariant = false;
};

// Whether LaunchSkinny takes matrices of this width: 64 bytes of a row at a time, and whole blocks.
inline bool FitsSkinny(int inputs, bool fp8) { return inputs % (fp8 ? kScaleInputs : 32) == 0; }
// Asynchronous; may be captured. Begins to read weights while the launch before it still runs.
Status LaunchSkinny(const SkinnyArguments& args, Stream stream);

}  // namespace oscar::gpu
