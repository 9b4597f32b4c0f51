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
    case RotationKind::kBlockHadamard:
    case RotationKind::kCalibrated:
      return reinterpret_cast<const void*>(&WriteTokensKernel<kDim, RotationKind::kCalibrated>);
  }
  return nullptr;
}

}  // namespace

const void* FindWriteKernel(int head_dim, RotationKind rotation) {
  return DispatchHeadDim<const void*>(head_dim, nullptr,
                                      [&]<int kDim>() { return Find<kDim>(rotation); });
}

}  // namespace oscar::cuda
