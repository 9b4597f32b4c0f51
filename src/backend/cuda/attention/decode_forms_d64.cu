#include "cuda/attention/decode_consumer_forms.cuh"
#include "cuda/attention/decode_kernels-inl.cuh"

namespace oscar::cuda {

template <>
const DecodeKernelInfo* FormDecodeKernels<64>() {
  static const DecodeKernelInfo kTable[] = {DecodeKernelOf<FormDecodeTraits<64, 64, 8>>(),
                                            DecodeKernelOf<FormDecodeTraits<64, 32, 8>>(),
                                            {}};
  return kTable;
}

}  // namespace oscar::cuda
