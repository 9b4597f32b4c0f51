#include "cuda/kv/seal_kernels-inl.cuh"

namespace oscar::cuda {

template <>
const void* FindSealKernel<BlockKind::kInt2>(int head_dim, int group_dims, bool fits) {
  if (!fits && head_dim == 128 && group_dims == 128) {
    return reinterpret_cast<const void*>(&SealPagesKernel<BlockKind::kInt2, 128, 128, false>);
  }
  return FindFittingKernel<BlockKind::kInt2>(head_dim, group_dims);
}

}  // namespace oscar::cuda
