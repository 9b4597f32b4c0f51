// A cache in device memory built from host rows and blocks, for the GPU tests: several sequences,
// pages at scattered ids, rows beyond a sequence's end filled with NaN.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "cache/attention_reference.h"
#include "cache/block_codec.h"
#include "cuda/attention/cache_view.h"
#include "cuda/attention/head_blocks.h"
#include "cuda/device/device_buffer.h"

namespace oscar::cuda {

template <typename T>
T Unwrap(Result<T> result) {
  EXPECT_TRUE(result.has_value()) << (result.has_value() ? "" : result.error().ToString());
  if (!result.has_value()) std::abort();  // no GPU: the whole program fails, it does not skip
  return std::move(result).value();
}

// Heads one after the other, as a page has them.
inline HeadBlocks HeadsOf(const std::vector<BlockLayout>& layouts) {
  return HeadBlocksOf(PageLayout({layouts}), 0);
}
// Every pair of bits of K and V, one pair per head.
inline HeadBlocks NinePairs(int head_dim, int group_dims) {
  std::vector<BlockLayout> layouts;
  constexpr BlockKind kKinds[] = {BlockKind::kInt2, BlockKind::kInt3, BlockKind::kInt4};
  for (const BlockKind k : kKinds) {
    for (const BlockKind v : kKinds) {
      layouts.emplace_back(k, v, CodeOrder::kTensorCore, head_dim, group_dims);
    }
  }
  return HeadsOf(layouts);
}

// The shape of a case; of one whose rows differ in bits, HeadBlocks come beside it.
inline AttentionShape ShapeOf(const AttentionCase& c) {
  AttentionShape shape{.history_kind = c.kind,
                       .head_dim = c.head_dim,
                       .group_dims = c.group_dims,
                       .num_q_heads = c.q_heads(),
                       .num_kv_heads = c.kv_heads};
  if (c.k_form != SideForm::kRows) {
    const BlockLayout layout = c.layout(CodeOrder::kTensorCore);
    const bool shared = c.norm == TokenNorm::kAllHeads;
    shape.form =
        FormBlocks{layout, shared ? static_cast<uint32_t>(c.kv_heads) * layout.block_bytes() : 0};
  }
  return shape;
}
// Empty: of a kind that kernels for heads alike, or for keys that are not rows, read.
inline HeadBlocks CaseHeads(const AttentionCase& c) {
  if (c.k_form != SideForm::kRows) return {};
  if (!c.v_kind.has_value() && c.kind != BlockKind::kInt3) return {};
  return HeadsOf(
      std::vector<BlockLayout>(static_cast<size_t>(c.kv_heads), c.layout(CodeOrder::kTensorCore)));
}

class TestCache {
 public:
  // `heads`: where they differ in bits.
  TestCache(const AttentionShape& shape, int rows, int max_history_pages, int max_window_pages,
            int sink_pages, HeadBlocks heads = {})
      : shape_(shape),
        heads_(std::move(heads)),
        rows_(rows),
        history_stride_(std::max(1, max_history_pages)),
        window_stride_(sink_pages + max_window_pages),
        sink_pages_(sink_pages),
        ring_pages_(max_window_pages) {
    const size_t history_pages = static_cast<size_t>(rows * history_stride_) + 3;
    const size_t window_pages = static_cast<size_t>(rows * window_stride_) + 3;
    history_.assign(history_pages * history_page_bytes(), std::byte{0xff});
    window_.assign(window_pages * window_page_bytes(), std::byte{0xff});
    history_table_ = Scattered(rows * history_stride_, history_pages, 11);
    window_table_ = Scattered(rows * window_stride_, window_pages, 12);
    sequences_.resize(static_cast<size_t>(rows));
  }

  size_t history_page_bytes() const {
    if (!heads_.empty()) return heads_.back().offset + history_layout(-1).block_bytes();
    if (shape_.form.has_value()) return shape_.form->PageBytes(shape_.num_kv_heads);
    return static_cast<size_t>(shape_.num_kv_heads) * shape_.history_layout().block_bytes();
  }
  size_t window_page_bytes() const {
    return static_cast<size_t>(shape_.num_kv_heads) * shape_.window_layout().block_bytes();
  }
  // -1: of the last head.
  BlockLayout history_layout(int head) const {
    if (heads_.empty()) return shape_.history_layout();
    const HeadBlock& block = head < 0 ? heads_.back() : heads_[static_cast<size_t>(head)];
    return block.Layout(shape_.head_dim, shape_.group_dims);
  }
  const HeadBlocks& heads() const { return heads_; }
  int history_id(int row, int page) const { return history_table_[row * history_stride_ + page]; }
  int window_id(int row, int64_t absolute_page) const {
    const int entry = absolute_page < sink_pages_
                          ? static_cast<int>(absolute_page)
                          : sink_pages_ + static_cast<int>(absolute_page % ring_pages_);
    return window_table_[row * window_stride_ + entry];
  }
  std::byte* history_block(int row, int page, int head) {
    return history_.data() + static_cast<size_t>(history_id(row, page)) * history_page_bytes() +
           (heads_.empty() ? static_cast<size_t>(head) * shape_.history_layout().block_bytes()
                           : heads_[static_cast<size_t>(head)].offset);
  }
  // Of the tokens of a page over all heads, where keys that are not rows have them.
  void SetNorms(int row, int page, const float* norms) {
    std::memcpy(history_block(row, page, 0) + shape_.form->norm_offset, norms,
                BlockLayout::kNormBytes);
  }
  std::byte* window_block(int row, int64_t absolute_page, int head) {
    return window_.data() +
           static_cast<size_t>(window_id(row, absolute_page)) * window_page_bytes() +
           static_cast<size_t>(head) * shape_.window_layout().block_bytes();
  }
  void SetWindowRow(int row, int64_t absolute_page, int token, int head, const Bf16* k,
                    const Bf16* v) {
    const BlockLayout layout = shape_.window_layout();
    std::byte* block = window_block(row, absolute_page, head);
    for (int d = 0; d < shape_.head_dim; ++d) {
      const CodePosition kp = layout.KCode(token, d), vp = layout.VCode(token, d);
      std::memcpy(block + kp.offset + kp.shift / 8, &k[d], 2);
      std::memcpy(block + vp.offset + vp.shift / 8, &v[d], 2);
    }
  }
  SequenceView& sequence(int row) { return sequences_[static_cast<size_t>(row)]; }

  // Every row's history `times` times over, the same pages again and again.
  void RepeatHistory(int times) {
    std::vector<int32_t> table;
    for (int row = 0; row < rows_; ++row) {
      const auto begin = history_table_.begin() + row * history_stride_;
      for (int i = 0; i < times; ++i) table.insert(table.end(), begin, begin + history_stride_);
    }
    history_table_ = std::move(table);
    history_stride_ *= times;
  }

  // Copies everything to the device.
  void Upload() {
    d_history_ = Unwrap(DeviceBuffer<std::byte>::Copy(history_));
    d_window_ = Unwrap(DeviceBuffer<std::byte>::Copy(window_));
    d_history_table_ = Unwrap(DeviceBuffer<int32_t>::Copy(history_table_));
    d_window_table_ = Unwrap(DeviceBuffer<int32_t>::Copy(window_table_));
    d_sequences_ = Unwrap(DeviceBuffer<SequenceView>::Copy(sequences_));
  }
  CacheView view() const {
    CacheView view;
    view.history_pool = d_history_.data();
    view.window_pool = d_window_.data();
    view.history_page_stride = static_cast<int64_t>(history_page_bytes());
    view.window_page_stride = static_cast<int64_t>(window_page_bytes());
    view.history_table = d_history_table_.data();
    view.window_table = d_window_table_.data();
    view.history_table_stride = history_stride_;
    view.window_table_stride = window_stride_;
    view.sink_pages = sink_pages_;
    view.ring_pages = ring_pages_;
    return view;
  }
  const SequenceView* device_sequences() const { return d_sequences_.data(); }
  std::byte* device_window() const { return d_window_.data(); }
  std::byte* device_history() const { return d_history_.data(); }
  std::vector<std::byte> DownloadWindow() const { return Unwrap(d_window_.ToHost()); }
  std::vector<std::byte> DownloadHistory() const { return Unwrap(d_history_.ToHost()); }
  int rows() const { return rows_; }

 private:
  static std::vector<int32_t> Scattered(int count, size_t pages, uint64_t seed) {
    std::vector<int32_t> ids(pages);
    std::iota(ids.begin(), ids.end(), 0);
    const Philox rng(seed, 0);
    for (size_t i = pages - 1; i > 0; --i) {
      std::swap(ids[i], ids[rng.Below(i, static_cast<uint32_t>(i + 1))]);
    }
    ids.resize(static_cast<size_t>(count));
    return ids;
  }

  AttentionShape shape_;
  HeadBlocks heads_;
  int rows_, history_stride_, window_stride_, sink_pages_, ring_pages_;
  std::vector<std::byte> history_, window_;
  std::vector<int32_t> history_table_, window_table_;
  std::vector<SequenceView> sequences_;
  DeviceBuffer<std::byte> d_history_, d_window_;
  DeviceBuffer<int32_t> d_history_table_, d_window_table_;
  DeviceBuffer<SequenceView> d_sequences_;
};

}  // namespace oscar::cuda
