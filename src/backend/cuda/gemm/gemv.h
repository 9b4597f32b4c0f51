// GemmDispatch of weights, BF16 or FP8, with one row of activations or two: what a step of few
// sequences consists of. The rows stay in shared memory while the weights pass.
#pragma once

#include "cuda/gemm/gemm_arguments.h"
#include "oscar/status.h"

namespace oscar::cuda {

// With two rows, unpacking FP8 and multiplying take as long as memory does: the skinny kernels are
// faster there.
constexpr int GemvRows(bool fp8) { return fp8 ? 1 : 2; }

// Whether LaunchGemv takes so many rows of a matrix, and this device has the shared memory.
bool FitsGemv(const DeviceMatrix& matrix, int rows);
// Sums in fp32; a row's bits do not depend on the other row. Takes the residual stream, too, and
// does its RMSNorm on the way. Asynchronous; may be captured. Begins to read weights while the
// launch before it still runs.
Status LaunchGemv(const GemmArguments& args, Stream stream);

}  // namespace oscar::cuda
