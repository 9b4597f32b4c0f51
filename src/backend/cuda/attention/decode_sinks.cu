#include "cuda/attention/decode_kernels-inl.cuh"

namespace oscar::cuda {

const DecodeKernelInfo* SinkDecodeKernels() {
  static const DecodeKernelInfo kTable[] = {
      SinkDecodeKernel<BlockKind::kInt2, 64>(), SinkDecodeKernel<BlockKind::kInt2, 32>(),
      SinkDecodeKernel<BlockKind::kInt4, 64>(), SinkDecodeKernel<BlockKind::kInt4, 32>(),
      SinkDecodeKernel<BlockKind::kBf16, 64>(), {}};
  return kTable;
}

}  // namespace oscar::cuda
