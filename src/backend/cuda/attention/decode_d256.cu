#include "cuda/attention/decode_kernels-inl.cuh"

namespace oscar::cuda {

template <>
const DecodeKernelInfo* DecodeKernels<256>() {
  static const DecodeKernelInfo kTable[] = {
      DecodeKernel<BlockKind::kInt2, 256, 256, 8>(), DecodeKernel<BlockKind::kInt2, 256, 128, 8>(),
      DecodeKernel<BlockKind::kInt2, 256, 64, 8>(),  DecodeKernel<BlockKind::kInt2, 256, 32, 8>(),
      DecodeKernel<BlockKind::kInt4, 256, 256, 8>(), DecodeKernel<BlockKind::kInt4, 256, 128, 8>(),
      DecodeKernel<BlockKind::kInt4, 256, 64, 8>(),  DecodeKernel<BlockKind::kInt4, 256, 32, 8>(),
      DecodeKernel<BlockKind::kBf16, 256, 256, 8>(), {}};
  return kTable;
}

}  // namespace oscar::cuda
