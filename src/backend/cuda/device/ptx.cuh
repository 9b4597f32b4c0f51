// The PTX instructions the kernels are made of, one thin function each. Device only,
// framework-free. Hopper and later copy in bulk on mbarriers; sm_80 and sm_89 use 16-byte cp.async
// on the same mbarriers, so pipelines are written once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace oscar::cuda {

#if defined(OSCAR_NO_BULK_COPY) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900)
#define OSCAR_BULK_COPY 0
#else
#define OSCAR_BULK_COPY 1
#endif

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- mbarriers ----

__device__ __forceinline__ void BarrierInit(uint32_t bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void BarrierInitFence() {
#if OSCAR_BULK_COPY
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void BarrierArrive(uint32_t bar) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.shared::cta.b64 t, [%0]; }" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void BarrierWait(uint32_t bar, uint32_t parity) {
#if OSCAR_BULK_COPY
  asm volatile(
      "{\n .reg .pred p;\n WAIT:\n mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      " @p bra DONE;\n bra WAIT;\n DONE:\n }" ::"r"(bar),
      "r"(parity)
      : "memory");
#else
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;"
        " selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
  }
#endif
}

// Whether the phase is over already; never waits.
__device__ __forceinline__ bool BarrierTest(uint32_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;"
      " selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done != 0;
}

// Arrivals a "full" barrier expects from the one warp that fills its stage.
inline constexpr uint32_t kBulkFullArrivals = 1;
inline constexpr uint32_t kAsyncFullArrivals = 32;
__device__ __forceinline__ uint32_t FullArrivals() {
  return OSCAR_BULK_COPY ? kBulkFullArrivals : kAsyncFullArrivals;
}

// A fill of one stage by one whole warp: Begin with the total of bytes, Copy the pieces (multiples
// of 16 bytes), End. The stage's full barrier completes when every byte has landed.
struct StageFill {
  uint32_t bar;
  int lane;
  __device__ __forceinline__ StageFill(uint32_t full_bar, uint32_t total_bytes, int lane_)
      : bar(full_bar), lane(lane_) {
#if OSCAR_BULK_COPY
    if (lane == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar),
                   "r"(total_bytes)
                   : "memory");
    }
#endif
  }
  __device__ __forceinline__ void Copy(uint32_t dst, const void* src, uint32_t bytes) const {
#if OSCAR_BULK_COPY
    if (lane == 0) {
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
          "[%3];" ::"r"(dst),
          "l"(src), "r"(bytes), "r"(bar)
          : "memory");
    }
#else
    for (uint32_t i = static_cast<uint32_t>(lane) * 16; i < bytes; i += 512) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst + i),
                   "l"(static_cast<const char*>(src) + i)
                   : "memory");
    }
#endif
  }
  // The same, of bytes that nobody reads again soon: they leave the L2 first.
  __device__ __forceinline__ void CopyOnce(uint32_t dst, const void* src, uint32_t bytes) const {
#if OSCAR_BULK_COPY
    if (lane == 0) {
      // What createpolicy.fractional.L2::evict_first with a fraction of 1 returns.
      constexpr uint64_t kEvictFirst = 0x12f0000000000000;
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
          "[%0], [%1], %2, [%3], %4;" ::"r"(dst),
          "l"(src), "r"(bytes), "r"(bar), "l"(kEvictFirst)
          : "memory");
    }
#else
    Copy(dst, src, bytes);
#endif
  }
  __device__ __forceinline__ void End() const {
#if !OSCAR_BULK_COPY
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
#endif
  }
};

// ---- copies of a thread, 16 bytes each, in groups ----

__device__ __forceinline__ void CopyAsync(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Orders this thread's ordinary shared-memory writes before later copies into, or wgmma reads of,
// the same bytes.
__device__ __forceinline__ void ProxyFence() {
#if OSCAR_BULK_COPY
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// ---- named barriers among some of a block's warps ----

__device__ __forceinline__ void NamedSync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void NamedArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- programmatic dependent launch ----

__device__ __forceinline__ void WaitForPredecessor() {
#if OSCAR_BULK_COPY
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void LetSuccessorStart() {
#if OSCAR_BULK_COPY
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- tensor cores: m16n8k16, fp32 accumulation. Not volatile: pure, so the compiler schedules
// ----

__device__ __forceinline__ void MmaFp16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                        uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void MmaBf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                        uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// m16n8k32, bytes without sign, 32-bit sums.
__device__ __forceinline__ void MmaU8(int32_t (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                      uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// MmaU8 with B's bytes signed.
__device__ __forceinline__ void MmaU8S8(int32_t (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                        uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Transposes an 8x8 tile of 16-bit numbers held by the warp.
__device__ __forceinline__ uint32_t Transpose8x8(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
// Among four lanes: v[i] of lane q becomes v[q] of lane i.
__device__ __forceinline__ void TransposeQuad(uint32_t (&v)[4], int quad) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool high = (quad & step) != 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int i = step == 1 ? 2 * j : j;
      const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? v[i] : v[i + step], step);
      (high ? v[i] : v[i + step]) = got;
    }
  }
}
__device__ __forceinline__ void PrefetchL2(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}
__device__ __forceinline__ void LoadMatrix4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void LoadMatrix4Transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// ---- arithmetic ----

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ uint32_t PackHalf(float low, float high) {
  const __half2 h = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&h);
}
__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 h = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&h);
}
__device__ __forceinline__ float Bf16Low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float Bf16High(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}
__device__ __forceinline__ float2 HalfPair(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

}  // namespace oscar::cuda
