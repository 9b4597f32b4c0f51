// Matrices as the tensor copy engine (sm_90) takes them. Include from .cc and .cu files only.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "base/half.h"
#include "oscar/status.h"

namespace oscar::cuda {

// Whether the driver has what makes them.
bool HasTensorMaps();

// Boxes of `box_rows` rows x kSwizzledInputs of a matrix [rows, inputs], with 128-byte swizzle;
// zeros beyond it.
inline constexpr int kSwizzledInputs = 64;
Result<CUtensorMap> SwizzledMap(const Bf16* matrix, int64_t rows, int inputs, int box_rows);
// The same of bytes: boxes of `box_rows` rows x 128.
Result<CUtensorMap> SwizzledByteMap(const void* matrix, int64_t rows, int64_t row_bytes,
                                    int box_rows);
// Boxes of `box_rows` rows x `box_bytes` of rows of `row_bytes`, one row behind the other.
Result<CUtensorMap> ByteMap(const void* matrix, int64_t rows, int64_t row_bytes, int box_rows,
                            int box_bytes);

}  // namespace oscar::cuda
