// GEMMs of FP8 weights with the rows of a decode step, 9 to 64 of them, on Hopper: weights are read
// once a launch, whatever the rows. A row's bits do not depend on the other rows of a launch, only
// on how many there are, rounded up to 16.
#pragma once

#include "cuda/gemm/gemm_arguments.h"
#include "oscar/status.h"

namespace oscar::cuda {

inline constexpr int kBatchGemmRows = 64;  // at most

// Whether this device has the instructions and its driver the entry point.
bool HasBatchGemm();
// Whether the kernel takes this matrix and that many rows.
inline bool FitsBatchGemm(const DeviceMatrix& matrix, int rows) {
  return matrix.is_fp8() && rows >= 1 && rows <= kBatchGemmRows &&
         FitsGemmKernels(matrix.inputs, true) &&
         (matrix.scale_columns == 1 || matrix.scale_columns == matrix.inputs / kScaleInputs);
}

// How a matrix is shared among the multiprocessors. For benchmarks and tests to choose.
struct BatchGemmPlan {
  int groups = 1;   // of 64 weight rows, 1 to 4 of them per tile
  int cluster = 1;  // blocks that share a tile's inputs: 1, 2, 4 or 8
};
BatchGemmPlan PlanBatchGemm(const DeviceMatrix& matrix, GemmOutput output, int rows);

// Asynchronous; may be captured. Begins to read weights while the launch before it still runs.
Status LaunchBatchGemm(const GemmArguments& args, Stream stream);
Status LaunchBatchGemm(const GemmArguments& args, const BatchGemmPlan& plan, Stream stream);

}  // namespace oscar::cuda
