// The write kernels, by head dim and rotation. Private to src/cuda.
#pragma once

#include "cuda/kernels/write_params.h"

namespace oscar::cuda {

// Null where there is none.
const void* FindWriteKernel(int head_dim, RotationKind rotation);

}  // namespace oscar::cuda
