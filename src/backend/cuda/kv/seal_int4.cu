#include "cuda/kv/seal_kernels-inl.cuh"

namespace oscar::cuda {

template <>
const void* FindSealKernel<BlockKind::kInt4>(int head_dim, int group_dims, bool) {
  return FindFittingKernel<BlockKind::kInt4>(head_dim, group_dims);
}

}  // namespace oscar::cuda
