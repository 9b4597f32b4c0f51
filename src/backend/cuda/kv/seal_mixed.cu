#include "cuda/kv/seal_kernels-inl.cuh"

namespace oscar::cuda {

const void* FindMixedSealKernel(int head_dim, int group_dims) {
  return DispatchBlockShape<const void*>(head_dim, group_dims, nullptr, []<int kDim, int kGroup>() {
    return reinterpret_cast<const void*>(&MixedSealPagesKernel<kDim, kGroup>);
  });
}

}  // namespace oscar::cuda
