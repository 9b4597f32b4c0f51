// Layers with learned sinks, some of which see a sliding window alone: what their kernels take
// beside the parameters of others. Host and device.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/cache_view.h"
#include "cuda/attention/prefill_params.h"

namespace oscar::cuda {

template <typename Base>
struct SinkParams : Base {
  const float* sinks;      // [q_heads], logits times log2(e)
  int32_t sliding_window;  // AttentionShape's
};

// The same traits with such parameters. Only kernels of BF16 pages know sliding windows: what a
// layer with one sees is open.
template <typename Base>
struct SinkTraits : Base {
  using Params = SinkParams<typename Base::Params>;
  static constexpr bool kHasSinks = true;
  static constexpr bool kHasWindow = !Base::kQuantised;
  using Tiles = std::conditional_t<kHasWindow, WindowTiles, PrefillTiles>;  // of prefill
};

// The reference of a softmax that has seen no key yet, finite so that differences are numbers.
inline constexpr float kNothingSeen = -1e30f;

#if defined(__CUDACC__)
// A sequence's tiles for queries from first_position on.
template <typename T>
__device__ __forceinline__ typename T::Tiles TilesOf(const typename T::Params& p,
                                                     const SequenceView& view, int tile_pages,
                                                     int64_t first_position) {
  if constexpr (T::kHasWindow) {
    return WindowTiles(view, tile_pages, first_position, p.sliding_window);
  } else {
    return PrefillTiles(view, tile_pages);
  }
}
// What sums of 2^(logit - reference) are multiplied by: 1 / (their total `l` and the sink's part).
__device__ __forceinline__ float InverseWithSink(float reference, float l, float sink) {
  const float largest = fmaxf(reference, sink);
  const float mine = exp2f(reference - largest);
  return mine / fmaf(l, mine, exp2f(sink - largest));
}
#endif

}  // namespace oscar::cuda
