#include "cache/page_layout.h"

#include <utility>

namespace oscar {

PageLayout::PageLayout(std::vector<BlockLayout> layers, int kv_heads)
    : layers_(std::move(layers)), kv_heads_(kv_heads) {
  for (const BlockLayout& layout : layers_) {
    offsets_.push_back(bytes_);
    bytes_ += static_cast<size_t>(kv_heads) * layout.block_bytes();
    elements_ += uint64_t{2} * kPageTokens * static_cast<uint64_t>(kv_heads * layout.head_dim());
  }
}

}  // namespace oscar
