// The decode kernels this library was built with: one row an instantiation. Private to
// src/backend/cuda.
#pragma once

#include "cuda/attention/cache_view.h"

namespace oscar::cuda {

struct DecodeKernelInfo {
  BlockKind kind;
  int head_dim;
  int group_dims;
  int heads;  // query heads a block handles: 4, 8 or 16
  int ctas_per_sm;
  int warps;  // consumers; what a page's split is a multiple of
  int threads;
  int stage_bytes;
  const void* function;
  int (*shared_bytes)(int stages, int stage_bytes, int heads, int batch);
};

// Null-terminated (function == nullptr). A translation unit per head dim defines its own.
template <int kDim>
const DecodeKernelInfo* DecodeKernels();
// Of layers whose heads differ in bits: `kind` means nothing.
template <int kDim>
const DecodeKernelInfo* MixedDecodeKernels();
// The same of layers with learned sinks, of head dim kSinkHeadDim.
const DecodeKernelInfo* SinkDecodeKernels();
const DecodeKernelInfo* SinkMixedDecodeKernels();
// Of layers whose keys are not rows: `kind` means nothing, `group_dims` is V's.
template <int kDim>
const DecodeKernelInfo* FormDecodeKernels();

}  // namespace oscar::cuda
