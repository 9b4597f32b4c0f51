// GemmDispatch of BF16 weights with many rows of activations on Hopper: tiles through wgmma, what
// follows the product (SiLU x up, the residual sum) in the same kernel. A row's sums do not depend
// on the other rows, nor on how many there are.
#pragma once

#include "cuda/gemm/gemm_arguments.h"
#include "oscar/status.h"

namespace oscar::cuda {

// Whether this device has the instructions and its driver the entry point.
bool HasTileGemm();
// Whether the kernel takes this shape: rows are copied and activations written in whole 16 bytes.
inline bool FitsTileGemm(int outputs, int inputs, int out_stride) {
  return inputs % 8 == 0 && outputs % 16 == 0 && out_stride % 8 == 0;
}

// BF16 weights. Asynchronous; may be captured.
Status LaunchTileGemm(const GemmArguments& args, Stream stream);

}  // namespace oscar::cuda
