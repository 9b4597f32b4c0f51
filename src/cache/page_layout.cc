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

PageLayout::PageLayout(const std::vector<std::vector<BlockLayout>>& blocks, bool token_norms)
    : PageLayout(blocks, std::vector<bool>(blocks.size(), true), token_norms) {}

PageLayout::PageLayout(const std::vector<std::vector<BlockLayout>>& blocks,
                       const std::vector<bool>& held, bool token_norms)
    : held_(held),
      kv_heads_(blocks.empty() ? 1 : static_cast<int>(blocks[0].size())),
      token_norms_(token_norms) {
  OSCAR_CHECK(held_.size() == blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i) {
    OSCAR_CHECK(std::cmp_equal(blocks[i].size(), kv_heads_) && kv_heads_ > 0);
    for (const BlockLayout& layout : blocks[i]) {
      blocks_.push_back({layout, bytes_});
      if (!held_[i]) continue;
      bytes_ += layout.block_bytes();
      elements_ += uint64_t{2} * kPageTokens * static_cast<uint64_t>(layout.head_dim());
    }
    if (has_norms(static_cast<int>(i))) bytes_ += BlockLayout::kNormBytes;
  }
}

bool PageLayout::HoldsAll() const {
  return std::ranges::all_of(held_, [](bool held) { return held; });
}

bool PageLayout::is_uniform() const {
  const BlockLayout* first = nullptr;
  for (int i = 0; i < num_layers(); ++i) {
    for (const BlockPlace& place : blocks(i)) {
      if (!Holds(i)) continue;
      if (first == nullptr) first = &place.layout;
      if (!place.layout.is_uniform() || place.layout != *first) return false;
    }
  }
  return true;
}

}  // namespace oscar
