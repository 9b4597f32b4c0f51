// Makes a row of the kernel table out of a DecodeTraits.
#pragma once

#include "cuda/attention/decode_attention.cuh"
#include "cuda/attention/decode_kernels.h"

namespace oscar::cuda {

template <BlockKind kKind, int kDim, int kGroup, int kHeads>
DecodeKernelInfo DecodeKernel() {
  using T = DecodeTraits<kKind, kDim, kGroup, kHeads>;
  return {
      kKind,
      kDim,
      kGroup,
      T::kHeads,
      T::kCtasPerSm,
      T::kWarps,
      T::kThreads,
      T::kStageBytes,
      reinterpret_cast<const void*>(&DecodeAttentionKernel<T>),
      [](int stages, int heads, int batch) { return DecodeShared<T>(stages, heads, batch).total; }};
}

}  // namespace oscar::cuda
