// Makes rows of the seal kernel table.
#pragma once

#include "cuda/kv/page_seal.cuh"
#include "cuda/kv/seal_kernels.h"

namespace oscar::cuda {

template <BlockKind kKind, int kDim, int kGroup, bool kFit>
SealKernelInfo SealKernel() {
  return {kKind, kDim, kGroup, kFit,
          reinterpret_cast<const void*>(&SealPagesKernel<kKind, kDim, kGroup, kFit>)};
}

}  // namespace oscar::cuda
