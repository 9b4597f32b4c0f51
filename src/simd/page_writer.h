// The vectorised page encoder: bit-equal to cache/page_codec.h's EncodePage for every RowRule, for
// INT2, INT4 and BF16 pages in CPU order (other layouts are passed on to EncodePage). Stateless;
// safe from any thread. Matches cache/sequence_cache.h's PageEncoder.
#pragma once

#include <cstddef>
#include <span>

#include "base/half.h"
#include "cache/page_codec.h"

namespace oscar::simd {

// See EncodePage.
int WritePage(const PageLayout& layout, const PageRules& rules, std::span<const Bf16> k,
              std::span<const Bf16> v, std::span<std::byte> block);

}  // namespace oscar::simd
