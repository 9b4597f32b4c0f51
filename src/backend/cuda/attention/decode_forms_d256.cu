#include "cuda/attention/decode_consumer_forms.cuh"
#include "cuda/attention/decode_kernels-inl.cuh"

namespace oscar::cuda {

template <>
const DecodeKernelInfo* FormDecodeKernels<256>() {
  static const DecodeKernelInfo kTable[] = {DecodeKernelOf<FormDecodeTraits<256, 256, 8>>(),
                                            DecodeKernelOf<FormDecodeTraits<256, 128, 8>>(),
                                            DecodeKernelOf<FormDecodeTraits<256, 64, 8>>(),
                                            DecodeKernelOf<FormDecodeTraits<256, 32, 8>>(),
                                            {}};
  return kTable;
}

}  // namespace oscar::cuda
