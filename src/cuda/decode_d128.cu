#include "cuda/decode_kernels-inl.cuh"

namespace oscar::cuda {

const DecodeKernelInfo kDecodeKernelsD128[] = {
    DecodeKernel<PageKind::kInt2, 128, 128, 1>(), DecodeKernel<PageKind::kInt2, 128, 64, 1>(),
    DecodeKernel<PageKind::kInt2, 128, 32, 1>(),  DecodeKernel<PageKind::kInt4, 128, 128, 1>(),
    DecodeKernel<PageKind::kInt4, 128, 64, 1>(),  DecodeKernel<PageKind::kInt4, 128, 32, 1>(),
    DecodeKernel<PageKind::kBf16, 128, 128, 1>(), DecodeKernel<PageKind::kInt2, 128, 128, 2>(),
    DecodeKernel<PageKind::kBf16, 128, 128, 2>(), {}};

}  // namespace oscar::cuda
