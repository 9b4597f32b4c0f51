// How many bytes of pages a sequence holds, by formula: what admission counts. Pure functions of
// positions, like sealing itself.
#pragma once

#include <cstdint>

#include "cache/sequence_cache.h"

namespace oscar {

// The most bytes that a sequence holds between two passes on its way from `length` tokens (its
// pages [sink, sealed_end) sealed) to `total`, the first `prompt` of them read as a prompt. With
// length 0: what a fresh sequence needs in an empty pool, exactly.
uint64_t PeakBytes(const CacheConfig& config, int64_t length, int64_t sealed_end, int64_t prompt,
                   int64_t total);
inline uint64_t PeakBytes(const CacheConfig& config, int64_t prompt, int64_t total) {
  return PeakBytes(config, 0, 0, prompt, total);
}

// The largest total <= `limit` whose peak fits `budget`; less than `prompt` where that does not
// fit.
int64_t LargestTotal(const CacheConfig& config, int64_t prompt, int64_t limit, uint64_t budget);

}  // namespace oscar
