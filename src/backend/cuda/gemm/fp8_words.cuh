// FP8 words (base/fp8.h) to BF16 on the device.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace oscar::cuda {

// The values of a pair that FirstPair or SecondPair took out of a word: times 2^120, exactly.
__device__ __forceinline__ uint32_t Unscaled(uint32_t pair) {
  constexpr uint32_t kFactor = 0x7b807b80u;
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair),
                                         *reinterpret_cast<const __nv_bfloat162*>(&kFactor));
  return *reinterpret_cast<const uint32_t*>(&product);
}

}  // namespace oscar::cuda
