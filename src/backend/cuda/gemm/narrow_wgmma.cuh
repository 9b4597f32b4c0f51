// wgmma (sm_90a) with few columns: D[64, N] (+)= A[64, 16] B[16, N] of BF16, A in registers, B in
// shared memory with 128-byte swizzle, K-major; fp32 accumulators. Device only; attention/wgmma.cuh
// has the descriptors, fences and waits.
#pragma once

#include <cstdint>

#include "cuda/attention/wgmma.cuh"

namespace oscar::cuda {

// First: without what was in d before.
template <int kN>
struct NarrowWgmma;

#define OSCAR_NARROW_WGMMA(kN, kList, kA0, kA1, kA2, kA3, kB, kSums, kResults)                    \
  template <>                                                                                     \
  struct NarrowWgmma<kN> {                                                                        \
    __device__ static __forceinline__ void First(float (&d)[kN / 2], const uint32_t (&a)[4],      \
                                                 uint64_t b) {                                    \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #kN "k16.f32.bf16.bf16 {" kList "}, {" kA0 \
                   ", " kA1 ", " kA2 ", " kA3 "}, " kB ", 0, 1, 1, 0;"                            \
                   : kResults                                                                     \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                         \
    }                                                                                             \
    __device__ static __forceinline__ void Add(float (&d)[kN / 2], const uint32_t (&a)[4],        \
                                               uint64_t b) {                                      \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #kN "k16.f32.bf16.bf16 {" kList "}, {" kA0 \
                   ", " kA1 ", " kA2 ", " kA3 "}, " kB ", 1, 1, 1, 0;"                            \
                   : kSums                                                                        \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                         \
    }                                                                                             \
  };

#define OSCAR_LIST_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define OSCAR_LIST_16                                            \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, " \
  "%14, %15"
#define OSCAR_LIST_24                                            \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, " \
  "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23"
#define OSCAR_C16(d, i) OSCAR_C8(d, i), OSCAR_C8(d, i + 8)
#define OSCAR_E16(d, i) OSCAR_E8(d, i), OSCAR_E8(d, i + 8)
#define OSCAR_C24(d, i) OSCAR_C16(d, i), OSCAR_C8(d, i + 16)
#define OSCAR_E24(d, i) OSCAR_E16(d, i), OSCAR_E8(d, i + 16)
OSCAR_NARROW_WGMMA(16, OSCAR_LIST_8, "%8", "%9", "%10", "%11", "%12", OSCAR_C8(d, 0),
                   OSCAR_E8(d, 0))
OSCAR_NARROW_WGMMA(32, OSCAR_LIST_16, "%16", "%17", "%18", "%19", "%20", OSCAR_C16(d, 0),
                   OSCAR_E16(d, 0))
OSCAR_NARROW_WGMMA(48, OSCAR_LIST_24, "%24", "%25", "%26", "%27", "%28", OSCAR_C24(d, 0),
                   OSCAR_E24(d, 0))
OSCAR_NARROW_WGMMA(64, OSCAR_D32, "%32", "%33", "%34", "%35", "%36", OSCAR_C32(d, 0),
                   OSCAR_E32(d, 0))

}  // namespace oscar::cuda
