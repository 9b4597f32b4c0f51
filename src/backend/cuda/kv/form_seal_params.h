// What launcher and kernels of FormSeal agree on. Private to src/backend/cuda.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cache/block_layout.h"
#include "quant/row_quantizer.h"

namespace oscar::cuda {

inline constexpr int kFormSealThreads = 256;
inline constexpr int kLargestCodebook = 16;
inline constexpr int kMaxNormHeads = 128;

struct FormSealParams {
  const std::byte* window_pool;
  std::byte* history_pool;
  int64_t window_page_stride, window_layer_stride;    // bytes
  int64_t history_page_stride, history_layer_stride;  // bytes
  const int32_t* source_pages;                        // [jobs]; negative: a padded run
  const int32_t* target_pages;                        // [jobs]
  unsigned long long* saturated;                      // may be null
  int32_t num_kv_heads;
  int64_t norm_offset;  // 0: none
  BlockLayout layout;
  RowRule k_rule, v_rule;
  int32_t k_clip_index, v_clip_index;  // of the ascending |row|; -1: rows are not clipped
  float thresholds[kLargestCodebook];  // of a codebook
};

struct FormSealKernels {
  const void* seal = nullptr;
  const void* norms = nullptr;  // of tokens over all heads
  int shared_bytes = 0;         // of `seal`, behind the block
};
// Of a head dim; null where there are none.
FormSealKernels FindFormSealKernels(int head_dim);

}  // namespace oscar::cuda
