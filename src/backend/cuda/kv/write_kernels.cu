#include "cuda/kv/kv_write.cuh"
#include "cuda/kv/write_kernels.h"

namespace oscar::cuda {
namespace {

template <int kDim>
const void* Find(RotationKind rotation) {
  switch (rotation) {
    case RotationKind::kNone:
      return reinterpret_cast<const void*>(&WriteTokensKernel<kDim, RotationKind::kNone>);
    case RotationKind::kHadamard:
      return reinterpret_cast<const void*>(&WriteTokensKernel<kDim, RotationKind::kHadamard>);
    case RotationKind::kMatrix:
      return reinterpret_cast<const void*>(&WriteTokensKernel<kDim, RotationKind::kMatrix>);
  }
  return nullptr;
}

}  // namespace

const void* FindWriteKernel(int head_dim, RotationKind rotation) {
  return head_dim == 64    ? Find<64>(rotation)
         : head_dim == 128 ? Find<128>(rotation)
         : head_dim == 256 ? Find<256>(rotation)
                           : nullptr;
}

}  // namespace oscar::cuda
