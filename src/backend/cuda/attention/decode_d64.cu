#include "cuda/attention/decode_kernels-inl.cuh"

namespace oscar::cuda {

const DecodeKernelInfo kDecodeKernelsD64[] = {
    DecodeKernel<BlockKind::kInt2, 64, 64, 8>(), DecodeKernel<BlockKind::kInt2, 64, 32, 8>(),
    DecodeKernel<BlockKind::kInt4, 64, 64, 8>(), DecodeKernel<BlockKind::kInt4, 64, 32, 8>(),
    DecodeKernel<BlockKind::kBf16, 64, 64, 8>(), {}};

}  // namespace oscar::cuda
