#include "cuda/kernels/prefill_attention.cuh"
#include "cuda/prefill_kernels.h"

namespace oscar::cuda {
namespace {

template <PageKind kKind, int kDim>
PrefillKernelInfo Kernel() {
  using T = GenericPrefillTraits<kKind, kDim>;
  return {kKind,           kDim, kGenericThreads,
          T::kSharedBytes, 0,    reinterpret_cast<const void*>(&PrefillAttentionKernel<T>)};
}

}  // namespace

const PrefillKernelInfo kPrefillKernelsGeneric[] = {
    Kernel<PageKind::kInt2, 64>(),  Kernel<PageKind::kInt2, 128>(),
    Kernel<PageKind::kInt2, 256>(), Kernel<PageKind::kInt4, 64>(),
    Kernel<PageKind::kInt4, 128>(), Kernel<PageKind::kInt4, 256>(),
    Kernel<PageKind::kBf16, 64>(),  Kernel<PageKind::kBf16, 128>(),
    Kernel<PageKind::kBf16, 256>(), {}};

}  // namespace oscar::cuda
