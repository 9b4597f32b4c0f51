// Makes a row of the kernel table out of a DecodeTraits.
#pragma once

#include "cuda/attention/decode_attention.cuh"
#include "cuda/attention/decode_kernels.h"
#include "cuda/attention/sink_params.h"

namespace oscar::cuda {

template <typename T>
DecodeKernelInfo DecodeKernelOf() {
  // Each quarter of a multiprocessor has 16,384 registers, given out by warps, 256 at a time.
  static_assert((T::kThreads / 32 * T::kCtasPerSm + 3) / 4 * ((T::kRegisters + 7) / 8 * 256) <=
                16384);
  return {T::kKind,
          T::kDim,
          T::kGroup,
          T::kHeads,
          T::kCtasPerSm,
          T::kWarps,
          T::kThreads,
          T::kStageBytes,
          reinterpret_cast<const void*>(&DecodeAttentionKernel<T>),
          [](int stages, int stage_bytes, int heads, int batch) {
            return DecodeShared<T>(stages, stage_bytes, heads, batch).total;
          }};
}
template <BlockKind kKind, int kDim, int kGroup, int kHeads>
DecodeKernelInfo DecodeKernel() {
  return DecodeKernelOf<DecodeTraits<kKind, kDim, kGroup, kHeads>>();
}
template <int kDim, int kGroup, int kHeads>
DecodeKernelInfo MixedDecodeKernel() {
  return DecodeKernelOf<MixedDecodeTraits<kDim, kGroup, kHeads>>();
}
template <BlockKind kKind, int kGroup>
DecodeKernelInfo SinkDecodeKernel() {
  return DecodeKernelOf<SinkTraits<DecodeTraits<kKind, kSinkHeadDim, kGroup, 8>>>();
}
template <int kGroup>
DecodeKernelInfo SinkMixedDecodeKernel() {
  return DecodeKernelOf<SinkTraits<MixedDecodeTraits<kSinkHeadDim, kGroup, 8>>>();
}

}  // namespace oscar::cuda
