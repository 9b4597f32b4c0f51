// HeadBlocks of a cache: which layers need kernels for heads that differ in bits, and what those
// take. Host only; needs no device.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "cache/page_layout.h"
#include "cuda/attention/cache_view.h"
#include "oscar/status.h"

namespace oscar::cuda {

// Of one layer of a page.
HeadBlocks HeadBlocksOf(const PageLayout& page, int layer);

// Whether kernels for heads alike read the layer: all of them of 2, all of 4 or all of 16 bits, K
// as V. No such kernel reads 3 bits.
bool IsUniformLayer(const PageLayout& page, int layer);

// Bytes of the smallest and the largest block. REQUIRES: layers with heads.
std::pair<int, int> BlockSizes(const AttentionShape& shape, std::span<const HeadBlocks> layers);

// As many as the layer has, and not more than kernels take.
Status CheckHeads(const AttentionShape& shape, std::span<const HeadBlock> heads);

}  // namespace oscar::cuda
