#include "cuda/attention/prefill_attention.cuh"
#include "cuda/attention/prefill_kernels.h"

namespace oscar::cuda {
namespace {

template <typename T>
PrefillKernelInfo Kernel() {
  return {T::kKind,
          T::kMixed,
          T::kHasSinks,
          T::kDim,
          kGenericThreads,
          T::kSharedBytes,
          0,
          reinterpret_cast<const void*>(&PrefillAttentionKernel<T>)};
}

}  // namespace

#define OSCAR_X(dim) Kernel<FormGenericPrefillTraits<dim>>(),
const PrefillKernelInfo kPrefillKernelsForms[] = {OSCAR_HEAD_DIMS(OSCAR_X){}};
#undef OSCAR_X

}  // namespace oscar::cuda
