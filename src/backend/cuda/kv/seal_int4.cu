#include "cuda/kv/seal_kernels-inl.cuh"

namespace oscar::cuda {

const SealKernelInfo kSealKernelsInt4[] = {
    SealKernel<BlockKind::kInt4, 64, 64, true>(),   SealKernel<BlockKind::kInt4, 64, 32, true>(),
    SealKernel<BlockKind::kInt4, 128, 128, true>(), SealKernel<BlockKind::kInt4, 128, 64, true>(),
    SealKernel<BlockKind::kInt4, 128, 32, true>(),  SealKernel<BlockKind::kInt4, 256, 256, true>(),
    SealKernel<BlockKind::kInt4, 256, 128, true>(), SealKernel<BlockKind::kInt4, 256, 64, true>(),
    SealKernel<BlockKind::kInt4, 256, 32, true>(),  {}};

}  // namespace oscar::cuda
