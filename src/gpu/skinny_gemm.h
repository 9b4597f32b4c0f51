// Products of weights with few rows of activations, at the speed of reading the weights once. A
// row's sum does not depend on the other rows; nor on how many there are, where that is asked for.
#pragma once

#include <cstdint>

#include "base/half.h"
#include "cuda/cache_view.h"
#include "oscar/status.h"

namespace oscar::gpu {

using cuda::Stream;

inline constexpr int kSkinnyRows = 16;  // activations a launch, at most

enum class ProductOutput : uint8_t {
  kBf16,     // out[n][m] = sum + bias
  kFloat,    // the same in fp32
  kAdd,      // out[n][m] += sum + bias, fp32: the residual stream
  kSiluMul,  // weights are gate rows, then up rows; out[n][m] = silu(gate) * up, BF16
};

// Rows for which a product may take the residual stream itself and do its RMSNorm on the way: few
// enough that every block can read them whole.
inline constexpr int kNormedRows = 4;

struct SkinnyArguments {
  const Bf16* weights = nullptr;       // [outputs, inputs]; kSiluMul: [2 outputs, inputs]
  const Bf16* x = nullptr;             // [rows, inputs]; or
  const float* residual = nullptr;     // [rows, inputs], at most kNormedRows, to be normed with
  const float* norm_weight = nullptr;  // [inputs] and
  float norm_epsilon = 0.0f;
  void* out = nullptr;          // [rows, outputs]
  const float* bias = nullptr;  // [outputs]; null: none
  int outputs = 0, inputs = 0;  // inputs: a multiple of 32
  int rows = 0;                 // 1 to kSkinnyRows
  ProductOutput output = ProductOutput::kBf16;
  // One kernel for any number of rows, so that launches of different sizes agree bit for bit.
  bool invariant = false;
};

// Asynchronous; may be captured. Begins to read weights while the launch before it still runs.
Status LaunchSkinny(const SkinnyArguments& args, Stream stream);

}  // namespace oscar::gpu
