#include "cuda/attention/head_blocks.h"

#include <fmt/core.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace oscar::cuda {

HeadBlocks HeadBlocksOf(const PageLayout& page, int layer) {
  HeadBlocks out;
  const std::span<const BlockPlace> blocks = page.blocks(layer);
  for (const BlockPlace& block : blocks) {
    out.push_back({static_cast<uint32_t>(block.offset - blocks.front().offset),
                   block.layout.k_kind(), block.layout.v_kind()});
  }
  return out;
}

bool IsUniformLayer(const PageLayout& page, int layer) {
  const BlockLayout& first = page.block(layer, 0);
  return first.is_uniform() && first.kind() != BlockKind::kInt3 &&
         std::ranges::all_of(page.blocks(layer),
                             [&](const BlockPlace& block) { return block.layout == first; });
}

std::pair<int, int> BlockSizes(const AttentionShape& shape, std::span<const HeadBlocks> layers) {
  std::pair<int, int> sizes{std::numeric_limits<int>::max(), 0};
  for (const HeadBlocks& heads : layers) {
    for (const HeadBlock& head : heads) {
      const auto bytes =
          static_cast<int>(head.Layout(shape.head_dim, shape.group_dims).block_bytes());
      sizes = {std::min(sizes.first, bytes), std::max(sizes.second, bytes)};
    }
  }
  return sizes;
}

Status CheckHeads(const AttentionShape& shape, std::span<const HeadBlock> heads) {
  if (std::cmp_equal(heads.size(), shape.num_kv_heads) && heads.size() <= kMaxMixedHeads) return {};
  return InvalidArgument(fmt::format("bits of {} KV heads for a layer of {}, {} at most",
                                     heads.size(), shape.num_kv_heads, kMaxMixedHeads));
}

}  // namespace oscar::cuda
