// PageLayout: where the blocks of a page lie. A page holds 64 consecutive tokens of all layers and
// KV heads in one piece; a block (cache/block_layout.h) is what one (layer, KV head) has in it.
// Blocks follow each other by layer, then by head, and may differ in size: a method may give some
// heads more bits. All pages of one kind (open, sealed) of a cache have the same layout. Immutable.
//
// Sealed pages hold no blocks of layers with a sliding window: what such a layer sees is open.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cache/block_layout.h"

namespace oscar {

// A block and where it begins.
struct BlockPlace {
  BlockLayout layout;
  size_t offset;  // bytes from the page's start
};

class PageLayout {
 public:
  // One layout per layer, the same for all of its KV heads.
  PageLayout(const std::vector<BlockLayout>& layers, int kv_heads);
  // [layers][kv_heads]. REQUIRES: every layer has as many heads.
  // `token_norms`: behind the blocks of every layer whose keys are quantised lie the norms of the
  // page's tokens over all KV heads, one fp32 number each.
  explicit PageLayout(const std::vector<std::vector<BlockLayout>>& blocks,
                      bool token_norms = false);
  // Bytes without blocks.
  static PageLayout OfBytes(size_t bytes) {
    PageLayout layout({}, 1);
    layout.bytes_ = bytes;
    return layout;
  }
  // Of the layers for which `held` says so; the others take no bytes. REQUIRES: one is held.
  PageLayout(const std::vector<std::vector<BlockLayout>>& blocks, const std::vector<bool>& held,
             bool token_norms = false);

  int num_layers() const { return static_cast<int>(blocks_.size()) / kv_heads_; }
  int kv_heads() const { return kv_heads_; }
  bool Holds(int layer) const { return held_[static_cast<size_t>(layer)]; }
  bool HoldsAll() const;
  // All KV heads of a layer, in order; of one that is not held, places of no size.
  std::span<const BlockPlace> blocks(int layer) const {
    const auto heads = static_cast<size_t>(kv_heads_);
    return std::span(blocks_).subspan(static_cast<size_t>(layer) * heads, heads);
  }
  const BlockLayout& block(int layer, int head) const {
    return blocks(layer)[static_cast<size_t>(head)].layout;
  }
  size_t BlockOffset(int layer, int head) const {
    return blocks(layer)[static_cast<size_t>(head)].offset;
  }
  // All KV heads of a layer and its token norms, which lie together.
  size_t LayerBytes(int layer) const {
    if (!Holds(layer)) return 0;
    return NormOffset(layer) + (has_norms(layer) ? BlockLayout::kNormBytes : 0) -
           BlockOffset(layer, 0);
  }
  bool has_norms(int layer) const {
    return token_norms_ && Holds(layer) && !block(layer, 0).is_bf16();
  }
  // Where a layer's token norms begin, or its blocks end.
  size_t NormOffset(int layer) const {
    const BlockPlace& last = blocks(layer).back();
    return last.offset + last.layout.block_bytes();
  }
  // Whether every block that the page holds is of one layout.
  bool is_uniform() const;
  size_t bytes() const { return bytes_; }
  // K and V numbers that one page holds.
  uint64_t elements() const { return elements_; }

 private:
  std::vector<BlockPlace> blocks_;  // [layers][kv_heads]
  std::vector<bool> held_;          // [layers]
  int kv_heads_;
  bool token_norms_ = false;
  size_t bytes_ = 0;
  uint64_t elements_ = 0;
};

}  // namespace oscar
