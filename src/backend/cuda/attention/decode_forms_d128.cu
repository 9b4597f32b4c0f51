#include "cuda/attention/decode_consumer_forms.cuh"
#include "cuda/attention/decode_consumer_packed_forms.cuh"
#include "cuda/attention/decode_kernels-inl.cuh"

namespace oscar::cuda {

template <>
const DecodeKernelInfo* FormDecodeKernels<128>() {
  static const DecodeKernelInfo kTable[] = {DecodeKernelOf<FormDecodeTraits<128, 128, 4>>(),
                                            DecodeKernelOf<FormDecodeTraits<128, 32, 4>>(),
                                            DecodeKernelOf<FormDecodeTraits<128, 128, 8>>(),
                                            DecodeKernelOf<FormDecodeTraits<128, 64, 8>>(),
                                            DecodeKernelOf<FormDecodeTraits<128, 32, 8>>(),
                                            {}};
  return kTable;
}

}  // namespace oscar::cuda
