// What compute-sanitizer's racecheck makes of rings of stages that bulk copies fill: one producer
// warp, two consumer warps with a ring of two stages each.
//   compute-sanitizer --tool racecheck racecheck_ring MODE
// MODE is a sum of: 1 the producer polls with test_wait, not try_wait; 2 lane 0 arrives for its
// warp after __syncwarp; 4 lane w of the producer serves ring w at its own pace; 8 consumers
// release a stage before they read it, a real race; 16 reads by ldmatrix; 32 no producer: a warp
// copies for itself after it has read a stage, ordered by __syncwarp (with 2, the decode kernels'
// form) or by an mbarrier that all its lanes arrive on and wait for.
// CUDA 13.0, H200: no report for 0, 1, 4, 5, 16, 32, 34; reports for 2, 3, 6, 7, 21, 23 (all
// ordered) and for the real races 8 and 40.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

constexpr int kStages = 2, kWords = 128, kSteps = 16, kRings = 2;
__device__ uint32_t S(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ void Init(uint32_t b, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n) : "memory");
}
__device__ void Arrive(uint32_t b) {
  asm volatile("{.reg .b64 t; mbarrier.arrive.shared::cta.b64 t, [%0];}" ::"r"(b) : "memory");
}
__device__ bool Try(uint32_t b, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0,1,0,p;}"
      : "=r"(done)
      : "r"(b), "r"(parity)
      : "memory");
  return done;
}
__device__ bool Test(uint32_t b, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0,1,0,p;}"
      : "=r"(done)
      : "r"(b), "r"(parity)
      : "memory");
  return done;
}
__device__ void Copy(uint32_t bar, void* dst, const uint32_t* src) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(kWords * 4)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(S(dst)),
      "l"(src), "r"(kWords * 4), "r"(bar)
      : "memory");
}
template <int kMode>
__global__ void Ring(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(128) uint32_t data[kRings][kStages][kWords];
  __shared__ __align__(8) uint64_t full[kRings][kStages], empty[kRings][kStages];
  constexpr bool kTest = kMode & 1, kOne = kMode & 2, kDiverge = kMode & 4, kEarly = kMode & 8,
                 kMatrix = kMode & 16, kSelf = kMode & 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int r = 0; r < kRings; ++r)
      for (int i = 0; i < kStages; ++i)
        Init(S(&full[r][i]), 1), Init(S(&empty[r][i]), kOne && !kSelf ? 1 : 32);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (kSelf && lane == 0 && warp < kRings) {
    for (int i = 0; i < kStages; ++i) Copy(S(&full[warp][i]), data[warp][i], in + i * kWords);
  }
  if (warp == kRings) {
    if (kSelf) return;
    if (kDiverge) {
      int i = 0;
      const int n = lane < kRings ? kSteps : 0;
      while (__any_sync(~0u, i < n)) {
        if (i >= n) continue;
        const uint32_t b = S(&empty[lane][i % kStages]), parity = ((i / kStages) & 1) ^ 1;
        if (!(kTest ? Test(b, parity) : Try(b, parity))) continue;
        Copy(S(&full[lane][i % kStages]), data[lane][i % kStages], in + i * kWords);
        ++i;
      }
    } else if (lane == 0) {
      for (int i = 0; i < kSteps; ++i)
        for (int r = 0; r < kRings; ++r) {
          const uint32_t b = S(&empty[r][i % kStages]), parity = ((i / kStages) & 1) ^ 1;
          while (!(kTest ? Test(b, parity) : Try(b, parity))) {
          }
          Copy(S(&full[r][i % kStages]), data[r][i % kStages], in + i * kWords);
        }
    }
    return;
  }
  uint32_t sum = 0;
  for (int i = 0; i < kSteps; ++i) {
    const int s = i % kStages;
    while (!Try(S(&full[warp][s]), (i / kStages) & 1)) {
    }
    if (kEarly && !kSelf) Arrive(S(&empty[warp][s]));
    if (kEarly && kSelf && lane == 0 && i + kStages < kSteps) {
      Copy(S(&full[warp][s]), data[warp][s], in + (i + kStages) * kWords);
    }
    if (kMatrix) {
      uint32_t a, b, c, d;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                   : "r"(S(&data[warp][s][lane * 4]))
                   : "memory");
      sum += a + b + c + d;
    } else {
      for (int k = lane; k < kWords; k += 32) sum += data[warp][s][(k + 1) % kWords];
    }
    if (kSelf) {
      if (kOne) {
        __syncwarp();
      } else {
        Arrive(S(&empty[warp][s]));
        while (!Try(S(&empty[warp][s]), (i / kStages) & 1)) {
        }
      }
      if (!kEarly && lane == 0 && i + kStages < kSteps) {
        Copy(S(&full[warp][s]), data[warp][s], in + (i + kStages) * kWords);
      }
      continue;
    }
    if (kOne && !kEarly) {
      __syncwarp();
      if (lane == 0) Arrive(S(&empty[warp][s]));
    }
    if (!kOne && !kEarly) Arrive(S(&empty[warp][s]));
  }
  out[threadIdx.x] = sum;
}
template <int m>
void Go(int mode, const uint32_t* in, uint32_t* out) {
  if constexpr (m < 64) {
    if (mode == m)
      Ring<m><<<1, 32 * (kRings + 1)>>>(in, out);
    else
      Go<m + 1>(mode, in, out);
  }
}
}  // namespace

int main(int argc, char** argv) {
  uint32_t *in, *out;
  cudaMalloc(&in, kSteps * kWords * 4);
  cudaMalloc(&out, 4096);
  cudaMemset(in, 1, kSteps * kWords * 4);
  for (int i = 1; i < argc; ++i) Go<0>(atoi(argv[i]), in, out);
  printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
