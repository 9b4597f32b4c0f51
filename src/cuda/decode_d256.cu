#include "cuda/decode_kernels-inl.cuh"

namespace oscar::cuda {

const DecodeKernelInfo kDecodeKernelsD256[] = {
    DecodeKernel<PageKind::kInt2, 256, 256, 8>(), DecodeKernel<PageKind::kInt2, 256, 128, 8>(),
    DecodeKernel<PageKind::kInt2, 256, 64, 8>(),  DecodeKernel<PageKind::kInt2, 256, 32, 8>(),
    DecodeKernel<PageKind::kInt4, 256, 256, 8>(), DecodeKernel<PageKind::kInt4, 256, 128, 8>(),
    DecodeKernel<PageKind::kInt4, 256, 64, 8>(),  DecodeKernel<PageKind::kInt4, 256, 32, 8>(),
    DecodeKernel<PageKind::kBf16, 256, 256, 8>(), {}};

}  // namespace oscar::cuda
