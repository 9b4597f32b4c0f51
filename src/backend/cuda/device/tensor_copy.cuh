// The tensor copy engine (sm_90): boxes of a matrix to shared memory, counted by an mbarrier.
// Device only.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace oscar::cuda {

__device__ __forceinline__ void ExpectBytes(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
// A box to the same place in `blocks` of the cluster, a bit each.
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

}  // namespace oscar::cuda
