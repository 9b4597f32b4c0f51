// PageSeal: quantises full BF16 window pages into history pages, for any number of pages, all KV
// heads and all layers in one launch; bit-equal to EncodeBlock on the same rows. Holds only
// numbers; create it once a shape and rule, outside graph capture.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cache/block_codec.h"
#include "cuda/attention/cache_view.h"
#include "oscar/status.h"

namespace oscar::cuda {

struct SealArguments {
  const std::byte* window_pool = nullptr;                     // of layer 0
  std::byte* history_pool = nullptr;                          // of layer 0
  int64_t window_page_stride = 0, window_layer_stride = 0;    // bytes
  int64_t history_page_stride = 0, history_layer_stride = 0;  // bytes
  const int32_t* source_pages = nullptr;  // [jobs], device; negative: a padded job, nothing happens
  const int32_t* target_pages = nullptr;  // [jobs], device
  unsigned long long* saturated = nullptr;  // device; += values that were NaN or beyond +-65504
  int jobs = 0;
  int layers = 1;
  // Where heads differ in bits: [layers, heads_stride], device, offsets from history_pool;
  // history_layer_stride means nothing then.
  const HeadBlock* heads = nullptr;
  int heads_stride = 0;
};

class PageSeal {
 public:
  // `layers`: those it will be launched for, where heads differ in bits; else empty.
  static Result<PageSeal> Create(const AttentionShape& shape, const BlockRules& rules,
                                 std::span<const HeadBlocks> layers = {});
  // Asynchronous; may be captured in a graph.
  Status Launch(const SealArguments& args, Stream stream) const;

 private:
  PageSeal() = default;
  AttentionShape shape_;
  BlockRules rules_;
  const void* kernel_ = nullptr;
  bool mixed_ = false;
  int shared_bytes_ = 0;
};

// Seals BF16 pages: copies `layer_bytes` of each layer. A multiple of 16.
Status LaunchPageCopy(const SealArguments& args, size_t layer_bytes, Stream stream);

}  // namespace oscar::cuda
