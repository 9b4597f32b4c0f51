#include "cuda/attention/prefill_attention_sm90.cuh"
#include "cuda/attention/prefill_kernels.h"

namespace oscar::cuda {
namespace {

template <BlockKind kKind, int kDim>
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
    Kernel<BlockKind::kInt2, 64>(),  Kernel<BlockKind::kInt2, 128>(),
    Kernel<BlockKind::kInt2, 256>(), Kernel<BlockKind::kInt4, 64>(),
    Kernel<BlockKind::kInt4, 128>(), Kernel<BlockKind::kInt4, 256>(),
    Kernel<BlockKind::kBf16, 64>(),  Kernel<BlockKind::kBf16, 128>(),
    Kernel<BlockKind::kBf16, 256>(), {}};

}  // namespace oscar::cuda
