#include "cuda/attention/prefill_attention.cuh"
#include "cuda/attention/prefill_kernels.h"

namespace oscar::cuda {
namespace {

template <typename T>
PrefillKernelInfo Kernel() {
  return {T::kKind,
          T::kMixed,
          T::kHasSinks,
          T::kDim,
          kGenericThreads,
          T::kSharedBytes,
          0,
          reinterpret_cast<const void*>(&PrefillAttentionKernel<T>)};
}

}  // namespace

#define OSCAR_X(dim)                                         \
  Kernel<GenericPrefillTraits<BlockKind::kInt2, dim>>(),     \
      Kernel<GenericPrefillTraits<BlockKind::kInt4, dim>>(), \
      Kernel<GenericPrefillTraits<BlockKind::kBf16, dim>>(), \
      Kernel<MixedGenericPrefillTraits<dim>>(),
const PrefillKernelInfo kPrefillKernelsGeneric[] = {
    OSCAR_HEAD_DIMS(OSCAR_X)
        Kernel<SinkTraits<GenericPrefillTraits<BlockKind::kInt2, kSinkHeadDim>>>(),
    Kernel<SinkTraits<GenericPrefillTraits<BlockKind::kInt4, kSinkHeadDim>>>(),
    Kernel<SinkTraits<GenericPrefillTraits<BlockKind::kBf16, kSinkHeadDim>>>(),
    Kernel<SinkTraits<MixedGenericPrefillTraits<kSinkHeadDim>>>(),
    {}};
#undef OSCAR_X

}  // namespace oscar::cuda
