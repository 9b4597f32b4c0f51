#include "cuda/attention/prefill_attention_sm90.cuh"
#include "cuda/attention/prefill_kernels.h"

namespace oscar::cuda {
namespace {

template <typename T>
PrefillKernelInfo Kernel() {
  constexpr int kRawPages = T::kQuantised ? T::kTilePages : 0;
  static_assert(T::kSharedBytes + kRawPages * static_cast<int>(T::kLayout.block_bytes()) <=
                227 * 1024);
  return {T::kKind,     T::kMixed,
          T::kHasSinks, T::kDim,
          T::kThreads,  T::kSharedBytes,
          kRawPages,    reinterpret_cast<const void*>(&PrefillAttentionSm90Kernel<T>)};
}

}  // namespace

#define OSCAR_X(dim)                                                                              \
  Kernel<PrefillTraits<BlockKind::kInt2, dim>>(), Kernel<PrefillTraits<BlockKind::kInt4, dim>>(), \
      Kernel<PrefillTraits<BlockKind::kBf16, dim>>(), Kernel<MixedPrefillTraits<dim>>(),
const PrefillKernelInfo kPrefillKernelsSm90[] = {
    OSCAR_HEAD_DIMS(OSCAR_X) Kernel<SinkTraits<PrefillTraits<BlockKind::kInt2, kSinkHeadDim>>>(),
    Kernel<SinkTraits<PrefillTraits<BlockKind::kInt4, kSinkHeadDim>>>(),
    Kernel<SinkTraits<PrefillTraits<BlockKind::kBf16, kSinkHeadDim>>>(),
    Kernel<SinkTraits<MixedPrefillTraits<kSinkHeadDim>>>(),
    {}};
#undef OSCAR_X

}  // namespace oscar::cuda
