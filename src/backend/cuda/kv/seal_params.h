// What launcher and seal kernel agree on. Host and device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/cache_view.h"

namespace oscar::cuda {

// How one side (K or V) is quantised; see quant/row_quantizer.h for the rules.
struct SealSide {
  int32_t rule;        // RowRule
  int32_t clip_index;  // element of the ascending |row| to clip at; -1: no clipping
};

struct SealKernelParams {
  const std::byte* window_pool;
  std::byte* history_pool;
  int64_t window_page_stride, window_layer_stride;    // bytes
  int64_t history_page_stride, history_layer_stride;  // bytes
  const int32_t* source_pages;    // [jobs], of the window pool; negative: a padded job
  const int32_t* target_pages;    // [jobs], of the history pool
  unsigned long long* saturated;  // incremented by values that were NaN or saturated; may be null
  int32_t num_kv_heads;
  SealSide k, v;
};

// Of pages whose heads differ in bits. Strides of layers mean nothing for history.
struct MixedSealParams : SealKernelParams {
  const HeadBlock* heads;  // [layers, heads_stride], device: offsets from history_pool
  int32_t heads_stride;
};

inline constexpr int kSealThreads = 2 * kPageTokens;

}  // namespace oscar::cuda
