#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd/gemm_fma.cc"
#include <hwy/foreach_target.h>  // must come before the -inl.h

#include "simd/gemm-inl.h"

#if HWY_ONCE
#include <algorithm>
#include <chrono>
#include <vector>

#include "simd/dispatch.h"
#include "simd/gemm_kernels.h"

namespace oscar::simd {

const FmaKernels& ActiveFmaKernels() {
  static constexpr FmaKernels kAvx2 = {N_AVX2::kTileRows, &N_AVX2::FmaTile<>};
  static constexpr FmaKernels kAvx512 = {N_AVX3::kTileRows, &N_AVX3::FmaTile<>};
  return ActiveTarget() == Target::kAvx2 ? kAvx2 : kAvx512;
}

double MeasureFmaPeak(ThreadPool& pool) {
  constexpr int64_t kRounds = 200000;
  const auto loop = ActiveTarget() == Target::kAvx2 ? &N_AVX2::FmaPeakLoop : &N_AVX3::FmaPeakLoop;
  std::vector<float> sink(static_cast<size_t>(pool.num_threads()));
  double best = 0.0;
  for (int repeat = 0; repeat < 7; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    pool.ParallelFor(pool.num_threads(),
                     [&](int64_t i, int) { sink[static_cast<size_t>(i)] = loop(kRounds); });
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::max(best, 2.0 * 384.0 * kRounds * pool.num_threads() / seconds);
  }
  return best;
}

}  // namespace oscar::simd
#endif  // HWY_ONCE
