#include "cuda/kv/seal_kernels-inl.cuh"

namespace oscar::cuda {

const SealKernelInfo kSealKernelsInt2[] = {SealKernel<BlockKind::kInt2, 128, 128, false>(),
                                           SealKernel<BlockKind::kInt2, 64, 64, true>(),
                                           SealKernel<BlockKind::kInt2, 64, 32, true>(),
                                           SealKernel<BlockKind::kInt2, 128, 128, true>(),
                                           SealKernel<BlockKind::kInt2, 128, 64, true>(),
                                           SealKernel<BlockKind::kInt2, 128, 32, true>(),
                                           SealKernel<BlockKind::kInt2, 256, 256, true>(),
                                           SealKernel<BlockKind::kInt2, 256, 128, true>(),
                                           SealKernel<BlockKind::kInt2, 256, 64, true>(),
                                           SealKernel<BlockKind::kInt2, 256, 32, true>(),
                                           {}};

}  // namespace oscar::cuda
