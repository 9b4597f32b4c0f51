// The seal kernels this library was built with. Private to src/cuda.
#pragma once

#include "cuda/cache_view.h"

namespace oscar::cuda {

struct SealKernelInfo {
  PageKind kind;
  int head_dim;
  int group_dims;
  bool fits;  // has the least-squares rules
  const void* function;
};

// Null-terminated (function == nullptr).
extern const SealKernelInfo kSealKernelsInt2[];
extern const SealKernelInfo kSealKernelsInt4[];

}  // namespace oscar::cuda
