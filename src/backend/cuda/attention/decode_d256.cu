#include "cuda/attention/decode_kernels-inl.cuh"

namespace oscar::cuda {

const DecodeKernelInfo kDecodeKernelsD256[] = {
    DecodeKernel<BlockKind::kInt2, 256, 256, 8>(), DecodeKernel<BlockKind::kInt2, 256, 128, 8>(),
    DecodeKernel<BlockKind::kInt2, 256, 64, 8>(),  DecodeKernel<BlockKind::kInt2, 256, 32, 8>(),
    DecodeKernel<BlockKind::kInt4, 256, 256, 8>(), DecodeKernel<BlockKind::kInt4, 256, 128, 8>(),
    DecodeKernel<BlockKind::kInt4, 256, 64, 8>(),  DecodeKernel<BlockKind::kInt4, 256, 32, 8>(),
    DecodeKernel<BlockKind::kBf16, 256, 256, 8>(), {}};

}  // namespace oscar::cuda
