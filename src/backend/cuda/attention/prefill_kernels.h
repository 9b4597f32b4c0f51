// The prefill kernels this library was built with. Private to src/backend/cuda.
#pragma once

#include "cuda/attention/cache_view.h"

namespace oscar::cuda {

struct PrefillKernelInfo {
  BlockKind kind;
  bool mixed;  // heads differ in bits; `kind` means nothing
  bool sinks;  // AttentionShape::has_sinks
  int head_dim;
  int threads;
  int shared_bytes;  // without the raw blocks
  int raw_pages;     // quantised blocks of a tile, as they lie in memory; 0: none, or counted
  const void* function;
};

// Null-terminated (function == nullptr). Sm90 is wgmma, on compute capability 9.0 alone.
extern const PrefillKernelInfo kPrefillKernelsSm90[];
extern const PrefillKernelInfo kPrefillKernelsGeneric[];
// Of keys that are not rows, for any device: `kind` and `mixed` mean nothing.
extern const PrefillKernelInfo kPrefillKernelsForms[];

}  // namespace oscar::cuda
