#include "cuda/attention/prefill_attention.cuh"
#include "cuda/attention/prefill_kernels.h"

namespace oscar::cuda {
namespace {

template <BlockKind kKind, int kDim>
PrefillKernelInfo Kernel() {
  using T = GenericPrefillTraits<kKind, kDim>;
  return {kKind,           kDim, kGenericThreads,
          T::kSharedBytes, 0,    reinterpret_cast<const void*>(&PrefillAttentionKernel<T>)};
}

}  // namespace

#define OSCAR_X(dim) \
  Kernel<BlockKind::kInt2, dim>(), Kernel<BlockKind::kInt4, dim>(), Kernel<BlockKind::kBf16, dim>(),
const PrefillKernelInfo kPrefillKernelsGeneric[] = {OSCAR_HEAD_DIMS(OSCAR_X){}};
#undef OSCAR_X

}  // namespace oscar::cuda
