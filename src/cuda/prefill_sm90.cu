#include "cuda/kernels/prefill_attention_sm90.cuh"
#include "cuda/prefill_kernels.h"

namespace oscar::cuda {
namespace {

template <PageKind kKind, int kDim>
PrefillKernelInfo Kernel() {
  using T = PrefillTraits<kKind, kDim>;
  constexpr int kRawPages = T::kQuantised ? T::kTilePages : 0;
  static_assert(T::kSharedBytes + kRawPages * static_cast<int>(T::kLayout.block_bytes()) <=
                227 * 1024);
  return {kKind,       kDim,
          T::kThreads, T::kSharedBytes,
          kRawPages,   reinterpret_cast<const void*>(&PrefillAttentionSm90Kernel<T>)};
}

}  // namespace

const PrefillKernelInfo kPrefillKernelsSm90[] = {
    Kernel<PageKind::kInt2, 64>(),  Kernel<PageKind::kInt2, 128>(),
    Kernel<PageKind::kInt2, 256>(), Kernel<PageKind::kInt4, 64>(),
    Kernel<PageKind::kInt4, 128>(), Kernel<PageKind::kInt4, 256>(),
    Kernel<PageKind::kBf16, 64>(),  Kernel<PageKind::kBf16, 128>(),
    Kernel<PageKind::kBf16, 256>(), {}};

}  // namespace oscar::cuda
