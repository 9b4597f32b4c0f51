#include "cuda/attention/decode_kernels-inl.cuh"

namespace oscar::cuda {

template <>
const DecodeKernelInfo* MixedDecodeKernels<256>() {
  static const DecodeKernelInfo kTable[] = {MixedDecodeKernel<256, 256, 8>(),
                                            MixedDecodeKernel<256, 128, 8>(),
                                            MixedDecodeKernel<256, 64, 8>(),
                                            MixedDecodeKernel<256, 32, 8>(),
                                            {}};
  return kTable;
}

}  // namespace oscar::cuda
