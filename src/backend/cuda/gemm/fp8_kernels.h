// FP8 weights on the device: quantising and multiplying out whole matrices. Each is one
// asynchronous launch.
#pragma once

#include <cstdint>

#include "base/half.h"
#include "cuda/attention/cache_view.h"
#include "cuda/gemm/gemm_arguments.h"
#include "oscar/status.h"

namespace oscar::cuda {

// codes and scales [rows] of BF16 weights [rows, inputs], bit for bit those of QuantizeRowToFp8.
Status LaunchQuantize(const Bf16* weights, uint32_t* codes, float* scales, int rows, int inputs,
                      Stream stream);
// The same in blocks of `tile_rows` x kScaleInputs, from the matrix's first row on, to where `to`
// has them. REQUIRES: scales of blocks, tile_rows a multiple of to.scale_rows.
Status LaunchQuantizeBlocks(const Bf16* weights, const DeviceMatrix& to, int tile_rows,
                            Stream stream);
// The whole matrix as BF16 [outputs, inputs]: code times scale, rounded.
Status LaunchMultiplyOut(const DeviceMatrix& matrix, Bf16* out, Stream stream);

}  // namespace oscar::cuda
