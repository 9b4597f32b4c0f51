#include "cuda/decode_kernels-inl.cuh"

namespace oscar::cuda {

const DecodeKernelInfo kDecodeKernelsD128[] = {DecodeKernel<PageKind::kInt2, 128, 128, 4>(),
                                               DecodeKernel<PageKind::kInt2, 128, 128, 8>(),
                                               DecodeKernel<PageKind::kInt2, 128, 64, 8>(),
                                               DecodeKernel<PageKind::kInt2, 128, 32, 8>(),
                                               DecodeKernel<PageKind::kInt4, 128, 128, 8>(),
                                               DecodeKernel<PageKind::kInt4, 128, 64, 8>(),
                                               DecodeKernel<PageKind::kInt4, 128, 32, 8>(),
                                               DecodeKernel<PageKind::kBf16, 128, 128, 8>(),
                                               DecodeKernel<PageKind::kInt2, 128, 128, 16>(),
                                               DecodeKernel<PageKind::kBf16, 128, 128, 16>(),
                                               {}};

}  // namespace oscar::cuda
