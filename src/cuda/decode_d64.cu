#include "cuda/decode_kernels-inl.cuh"

namespace oscar::cuda {

const DecodeKernelInfo kDecodeKernelsD64[] = {
    DecodeKernel<PageKind::kInt2, 64, 64, 8>(), DecodeKernel<PageKind::kInt2, 64, 32, 8>(),
    DecodeKernel<PageKind::kInt4, 64, 64, 8>(), DecodeKernel<PageKind::kInt4, 64, 32, 8>(),
    DecodeKernel<PageKind::kBf16, 64, 64, 8>(), {}};

}  // namespace oscar::cuda
