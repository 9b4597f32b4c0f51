#include "cuda/attention/decode_kernels-inl.cuh"

namespace oscar::cuda {

template <>
const DecodeKernelInfo* MixedDecodeKernels<64>() {
  static const DecodeKernelInfo kTable[] = {
      MixedDecodeKernel<64, 64, 8>(), MixedDecodeKernel<64, 32, 8>(), {}};
  return kTable;
}

}  // namespace oscar::cuda
