#include "cuda/attention/decode_kernels-inl.cuh"

namespace oscar::cuda {

template <>
const DecodeKernelInfo* MixedDecodeKernels<128>() {
  static const DecodeKernelInfo kTable[] = {MixedDecodeKernel<128, 128, 4>(),
                                            MixedDecodeKernel<128, 128, 8>(),
                                            MixedDecodeKernel<128, 64, 8>(),
                                            MixedDecodeKernel<128, 32, 8>(),
                                            {}};
  return kTable;
}

}  // namespace oscar::cuda
