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

const PrefillKernelInfo kPrefillKernelsGeneric[] = {
    Kernel<BlockKind::kInt2, 64>(),  Kernel<BlockKind::kInt2, 128>(),
    Kernel<BlockKind::kInt2, 256>(), Kernel<BlockKind::kInt4, 64>(),
    Kernel<BlockKind::kInt4, 128>(), Kernel<BlockKind::kInt4, 256>(),
    Kernel<BlockKind::kBf16, 64>(),  Kernel<BlockKind::kBf16, 128>(),
    Kernel<BlockKind::kBf16, 256>(), {}};

}  // namespace oscar::cuda
