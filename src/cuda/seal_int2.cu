#include "cuda/seal_kernels-inl.cuh"

namespace oscar::cuda {

const SealKernelInfo kSealKernelsInt2[] = {SealKernel<PageKind::kInt2, 128, 128, false>(),
                                           SealKernel<PageKind::kInt2, 64, 64, true>(),
                                           SealKernel<PageKind::kInt2, 64, 32, true>(),
                                           SealKernel<PageKind::kInt2, 128, 128, true>(),
                                           SealKernel<PageKind::kInt2, 128, 64, true>(),
                                           SealKernel<PageKind::kInt2, 128, 32, true>(),
                                           SealKernel<PageKind::kInt2, 256, 256, true>(),
                                           SealKernel<PageKind::kInt2, 256, 128, true>(),
                                           SealKernel<PageKind::kInt2, 256, 64, true>(),
                                           SealKernel<PageKind::kInt2, 256, 32, true>(),
                                           {}};

}  // namespace oscar::cuda
