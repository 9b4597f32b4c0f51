// The bytes of pages held by a sequence, by formula: what admission counts. Pure functions of
// positions, like sealing itself.
#pragma once

#include <cstdint>

#include "cache/sequence_cache.h"

namespace oscar {

// How prompts are read: cells chunk by chunk, all of a cell in BF16 until it has been read; or cell
// after cell layer by layer (LayeredAppend), which holds one layer of it in BF16.
enum class Reading : uint8_t { kByChunk, kByLayer };

// The most bytes that a sequence holds between two passes on its way from `length` tokens (its
// pages [sink, sealed_end) sealed) to `total`, the first `prompt` of them read as a prompt. With
// length 0: what a fresh sequence needs in an empty pool, exactly.
uint64_t PeakBytes(const CacheConfig& config, int64_t length, int64_t sealed_end, int64_t prompt,
                   int64_t total, Reading reading);
inline uint64_t PeakBytes(const CacheConfig& config, int64_t prompt, int64_t total,
                          Reading reading = Reading::kByChunk) {
  return PeakBytes(config, 0, 0, prompt, total, reading);
}

// The largest total <= `limit` whose peak fits `budget`; less than `prompt` where that does not
// fit.
int64_t LargestTotal(const CacheConfig& config, int64_t prompt, int64_t limit, uint64_t budget,
                     Reading reading = Reading::kByChunk);

// Conversations of `tokens` tokens each that `budget` holds at once with nothing shared, the last
// of them being read as one prompt while the others generate.
int64_t Conversations(const CacheConfig& config, int64_t tokens, uint64_t budget, Reading reading);

}  // namespace oscar
