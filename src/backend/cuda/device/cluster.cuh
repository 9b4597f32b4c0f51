// Clusters of blocks and the tensor copy engine (sm_90): one thin function for each instruction.
// Device only. A barrier or an address in shared memory lies at the same place in all blocks of a
// cluster.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace oscar::cuda {

__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Orders execution, not memory.
__device__ __forceinline__ void ClusterSync() {
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// The address of what lies at `address` here, in block `rank`.
__device__ __forceinline__ uint32_t AddressIn(uint32_t rank, uint32_t address) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ void StoreIn(uint32_t there, float a, float b) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(there), "f"(a), "f"(b) : "memory");
}

// Arrives at the barrier that lies at `bar` in block `rank`. Orders nothing: for what was only
// read by wgmma; release at the cluster's scope would be a fence of the whole device's.
__device__ __forceinline__ void ArriveAt(uint32_t bar, uint32_t rank) {
  asm volatile(
      "{ .reg .b32 there;\n"
      " mapa.shared::cluster.u32 there, %0, %1;\n"
      " mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(bar),
      "r"(rank)
      : "memory");
}
// The same behind everything that this thread, or its warp before a __syncwarp, has read and
// written in the cluster's shared memory.
__device__ __forceinline__ void ReleaseAt(uint32_t bar, uint32_t rank) {
  asm volatile(
      "{ .reg .b32 there;\n"
      " mapa.shared::cluster.u32 there, %0, %1;\n"
      " mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }" ::"r"(bar),
      "r"(rank)
      : "memory");
}
// Waits at a barrier of this block for what others released.
__device__ __forceinline__ void AcquireAt(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred p;\n WAIT:\n"
      " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
      " @p bra DONE;\n bra WAIT;\n DONE:\n }" ::"r"(bar),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void ExpectBytes(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
// A box to the same place in `blocks` of the cluster, a bit each; or to this block alone.
template <bool kShared>
__device__ __forceinline__ void CopyBox(uint32_t to, const CUtensorMap* map, int k, int row,
                                        uint32_t bar, uint32_t blocks) {
  if constexpr (kShared) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
        "cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(k), "r"(row), "r"(bar), "h"(static_cast<uint16_t>(blocks))
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
        "{%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(k), "r"(row), "r"(bar)
        : "memory");
  }
}
// To this block, of bytes that nobody reads again soon: they leave the L2 first.
__device__ __forceinline__ void CopyBoxOnce(uint32_t to, const CUtensorMap* map, int k, int row,
                                            uint32_t bar) {
  // What createpolicy.fractional.L2::evict_first with a fraction of 1 returns.
  constexpr uint64_t kEvictFirst = 0x12f0000000000000;
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(k), "r"(row), "r"(bar), "l"(kEvictFirst)
      : "memory");
}

}  // namespace oscar::cuda
