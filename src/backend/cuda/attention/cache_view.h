// What every attention and write kernel sees of the cache: two pools of pages in device memory and,
// per sequence, where its pages are. Plain data in device memory, owned by the caller; nothing here
// allocates. Page ids are int32 and addresses 64-bit, so a pool is bounded by memory alone.
//
//   position   [0, sink)            [sink, sink + 64 history)     the newest `recent` tokens
//   pages      window_table[0..]    history_table[0..]            window_table[sink_pages + ring]
//   kind       BF16                 2, 3 or 4 bits, or BF16       BF16
//
// All pages are in tensor-core order (cache/block_layout.h) and begin at multiples of 64 positions.
// Page p of the ring is that of positions [64 j, 64 j + 64) with j % ring_pages == p, so appending
// and sealing move no table entries; a ring as long as the context is a plain table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/half.h"
#include "cache/block_layout.h"

// The runtime's stream type, so that headers need no CUDA.
struct CUstream_st;

namespace oscar::cuda {

using Stream = CUstream_st*;

// One row of a batch. All zero: a padded row, which touches nothing, not even its output.
struct alignas(16) SequenceView {
  int32_t sink_tokens = 0;    // BF16; a multiple of 64 unless the sequence ends inside it
  int32_t history_pages = 0;  // whole pages
  int32_t recent_tokens = 0;  // BF16
  int32_t table_row = 0;      // of both tables

  OSCAR_HD constexpr int64_t length() const {
    return int64_t{sink_tokens} + int64_t{history_pages} * kPageTokens + recent_tokens;
  }
};

// The block of one KV head in a page of history, where heads differ in bits.
struct HeadBlock {
  uint32_t offset = 0;  // bytes from the block of head 0
  BlockKind k = BlockKind::kInt2, v = BlockKind::kInt2;

  OSCAR_HD constexpr BlockLayout Layout(int head_dim, int group_dims) const {
    return {k, v, CodeOrder::kTensorCore, head_dim, group_dims};
  }
  // 4 to 8: what a block's size follows from.
  OSCAR_HD constexpr int bits() const { return BitsOf(k) + BitsOf(v); }
};
// All KV heads of one layer.
using HeadBlocks = std::vector<HeadBlock>;
// As many go to a kernel by value, where reading them costs no access to memory.
inline constexpr int kMaxMixedHeads = 128;

// One layer's cache. Block (page, head) lies at pool + page * page_stride + head * block_bytes, or,
// of history whose heads differ in bits, HeadBlock::offset further than head 0's.
struct CacheView {
  const std::byte* history_pool = nullptr;
  const std::byte* window_pool = nullptr;
  int64_t history_page_stride = 0;         // bytes
  int64_t window_page_stride = 0;          // bytes
  const int32_t* history_table = nullptr;  // [rows, history_table_stride]
  const int32_t* window_table = nullptr;   // [rows, window_table_stride]
  int32_t history_table_stride = 0;
  int32_t window_table_stride = 0;
  int32_t sink_pages = 1;  // entries of a window row before the ring
  int32_t ring_pages = 1;

  // Bytes from window_pool to the block of a head in the window page of a position. Reads the
  // table, so only where that is.
  OSCAR_HD int64_t WindowOffset(int table_row, int position, int head, int64_t block_bytes) const {
    const int page = position / kPageTokens;
    const int entry = page < sink_pages ? page : sink_pages + page % ring_pages;
    const int64_t id = window_table[int64_t{table_row} * window_table_stride + entry];
    return id * window_page_stride + head * block_bytes;
  }
};

// The head dim whose decode and prefill kernels have a form with sinks.
inline constexpr int kSinkHeadDim = 64;
// Blocks whose keys are not rows (docs/cache-format.md, 2b), the same for all KV heads, and what a
// reader of one brings together in shared memory:
//
//   the block | metadata of the other half of the dims | norms over all heads | scratch
//
// Blocks that are sealed in pairs are consecutive pages of history, the first at an even index.
struct FormBlocks {
  BlockLayout layout;
  uint32_t norm_offset = 0;  // bytes from the block of head 0 to the norms over all heads; 0: none

  static constexpr int kScratchHeads = 8;
  OSCAR_HD constexpr bool is_paired() const { return layout.pages_together() > 1; }
  OSCAR_HD constexpr uint32_t mate_bytes() const {
    return is_paired() ? layout.channel_meta_bytes() : 0;
  }
  OSCAR_HD constexpr uint32_t norm_bytes() const {
    return norm_offset != 0 ? BlockLayout::kNormBytes : 0;
  }
  OSCAR_HD constexpr uint32_t mate_at() const { return layout.block_bytes(); }
  OSCAR_HD constexpr uint32_t norms_at() const { return mate_at() + mate_bytes(); }
  // Everything that is copied.
  OSCAR_HD constexpr uint32_t copied_bytes() const { return norms_at() + norm_bytes(); }
  // Of decode: what the upper bits of boosted dims are multiplied by.
  OSCAR_HD constexpr uint32_t scratch_bytes() const {
    return static_cast<uint32_t>(kScratchHeads * layout.boosted_dims() * 4);
  }
  OSCAR_HD constexpr uint32_t stage_bytes() const {
    return (copied_bytes() + scratch_bytes() + 127) / 128 * 128;
  }
  // Bytes of a page's blocks and norms, where there are no other layers.
  constexpr size_t PageBytes(int num_kv_heads) const {
    return static_cast<size_t>(num_kv_heads) * layout.block_bytes() + norm_bytes();
  }
  // Metadata of the dims from `half` times D / 2 on, of a block whose index in history is `page`
  // and that lies at `block` with what was copied behind it.
  OSCAR_HD const uint8_t* ChannelMeta(const uint8_t* block, int page, int half) const {
    if (!is_paired()) {
      return block + layout.k_meta_offset() + half * (layout.head_dim() / 2 * 4);
    }
    return block + ((page & 1) == half ? layout.k_meta_offset() : mate_at());
  }
  // Index bytes of the same dims, of mixed keys.
  OSCAR_HD const uint8_t* ChannelIndex(const uint8_t* block, int page, int half) const {
    return block + ((page & 1) == half ? layout.k_meta_offset() : mate_at()) +
           (layout.KIndex(0) - layout.k_meta_offset());
  }
  // fp32 norms of the page's tokens; null: none.
  OSCAR_HD const uint8_t* Norms(const uint8_t* block) const {
    if (layout.has_head_norms()) return block + layout.KNorm(0);
    return norm_offset != 0 ? block + norms_at() : nullptr;
  }
};

// Shape of an attention layer; what a kernel is chosen by. Where heads differ in bits, HeadBlocks
// come beside it and history_kind means nothing.
struct AttentionShape {
  BlockKind history_kind = BlockKind::kInt2;
  int head_dim = 128;
  int group_dims = 128;
  int num_q_heads = 32;
  int num_kv_heads = 8;
  // A logit per query head that takes weight in the softmax and gives no value.
  bool has_sinks = false;
  // Tokens that a query sees, itself among them, all of them in the windows; 0: every token.
  int sliding_window = 0;
  // Keys that are not rows; history_kind and group_dims mean nothing then.
  std::optional<FormBlocks> form = {};

  constexpr int group_size() const { return num_q_heads / num_kv_heads; }
  constexpr BlockLayout history_layout() const {
    if (form.has_value()) return form->layout;
    return {history_kind, CodeOrder::kTensorCore, head_dim, group_dims};
  }
  constexpr BlockLayout window_layout() const {
    return {BlockKind::kBf16, CodeOrder::kTensorCore, head_dim, head_dim};
  }
};

}  // namespace oscar::cuda
