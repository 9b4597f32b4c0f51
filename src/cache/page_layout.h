// PageLayout: where the blocks of a page lie. A page holds 64 consecutive tokens of all layers and
// KV heads in one piece; a block (cache/block_layout.h) is what one (layer, KV head) has in it.
// Immutable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cache/block_layout.h"

namespace oscar {

class PageLayout {
 public:
  PageLayout(std::vector<BlockLayout> layers, int kv_heads);

  int num_layers() const { return static_cast<int>(layers_.size()); }
  int kv_heads() const { return kv_heads_; }
  const BlockLayout& block(int layer) const { return layers_[static_cast<size_t>(layer)]; }
  size_t BlockOffset(int layer, int head) const {
    return offsets_[static_cast<size_t>(layer)] +
           static_cast<size_t>(head) * block(layer).block_bytes();
  }
  // All KV heads of a layer, which lie together.
  size_t LayerBytes(int layer) const {
    return static_cast<size_t>(kv_heads_) * block(layer).block_bytes();
  }
  size_t bytes() const { return bytes_; }
  // K and V numbers that one page holds.
  uint64_t elements() const { return elements_; }

 private:
  std::vector<BlockLayout> layers_;
  std::vector<size_t> offsets_;
  int kv_heads_;
  size_t bytes_ = 0;
  uint64_t elements_ = 0;
};

}  // namespace oscar
