#include "cuda/attention/decode_kernels-inl.cuh"

namespace oscar::cuda {

template <>
const DecodeKernelInfo* DecodeKernels<128>() {
  static const DecodeKernelInfo kTable[] = {DecodeKernel<BlockKind::kInt2, 128, 128, 4>(),
                                            DecodeKernel<BlockKind::kInt2, 128, 128, 8>(),
                                            DecodeKernel<BlockKind::kInt2, 128, 64, 8>(),
                                            DecodeKernel<BlockKind::kInt2, 128, 32, 8>(),
                                            DecodeKernel<BlockKind::kInt4, 128, 128, 8>(),
                                            DecodeKernel<BlockKind::kInt4, 128, 64, 8>(),
                                            DecodeKernel<BlockKind::kInt4, 128, 32, 8>(),
                                            DecodeKernel<BlockKind::kBf16, 128, 128, 8>(),
                                            DecodeKernel<BlockKind::kInt2, 128, 128, 16>(),
                                            DecodeKernel<BlockKind::kBf16, 128, 128, 16>(),
                                            {}};
  return kTable;
}

}  // namespace oscar::cuda
