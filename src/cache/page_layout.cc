#include "cache/page_layout.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace oscar {
namespace {

std::vector<std::vector<BlockLayout>> ForAllHeads(const std::vector<BlockLayout>& layers,
                                                  int kv_heads) {
  std::vector<std::vector<BlockLayout>> out;
  for (const BlockLayout& layout : layers) out.emplace_back(kv_heads, layout);
  return out;
}

}  // namespace

PageLayout::PageLayout(const std::vector<BlockLayout>& layers, int kv_heads)
    : PageLayout(ForAllHeads(layers, kv_heads)) {}

PageLayout::PageLayout(const std::vector<std::vector<BlockLayout>>& blocks)
    : kv_heads_(blocks.empty() ? 1 : static_cast<int>(blocks[0].size())) {
  for (const std::vector<BlockLayout>& layer : blocks) {
    OSCAR_CHECK(std::cmp_equal(layer.size(), kv_heads_) && kv_heads_ > 0);
    for (const BlockLayout& layout : layer) {
      blocks_.push_back({layout, bytes_});
      bytes_ += layout.block_bytes();
      elements_ += uint64_t{2} * kPageTokens * static_cast<uint64_t>(layout.head_dim());
    }
  }
}

bool PageLayout::is_uniform() const {
  return std::ranges::all_of(blocks_, [&](const BlockPlace& place) {
    return place.layout.is_uniform() && place.layout == blocks_.front().layout;
  });
}

}  // namespace oscar
