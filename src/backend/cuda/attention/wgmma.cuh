// wgmma (sm_90a): D[64, N] += A[64, 16] B[16, N], fp32 accumulators in registers, B in shared
// memory with 128-byte swizzle, A in shared memory or registers. Asynchronous: Fence before the
// first of a batch, Commit after the last, Wait before reading the accumulators. Device only.
#pragma once

#include <cstdint>

namespace oscar::cuda {

// Descriptor of a 128-byte-swizzled tile. K-major (rows of 128 bytes along k): `stride` is between
// groups of 8 rows. MN-major: `stride` is between groups of 8 k, `leading` between 64-wide columns.
__device__ __forceinline__ uint64_t SwizzledTile(uint32_t address, uint32_t leading,
                                                 uint32_t stride) {
  return (uint64_t{address & 0x3ffffu} >> 4) | (uint64_t{leading >> 4} << 16) |
         (uint64_t{stride >> 4} << 32) | (uint64_t{1} << 62);
}

// Of a K-major tile 16 numbers wide without swizzle: core matrices of 8 rows x 16 bytes, the two of
// a row group 128 bytes apart, row groups 256.
__device__ __forceinline__ uint64_t PlainTile(uint32_t address) {
  return (uint64_t{address & 0x3ffffu} >> 4) | (uint64_t{128 >> 4} << 16) |
         (uint64_t{256 >> 4} << 32);
}

// The descriptor `bytes` further on: an addition, where making a new one takes a chain of five.
__device__ __forceinline__ uint64_t Advance(uint64_t tile, int bytes) {
  return tile + static_cast<uint32_t>(bytes >> 4);
}

__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// kBf16: operands are BF16, else fp16. Shared: A from shared memory, B K-major. First: the same
// without accumulators before it, so that the compiler need not keep what was in d.
template <int kN, bool kBf16>
struct Wgmma;

// The register lists below are why these are macros.
#define OSCAR_C8(d, i)                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define OSCAR_E8(d, i)                                                                        \
  "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3]), "=f"(d[i + 4]), "=f"(d[i + 5]), \
      "=f"(d[i + 6]), "=f"(d[i + 7])
#define OSCAR_E32(d, i) OSCAR_E8(d, i), OSCAR_E8(d, i + 8), OSCAR_E8(d, i + 16), OSCAR_E8(d, i + 24)
#define OSCAR_E64(d, i) OSCAR_E32(d, i), OSCAR_E32(d, i + 32)
#define OSCAR_E128(d, i) OSCAR_E64(d, i), OSCAR_E64(d, i + 64)
#define OSCAR_C32(d, i) OSCAR_C8(d, i), OSCAR_C8(d, i + 8), OSCAR_C8(d, i + 16), OSCAR_C8(d, i + 24)
#define OSCAR_C64(d, i) OSCAR_C32(d, i), OSCAR_C32(d, i + 32)
#define OSCAR_C128(d, i) OSCAR_C64(d, i), OSCAR_C64(d, i + 64)

#define OSCAR_D32                                                          \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define OSCAR_D64                                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define OSCAR_D128                                                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define OSCAR_WGMMA_64(kIsBf16, kType)                                                       \
  template <>                                                                                \
  struct Wgmma<64, kIsBf16> {                                                                \
    __device__ static __forceinline__ void First(float (&d)[32], uint64_t a, uint64_t b) {   \
      asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." kType " {" OSCAR_D32        \
                   "}, %32, %33, 0, 1, 1, 0, 0;"                                             \
                   : OSCAR_E32(d, 0)                                                         \
                   : "l"(a), "l"(b));                                                        \
    }                                                                                        \
    __device__ static __forceinline__ void Shared(float (&d)[32], uint64_t a, uint64_t b) {  \
      asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." kType " {" OSCAR_D32        \
                   "}, %32, %33, 1, 1, 1, 0, 0;"                                             \
                   : OSCAR_C32(d, 0)                                                         \
                   : "l"(a), "l"(b));                                                        \
    }                                                                                        \
    template <int kTransposeB>                                                               \
    __device__ static __forceinline__ void Registers(float (&d)[32], const uint32_t (&a)[4], \
                                                     uint64_t b) {                           \
      asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." kType " {" OSCAR_D32        \
                   "}, {%32, %33, %34, %35}, %36, 1, 1, 1, %37;"                             \
                   : OSCAR_C32(d, 0)                                                         \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));  \
    }                                                                                        \
  };
OSCAR_WGMMA_64(true, "bf16.bf16")
OSCAR_WGMMA_64(false, "f16.f16")
#define OSCAR_WGMMA_128(kIsBf16, kType)                                                      \
  template <>                                                                                \
  struct Wgmma<128, kIsBf16> {                                                               \
    __device__ static __forceinline__ void First(float (&d)[64], uint64_t a, uint64_t b) {   \
      asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." kType " {" OSCAR_D64       \
                   "}, %64, %65, 0, 1, 1, 0, 0;"                                             \
                   : OSCAR_E64(d, 0)                                                         \
                   : "l"(a), "l"(b));                                                        \
    }                                                                                        \
    __device__ static __forceinline__ void Shared(float (&d)[64], uint64_t a, uint64_t b) {  \
      asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." kType " {" OSCAR_D64       \
                   "}, %64, %65, 1, 1, 1, 0, 0;"                                             \
                   : OSCAR_C64(d, 0)                                                         \
                   : "l"(a), "l"(b));                                                        \
    }                                                                                        \
    template <int kTransposeB>                                                               \
    __device__ static __forceinline__ void Registers(float (&d)[64], const uint32_t (&a)[4], \
                                                     uint64_t b) {                           \
      asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." kType " {" OSCAR_D64       \
                   "}, {%64, %65, %66, %67}, %68, 1, 1, 1, %69;"                             \
                   : OSCAR_C64(d, 0)                                                         \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));  \
    }                                                                                        \
  };
OSCAR_WGMMA_128(true, "bf16.bf16")
OSCAR_WGMMA_128(false, "f16.f16")
#define OSCAR_WGMMA_256(kIsBf16, kType)                                                       \
  template <>                                                                                 \
  struct Wgmma<256, kIsBf16> {                                                                \
    __device__ static __forceinline__ void First(float (&d)[128], uint64_t a, uint64_t b) {   \
      asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." kType " {" OSCAR_D128       \
                   "}, %128, %129, 0, 1, 1, 0, 0;"                                            \
                   : OSCAR_E128(d, 0)                                                         \
                   : "l"(a), "l"(b));                                                         \
    }                                                                                         \
    __device__ static __forceinline__ void Shared(float (&d)[128], uint64_t a, uint64_t b) {  \
      asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." kType " {" OSCAR_D128       \
                   "}, %128, %129, 1, 1, 1, 0, 0;"                                            \
                   : OSCAR_C128(d, 0)                                                         \
                   : "l"(a), "l"(b));                                                         \
    }                                                                                         \
    template <int kTransposeB>                                                                \
    __device__ static __forceinline__ void Registers(float (&d)[128], const uint32_t (&a)[4], \
                                                     uint64_t b) {                            \
      asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." kType " {" OSCAR_D128       \
                   "}, {%128, %129, %130, %131}, %132, 1, 1, 1, %133;"                        \
                   : OSCAR_C128(d, 0)                                                         \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposeB));   \
    }                                                                                         \
  };
OSCAR_WGMMA_256(true, "bf16.bf16")
OSCAR_WGMMA_256(false, "f16.f16")

}  // namespace oscar::cuda
