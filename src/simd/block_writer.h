// The vectorised page encoder: bit-equal to cache/block_codec.h's EncodeBlocks for every RowRule,
// for pages of every kind in CPU order (other layouts are passed on to EncodeBlocks).
// Stateless; safe from any thread. Matches cache/page_sealer.h's BlockEncoder.
#pragma once

#include <cstddef>
#include <span>

#include "base/half.h"
#include "cache/block_codec.h"

namespace oscar::simd {

// See EncodeBlocks.
int WriteBlocks(const BlockLayout& layout, const BlockRules& rules, const BlockRun& run);
// See EncodeBlock.
int WriteBlock(const BlockLayout& layout, const BlockRules& rules, std::span<const Bf16> k,
               std::span<const Bf16> v, std::span<std::byte> block);

}  // namespace oscar::simd
