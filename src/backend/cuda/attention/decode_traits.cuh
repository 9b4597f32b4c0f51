// Compile-time shape of a decode kernel, its work items and its shared memory. Device only.
#pragma once

#include <cstdint>

#include "cache/block_layout.h"
#include "cuda/attention/cache_view.h"
#include "cuda/attention/decode_params.h"
#include "cuda/device/ptx.cuh"

namespace oscar::cuda {

// How codes of one side lie in the words of a fragment plane.
template <BlockKind kKindV>
struct SideWords {
  static constexpr BlockKind kKind = kKindV;
  static constexpr int kBits = BitsOf(kKind);
  static constexpr bool kSplit = kKind == BlockKind::kInt3;  // low two bits, then high ones
  static constexpr int kLowBits = kSplit ? 2 : kBits;
  static constexpr int kPerWord = kBits == 16 ? 2 : 16 / kLowBits;  // code pairs a word
  static constexpr float kMeanCode = static_cast<float>((1 << kBits) - 1) * 0.5f;
  // Power of two that position `step` of a word carries, relative to 2^-24.
  OSCAR_HD static constexpr int Exponent(int step) {
    return kLowBits * (step % kPerWord % (kPerWord / 2));
  }
};

template <BlockKind kKindV, int kDimV, int kGroupV, int kHeadsV>
struct DecodeTraits {
  using Params = DecodeKernelParams;
  static constexpr bool kMixed = false;  // heads differ in bits
  // SinkTraits
  static constexpr bool kHasSinks = false, kHasWindow = false;
  static constexpr bool kForms = false;  // keys are not rows
  static constexpr BlockKind kKind = kKindV;
  static constexpr int kDim = kDimV;
  static constexpr int kHeads = kHeadsV;        // query heads a block handles: 4, 8 or 16
  static constexpr int kNB = (kHeads + 7) / 8;  // in blocks of 8 columns
  static constexpr bool kPacked = kHeads == 4;  // DecodeConsumerPacked
  static constexpr bool kQuantised = kKind != BlockKind::kBf16;
  static constexpr int kGroup = kGroupV;
  static constexpr BlockLayout kLayout{kKind, CodeOrder::kTensorCore, kDim, kGroup};
  static constexpr int kGroups = kQuantised ? kDim / kGroupV : 1;
  static constexpr int kSteps = kDim / 16;  // k-steps of QK, dim slices of PV
  static constexpr int kStepsPerGroup = kSteps / kGroups;
  static constexpr int kSubSteps = kDim < 128 ? kDim / 16 : 8;
  static constexpr int kUnitBytes = kUnitTokens * kDim * 2;
  static constexpr int kBlockBytes = static_cast<int>(kLayout.block_bytes());
  static constexpr int kStageBytes =
      kQuantised && kBlockBytes > kUnitBytes ? kBlockBytes : kUnitBytes;
  // Floats; conflict-free for the epilogue.
  static constexpr int kStateStride = kDim + (kPacked ? 8 : 4);
  // Consumer warps, and registers a thread. Quantised pages: one block an SM, 12 consumers measured
  // best on an H200 (docs/lab/2026-11-16-benchmarks.md).
  // BF16 pages are bound by memory, and smaller blocks have shorter tails.
  static constexpr bool kSmall = kDim <= 128 && kNB == 1 && kGroups <= 2;
  static constexpr int kWarps = kSmall && kQuantised ? 12 : 6;
  static constexpr int kCtasPerSm = kSmall && !kQuantised ? 2 : 1;
  static constexpr int kRegisters = kSmall ? 128 : 255;
  static constexpr int kThreads = (kWarps + 2) * 32;  // with a scheduler and a merger

  // Page or unit i of an item goes to the warp of rank i % kWarps, where ranks begin at the warp
  // after the one that got the last of the item before: otherwise the first warps of every item
  // would have a page more than the others.
  OSCAR_HD static constexpr int Rank(int warp, int first_warp) {
    return warp < first_warp ? warp - first_warp + kWarps : warp - first_warp;
  }

  OSCAR_HD static constexpr int StageBytes(const Params&) { return kStageBytes; }
};

// Heads of a layer have different bits, K and V apart: one kernel has the code of every pair, and a
// block takes one path for an item. What depends on bits here is that of the largest.
template <int kDimV, int kGroupV, int kHeadsV>
struct MixedDecodeTraits : DecodeTraits<BlockKind::kInt4, kDimV, kGroupV, kHeadsV> {
  using Params = MixedDecodeParams;
  static constexpr bool kMixed = true;
  OSCAR_HD static int StageBytes(const Params& p) { return p.stage_bytes; }
};

// body.operator()<kKind>() for one of 2, 3 or 4 bits.
template <typename Body>
__device__ __forceinline__ void ForKind(BlockKind kind, const Body& body) {
  if (kind == BlockKind::kInt2) {
    body.template operator()<BlockKind::kInt2>();
  } else if (kind == BlockKind::kInt3) {
    body.template operator()<BlockKind::kInt3>();
  } else {
    body.template operator()<BlockKind::kInt4>();
  }
}

inline constexpr int kItemEnd = -1, kItemUnits = 0, kItemPages = 1;

struct alignas(16) DecodeItem {
  int32_t kind;  // kItemEnd, kItemUnits, kItemPages
  int32_t row;   // of the batch
  int32_t kv_head, head_block, heads;
  int32_t first, count;  // units or pages
  int32_t slot, slots;   // of the (sequence, head)'s partial states
  int32_t sink_units, sink_tokens, recent_tokens;
  int32_t first_warp;             // the warp of rank 0
  int32_t table_row, ring_begin;  // ring_begin: index of the page that the recent tokens begin in

  // Id of the page that holds page or unit `index` of the item.
  template <typename T>
  __device__ __forceinline__ int PageId(const CacheView& cache, int index) const {
    const int64_t row_at = table_row;
    if (kind == kItemPages) {
      const int page = first + index;
      return __ldg(cache.history_table + row_at * cache.history_table_stride +
                   (T::kQuantised ? page : page / kUnitsPerPage));
    }
    const int unit = first + index;
    int entry = unit / kUnitsPerPage;
    if (unit >= sink_units) {
      entry =
          cache.sink_pages + (ring_begin + (unit - sink_units) / kUnitsPerPage) % cache.ring_pages;
    }
    return __ldg(cache.window_table + row_at * cache.window_table_stride + entry);
  }
};

// Offsets in dynamic shared memory, the same for launcher and kernel.
template <typename T>
struct DecodeShared {
  int ring, state, ml, item, q, plan, bars, total;
  OSCAR_HD constexpr DecodeShared(int stages, int stage_bytes, int heads, int batch)
      : ring(0),
        state(ring + T::kWarps * stages * stage_bytes),
        ml(state + T::kWarps * heads * T::kStateStride * 4),
        item((ml + T::kWarps * heads * 8 + 15) / 16 * 16),
        q(item + 2 * kItemBytes),
        plan(q + 2 * QueryBytes(heads)),
        bars((plan + batch * 16 + 2 * (batch + 1) * 4 + 7) / 8 * 8),
        total(bars + (T::kWarps * stages + kItemBars) * 8 + 16) {}

  // A slot: the item, and the ids of the first two pages or units of each warp.
  static constexpr int kItemBytes =
      static_cast<int>(sizeof(DecodeItem)) + (2 * T::kWarps * 4 + 15) / 16 * 16;
  // The query rows, or what DecodeQueryPacked makes of them.
  OSCAR_HD static constexpr int QueryBytes(int heads) {
    if (T::kPacked && T::kForms) return T::kSteps * 512 + 256 + 16 + T::kHeads * T::kDim * 2;
    return T::kPacked ? T::kSteps / 2 * 512 + 256 + 16 : heads * T::kDim * 2;
  }
  __device__ DecodeItem* Item(uint8_t* shared, int slot) const {
    return reinterpret_cast<DecodeItem*>(shared + item + slot * kItemBytes);
  }
  __device__ int32_t* FirstIds(uint8_t* shared, int slot, int index) const {
    return reinterpret_cast<int32_t*>(shared + item + slot * kItemBytes + sizeof(DecodeItem)) +
           index;
  }

  // Barriers after those of the stages: item slots full and empty, their queries full (two each;
  // the last only where the scheduler makes them), states full and empty, and the end.
  static constexpr int kItemFull = 0, kItemEmpty = 2, kQueryFull = 4, kStateFull = 6,
                       kStateEmpty = 7, kEnd = 8;
  static constexpr int kItemBars = 9;
  __device__ uint32_t Bar(uint32_t base, int stages, int index) const {
    return base + static_cast<uint32_t>(bars + (T::kWarps * stages + index) * 8);
  }
  // Set by the merger at the end: the slot of the item whose (sequence, head) the whole block
  // merges, or -1.
  __device__ int64_t* LastSlot(uint8_t* shared, int stages) const {
    return reinterpret_cast<int64_t*>(shared + bars + (T::kWarps * stages + kItemBars) * 8);
  }
};

inline constexpr float kEmptyReference = -1e30f;

__device__ inline float Power2(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(min(max(exponent + 127, 1), 254)) << 23);
}

}  // namespace oscar::cuda
