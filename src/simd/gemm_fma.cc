#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd/gemm_fma.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h

#include "simd/gemm-inl.h"

#if HWY_ONCE
#include "simd/dispatch.h"
#include "simd/gemm_kernels.h"

namespace oscar::simd {

const FmaKernels& ActiveFmaKernels() {
  static constexpr FmaKernels kAvx2 = {N_AVX2::kTileRows, &N_AVX2::FmaTile<>};
  static constexpr FmaKernels kAvx512 = {N_AVX3::kTileRows, &N_AVX3::FmaTile<>};
  return ActiveTarget() == Target::kAvx2 ? kAvx2 : kAvx512;
}

}  // namespace oscar::simd
#endif  // HWY_ONCE
