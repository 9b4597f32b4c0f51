// Makes rows of the seal kernel table.
#pragma once

#include "cuda/kernels/page_seal.cuh"
#include "cuda/seal_kernels.h"

namespace oscar::cuda {

template <PageKind kKind, int kDim, int kGroup, bool kFit>
SealKernelInfo SealKernel() {
  return {kKind, kDim, kGroup, kFit,
          reinterpret_cast<const void*>(&SealPagesKernel<kKind, kDim, kGroup, kFit>)};
}

}  // namespace oscar::cuda
