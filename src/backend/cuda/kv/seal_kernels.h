// The seal kernels this library was built with. Private to src/backend/cuda.
#pragma once

#include "cuda/attention/cache_view.h"

namespace oscar::cuda {

struct SealKernelInfo {
  BlockKind kind;
  int head_dim;
  int group_dims;
  bool fits;  // has the least-squares rules, too; without them more blocks fit on an SM
  const void* function;
};

// Null-terminated (function == nullptr); the first match is the best.
extern const SealKernelInfo kSealKernelsInt2[];
extern const SealKernelInfo kSealKernelsInt4[];

}  // namespace oscar::cuda
