#include "cuda/attention/decode_kernels-inl.cuh"

namespace oscar::cuda {

const DecodeKernelInfo* SinkMixedDecodeKernels() {
  static const DecodeKernelInfo kTable[] = {
      SinkMixedDecodeKernel<64>(), SinkMixedDecodeKernel<32>(), {}};
  return kTable;
}

}  // namespace oscar::cuda
