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

double MeasurePeak(ThreadPool& pool, GemmPath path) {
  constexpr int64_t kFmaRounds = 200000, kBf16Rounds = 500000;
  const auto loop = ActiveTarget() == Target::kAvx2 ? &N_AVX2::FmaPeakLoop : &N_AVX3::FmaPeakLoop;
  std::vector<float> sink(static_cast<size_t>(pool.num_threads()));
  std::vector<double> operations(sink.size());
  double best = 0.0;
  for (int repeat = 0; repeat < 7; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    pool.ParallelFor(pool.num_threads(), [&](int64_t i, int) {
      const auto at = static_cast<size_t>(i);
      if (path == GemmPath::kFma) {
        sink[at] = loop(kFmaRounds);
        operations[at] = 2.0 * 384.0 * kFmaRounds;
      } else {
        operations[at] = Bf16PeakOperations(path, kBf16Rounds);
      }
    });
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    double total = 0.0;
    for (const double count : operations) total += count;
    best = std::max(best, total / seconds);
  }
  return best;
}

}  // namespace oscar::simd
#endif  // HWY_ONCE
