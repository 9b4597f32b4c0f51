// Descriptions of matrices for the tensor copy engine (sm_90). The driver's function that makes
// them is found at run time. Include from .cc and .cu files only.
#pragma once

#include <cuda.h>

#include "oscar/status.h"

namespace oscar::cuda {

// Whether the driver has the function.
bool HasTensorMaps();

struct MatrixShape {
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  int element_bytes = 2;
  int rows = 0, columns = 0;  // row after row
  int box_rows = 0;           // at most 256
};

// Boxes of box_rows rows x 128 bytes, with 128-byte swizzle; zeros beyond the matrix.
Result<CUtensorMap> TensorMapOf(const void* matrix, const MatrixShape& shape);

}  // namespace oscar::cuda
