#include "cuda/attention/decode_kernels-inl.cuh"

namespace oscar::cuda {

template <>
const DecodeKernelInfo* DecodeKernels<64>() {
  static const DecodeKernelInfo kTable[] = {
      DecodeKernel<BlockKind::kInt2, 64, 64, 8>(), DecodeKernel<BlockKind::kInt2, 64, 32, 8>(),
      DecodeKernel<BlockKind::kInt4, 64, 64, 8>(), DecodeKernel<BlockKind::kInt4, 64, 32, 8>(),
      DecodeKernel<BlockKind::kBf16, 64, 64, 8>(), {}};
  return kTable;
}

}  // namespace oscar::cuda
