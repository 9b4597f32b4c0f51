// Finds the seal kernel of a kind.
#pragma once

#include "cuda/kv/page_seal.cuh"
#include "cuda/kv/seal_kernels.h"

namespace oscar::cuda {

template <BlockKind kKind>
const void* FindFittingKernel(int head_dim, int group_dims) {
  return DispatchBlockShape<const void*>(head_dim, group_dims, nullptr, []<int kDim, int kGroup>() {
    return reinterpret_cast<const void*>(&SealPagesKernel<kKind, kDim, kGroup, true>);
  });
}

}  // namespace oscar::cuda
