// The write kernels, by head dim and rotation. Private to src/backend/cuda.
#pragma once

#include "quant/rotation_kind.h"

namespace oscar::cuda {

// Null where there is none.
const void* FindWriteKernel(int head_dim, RotationKind rotation);

}  // namespace oscar::cuda
