// Decode attention over a paged cache: one query token a sequence against its BF16 windows and its
// INT2, INT4 or BF16 history, in one launch.
//
// Grid       persistent: one block an SM of 12 consumer warps (two of 6 for BF16), a producer and a
//            merger. Work items are (sequence, KV head, split); their number follows from lengths
//            alone, so each producer lays the plan out itself (a scan over the batch, nothing over
//            the context) and takes items off one counter, one ahead. Splits depend on a sequence's
//            own length and the device. Items of window units come first, then history.
// Shared     a ring of `stages` blocks a consumer (one page of codes, or 16 BF16 rows of K or V, a
//            stage), two partial states [heads, D] fp32 a consumer, two item slots with their Q,
//            the plan (24 B a row). INT2, D 128, 4 heads: 217 KiB.
// Bytes      the cache once (4608 B a page and head at INT2, D 128, group 128), and 2 x heads x D x
//            4 B of partial state a split, which stay in L2.
// Bound      memory. H200, INT2, 32 / 8 heads, D 128: see docs/benchmarks.md.
//
// Quantised pages: a pair of codes masked out of a word is a pair of fp16 subnormals,
//     bit  15..8         7 6     5 4     3 2     1 0        (and the same 16 bits above)
//          other half    pos 3   pos 2   pos 1   pos 0      value = code * 2^(2 pos - 24)
// which tensor cores take at full speed. 2^(2 pos) is folded into Q for K, into the epilogue for V;
// scale and min never touch an element: logit = s_t (q . code) + min_t sum(q),
// out = sum (p_t s_t) code + sum p_t min_t.
//
// Softmax state: o, l and a reference R in log2 units, p = 2^(logit - R). R is the largest logit
// seen, lagging by up to 2^kSlack so that most pages skip the cross-lane maximum, minus an exponent
// E that lifts p * (V scale) into fp16's normal range: tiny scales cost nothing and lose nothing.
// Q is scaled by a power of two per head for the same reason. Both are undone in fp32.
#pragma once

#include <cstdint>

#include "cache/page_layout.h"
#include "cuda/cache_view.h"
#include "cuda/kernels/decode_params.h"
#include "cuda/kernels/ptx.cuh"

namespace oscar::cuda {

template <PageKind kKindV, int kDimV, int kGroupV, int kNBV>
struct DecodeTraits {
  static constexpr PageKind kKind = kKindV;
  static constexpr int kDim = kDimV;
  static constexpr int kNB = kNBV;  // blocks of 8 query heads
  static constexpr int kHeads = 8 * kNB;
  static constexpr bool kQuantised = kKind != PageKind::kBf16;
  static constexpr PageLayout kLayout{kKind, CodeOrder::kTensorCore, kDim, kGroupV};
  static constexpr int kGroups = kQuantised ? kDim / kGroupV : 1;
  static constexpr int kSteps = kDim / 16;  // k-steps of QK, dim slices of PV
  static constexpr int kStepsPerGroup = kSteps / kGroups;
  static constexpr int kSubSteps = kDim < 128 ? kDim / 16 : 8;
  static constexpr int kBits = kLayout.bits();
  static constexpr int kPerWord = kQuantised ? 16 / kBits : 2;  // code pairs a word
  static constexpr int kUnitBytes = kUnitTokens * kDim * 2;
  static constexpr int kBlockBytes = static_cast<int>(kLayout.block_bytes());
  static constexpr int kStageBytes =
      kQuantised && kBlockBytes > kUnitBytes ? kBlockBytes : kUnitBytes;
  static constexpr int kStateStride = kDim + 4;  // floats; conflict-free for the epilogue
  // Consumer warps, and registers a thread. Quantised pages: one block an SM, 12 consumers measured
  // best on an H200 (541 us at 32 x 100K; 8: 581, 10: 589, 14: 559, 18 with 96 registers: 613).
  // BF16 pages are bound by memory, and smaller blocks have shorter tails.
  static constexpr bool kSmall = kDim <= 128 && kNB == 1 && kGroups <= 2;
  static constexpr int kWarps = kSmall && kQuantised ? 12 : 6;
  static constexpr int kCtasPerSm = kSmall && !kQuantised ? 2 : 1;
  static constexpr int kRegisters = kSmall ? 128 : 255;
  static constexpr int kThreads = (kWarps + 2) * 32;  // with a producer and a merger

  // Power of two that position `step` of a word carries, relative to 2^-24.
  static constexpr int Exponent(int step) { return kBits * (step % kPerWord % (kPerWord / 2)); }
};

struct DecodeItem {
  int32_t kind;  // kItemEnd, kItemUnits, kItemPages
  int32_t row;   // of the batch
  int32_t kv_head, head_block, heads;
  int32_t first, count;  // units or pages
  int32_t slot, slots;   // of the (sequence, head)'s partial states
  int32_t sink_units, sink_tokens, recent_tokens;
};
inline constexpr int kItemEnd = -1, kItemUnits = 0, kItemPages = 1;

// Offsets in dynamic shared memory, the same for launcher and kernel.
template <typename T>
struct DecodeShared {
  int ring, state, ml, item, q, plan, bars, total;
  OSCAR_HD constexpr DecodeShared(int stages, int heads, int batch)
      : ring(0),
        state(ring + T::kWarps * stages * T::kStageBytes),
        ml(state + T::kWarps * heads * T::kStateStride * 4),
        item((ml + T::kWarps * heads * 8 + 15) / 16 * 16),
        q(item + 2 * 64),
        plan(q + 2 * heads * T::kDim * 2),
        bars((plan + batch * 16 + 2 * (batch + 1) * 4 + 7) / 8 * 8),
        total(bars + (2 * T::kWarps * stages + kItemBars) * 8 + 16) {}

  // Barriers after those of the stages: item slots full and empty (two each), states full and
  // empty, and the end.
  static constexpr int kItemFull = 0, kItemEmpty = 2, kStateFull = 4, kStateEmpty = 5, kEnd = 6;
  static constexpr int kItemBars = 7;
  __device__ uint32_t Bar(uint32_t base, int stages, int index) const {
    return base + static_cast<uint32_t>(bars + (2 * T::kWarps * stages + index) * 8);
  }
  // Set by the merger at the end: the slot of the item whose (sequence, head) the whole block
  // merges, or -1.
  __device__ int64_t* LastSlot(uint8_t* shared, int stages) const {
    return reinterpret_cast<int64_t*>(shared + bars + (2 * T::kWarps * stages + kItemBars) * 8);
  }
};

// ---- the producer warp ----

template <typename T>
class DecodeProducer {
 public:
  __device__ DecodeProducer(const DecodeKernelParams& p, uint8_t* shared, const DecodeShared<T>& at,
                            int lane)
      : p_(p), shared_(shared), at_(at), lane_(lane), base_(SharedAddress(shared)) {}

  __device__ void Run() {
    WaitForPredecessor();
    Plan();
    int slot = 0;
    uint32_t slot_parity = 1;
    DecodeItem item;
    SequenceView sequence = Locate(blockIdx.x, &item);
    int id = PageId(item, sequence, lane_);
    uint32_t ticket = Ticket();  // of the item after this one; on its way while this one is filled
    while (true) {
      const uint32_t full = at_.Bar(base_, p_.stages, at_.kItemFull + slot);
      BarrierWait(at_.Bar(base_, p_.stages, at_.kItemEmpty + slot), slot_parity);
      if (lane_ == 0) {
        *reinterpret_cast<DecodeItem*>(shared_ + at_.item + slot * 64) = item;
        BarrierArrive(full);
      }
      __syncwarp();
      const uint32_t q_bytes =
          item.kind == kItemEnd ? 0u : static_cast<uint32_t>(item.heads * T::kDim * 2);
      const StageFill fill(full, q_bytes, lane_);
      if (item.kind != kItemEnd) {
        const int64_t head = (int64_t{item.row} * p_.num_kv_heads + item.kv_head) * p_.group_size +
                             item.head_block * T::kHeads;
        const int slot_bytes = min(p_.group_size, T::kHeads) * T::kDim * 2;
        fill.Copy(base_ + at_.q + slot * slot_bytes, p_.q + head * T::kDim, q_bytes);
      }
      fill.End();
      if (item.kind == kItemEnd) break;
      if (++slot == 2) slot = 0, slot_parity ^= 1;
      DecodeItem next;
      const SequenceView next_sequence =
          Locate(int64_t{gridDim.x} + __shfl_sync(~0u, ticket, 0), &next);
      const int next_id = PageId(next, next_sequence, lane_);
      ticket = Ticket();
      Fill(item, sequence, id);
      item = next;
      sequence = next_sequence;
      id = next_id;
    }
    // The last block to leave clears the queue for the next launch. The sum waits for this block's
    // last ticket, which would otherwise be free to arrive after the clearing.
    const uint32_t one = ticket == ~0u ? 2u : 1u;
    if (lane_ == 0 && atomicAdd(p_.queue + 1, one) == gridDim.x - 1) {
      p_.queue[0] = 0;
      p_.queue[1] = 0;
    }
  }

 private:
  __device__ uint32_t Ticket() const { return lane_ == 0 ? atomicAdd(p_.queue, 1u) : 0u; }

  // Exclusive prefix sums over the batch: window items, then history items, a (KV head, head
  // block).
  __device__ void Plan() {
    auto* views = reinterpret_cast<SequenceView*>(shared_ + at_.plan);
    int* windows = reinterpret_cast<int*>(views + p_.batch);
    int* splits = windows + p_.batch + 1;
    int window_sum = 0, split_sum = 0;
    for (int begin = 0; begin < p_.batch; begin += 32) {
      const int row = begin + lane_;
      DecodeItems n{0, 0, 0};
      if (row < p_.batch) {
        const SequenceView view = Load(row);
        views[row] = view;
        n = ItemsOf(view, p_.split_pages, p_.max_splits, T::kQuantised ? T::kWarps : 1);
      }
      int w = n.window, s = n.history;
      for (int step = 1; step < 32; step *= 2) {
        const int w_below = __shfl_up_sync(~0u, w, step), s_below = __shfl_up_sync(~0u, s, step);
        if (lane_ >= step) w += w_below, s += s_below;
      }
      if (row < p_.batch) {
        windows[row] = window_sum + w - n.window;
        splits[row] = split_sum + s - n.history;
      }
      window_sum += __shfl_sync(~0u, w, 31);
      split_sum += __shfl_sync(~0u, s, 31);
    }
    if (lane_ == 0) windows[p_.batch] = window_sum, splits[p_.batch] = split_sum;
    __syncwarp();
  }

  __device__ SequenceView Load(int row) const {
    const int4 v = __ldg(reinterpret_cast<const int4*>(p_.sequences) + row);
    SequenceView sequence;
    sequence.sink_tokens = v.x;
    sequence.history_pages = v.y;
    sequence.recent_tokens = v.z;
    sequence.table_row = v.w;
    return sequence;
  }

  __device__ SequenceView Locate(int64_t id, DecodeItem* item) const {
    const int per_split = p_.num_kv_heads * p_.head_blocks;
    const auto* views = reinterpret_cast<const SequenceView*>(shared_ + at_.plan);
    const int* prefix = reinterpret_cast<const int*>(views + p_.batch);
    int64_t at = id / per_split;
    const int head = static_cast<int>(id % per_split);
    item->kind = kItemUnits;
    if (at >= prefix[p_.batch]) {
      at -= prefix[p_.batch];
      prefix += p_.batch + 1;
      item->kind = kItemPages;
      if (at >= prefix[p_.batch]) {
        item->kind = kItemEnd;
        return {};
      }
    }
    int low = 0, high = p_.batch - 1;  // the last row whose prefix is <= at
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (prefix[middle] <= at) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const SequenceView sequence = views[low];
    const DecodeItems n =
        ItemsOf(sequence, p_.split_pages, p_.max_splits, T::kQuantised ? T::kWarps : 1);
    const int index = static_cast<int>(at) - prefix[low];
    item->row = low;
    item->kv_head = head / p_.head_blocks;
    item->head_block = head % p_.head_blocks;
    item->heads = min(T::kHeads, p_.group_size - item->head_block * T::kHeads);
    item->slots = n.window + n.history;
    item->sink_units = (sequence.sink_tokens + kUnitTokens - 1) / kUnitTokens;
    item->sink_tokens = sequence.sink_tokens;
    item->recent_tokens = sequence.recent_tokens;
    if (item->kind == kItemUnits) {
      const int units = item->sink_units + (sequence.recent_tokens + kUnitTokens - 1) / kUnitTokens;
      item->slot = index;
      item->first = index * kUnitsPerItem;
      item->count = min(kUnitsPerItem, units - item->first);
    } else {
      item->slot = n.window + index;
      item->first = index * n.split_pages;
      item->count = min(n.split_pages, sequence.history_pages - item->first);
      if (!T::kQuantised) {  // BF16 history is dealt in units, all of them full
        item->first *= kUnitsPerPage;
        item->count *= kUnitsPerPage;
        item->sink_units = item->first + item->count;
        item->sink_tokens = item->sink_units * kUnitTokens;
      }
    }
    return sequence;
  }

  __device__ uint32_t StageBar(int warp, int stage, int empty) const {
    return base_ + at_.bars + ((warp * p_.stages + stage) * 2 + empty) * 8;
  }
  __device__ uint32_t StageAddress(int warp, int stage) const {
    return base_ + at_.ring + (warp * p_.stages + stage) * T::kStageBytes;
  }

  // Id of the page that holds page or unit `index` of the item.
  __device__ __forceinline__ int PageId(const DecodeItem& item, const SequenceView& sequence,
                                        int index) const {
    if (item.kind == kItemEnd || index >= item.count) return 0;
    const CacheView& cache = p_.cache;
    const int64_t row = sequence.table_row;
    if (item.kind == kItemPages) {
      const int page = item.first + index;
      return __ldg(cache.history_table + row * cache.history_table_stride +
                   (T::kQuantised ? page : page / kUnitsPerPage));
    }
    const int unit = item.first + index;
    int entry = unit / kUnitsPerPage;
    if (unit >= item.sink_units) {
      const int ring_begin = sequence.sink_tokens / kPageTokens + sequence.history_pages;
      entry = cache.sink_pages +
              (ring_begin + (unit - item.sink_units) / kUnitsPerPage) % cache.ring_pages;
    }
    return __ldg(cache.window_table + row * cache.window_table_stride + entry);
  }

  // Deals page or unit i to consumer i % kWarps. Lane w fills the ring of consumer w, each at its
  // consumer's pace; id: that of the lane's first one, the next is always on its way. A page is one
  // stage, a unit two: 16 rows of K, then the same rows of V. Without bulk copies, where a whole
  // warp copies a block, the warp serves one ring after the other.
  __device__ void Fill(const DecodeItem& item, const SequenceView& sequence, int id) {
    const bool pages = T::kQuantised && item.kind == kItemPages;
    const int mine = lane_ < T::kWarps ? (item.count - lane_ + T::kWarps - 1) / T::kWarps : 0;
    const int fills = pages ? mine : 2 * mine;
    int next_id = PageId(item, sequence, lane_ + T::kWarps);
    int done = 0;
#if OSCAR_BULK_COPY
    while (__any_sync(~0u, done < fills)) {
      if (done >= fills || !BarrierTest(StageBar(lane_, stage_, 1), parity_ ^ 1u)) continue;
      FillStage(item, pages, id, lane_, stage_, done, 0);
      Advance(item, sequence, pages, &done, &id, &next_id);
    }
#else
    const int rounds = (item.count + T::kWarps - 1) / T::kWarps * (pages ? 1 : 2);
    for (int round = 0; round < rounds; ++round) {
      for (int warp = 0; warp < T::kWarps; ++warp) {
        if (__shfl_sync(~0u, fills, warp) <= round) continue;
        const int stage = __shfl_sync(~0u, stage_, warp);
        BarrierWait(StageBar(warp, stage, 1), __shfl_sync(~0u, parity_, warp) ^ 1u);
        FillStage(item, pages, __shfl_sync(~0u, id, warp), warp, stage, round, lane_);
        if (lane_ == warp) Advance(item, sequence, pages, &done, &id, &next_id);
        __syncwarp();
      }
    }
#endif
  }
  __device__ __forceinline__ void Advance(const DecodeItem& item, const SequenceView& sequence,
                                          bool pages, int* done, int* id, int* next_id) {
    ++*done;
    if (++stage_ == p_.stages) stage_ = 0, parity_ ^= 1;
    if (!pages && (*done & 1) != 0) return;  // V of the same unit is next
    *id = *next_id;
    *next_id = PageId(item, sequence, lane_ + ((pages ? *done : *done / 2) + 1) * T::kWarps);
  }
  // The `fill`th stage of this item for one consumer.
  __device__ __forceinline__ void FillStage(const DecodeItem& item, bool pages, int64_t id,
                                            int warp, int stage, int fill, int copy_lane) const {
    constexpr int kSideBytes = kPageTokens * T::kDim * 2;
    const CacheView& cache = p_.cache;
    const uint32_t target = StageAddress(warp, stage);
    if (pages) {
      const StageFill copy(StageBar(warp, stage, 0), T::kBlockBytes, copy_lane);
      copy.Copy(target,
                cache.history_pool + int64_t{item.kv_head} * T::kBlockBytes +
                    id * cache.history_page_stride,
                T::kBlockBytes);
      copy.End();
      return;
    }
    const bool is_window = item.kind == kItemUnits;
    const int unit = item.first + warp + fill / 2 * T::kWarps;
    const int part =
        (is_window && unit >= item.sink_units ? unit - item.sink_units : unit) % kUnitsPerPage;
    const std::byte* source = (is_window ? cache.window_pool + id * cache.window_page_stride
                                         : cache.history_pool + id * cache.history_page_stride) +
                              int64_t{item.kv_head} * (2 * kSideBytes) + (fill & 1) * kSideBytes +
                              part * (kUnitTokens * 128);
    const StageFill copy(StageBar(warp, stage, 0), T::kUnitBytes, copy_lane);
    for (int plane = 0; plane < T::kDim / 64; ++plane) {
      copy.Copy(target + plane * (kUnitTokens * 128), source + plane * (kPageTokens * 128),
                kUnitTokens * 128);
    }
    copy.End();
  }

  const DecodeKernelParams& p_;
  uint8_t* shared_;
  const DecodeShared<T>& at_;
  const int lane_;
  const uint32_t base_;
  int stage_ = 0;  // of the ring of consumer `lane`
  uint32_t parity_ = 0;
};

inline constexpr float kEmptyReference = -1e30f;

// ---- consumer warps ----

template <typename T>
class DecodeConsumer {
 public:
  __device__ DecodeConsumer(const DecodeKernelParams& p, uint8_t* shared, const DecodeShared<T>& at,
                            int warp, int lane)
      : p_(p),
        shared_(shared),
        at_(at),
        warp_(warp),
        lane_(lane),
        row_(lane >> 2),
        quad_(lane & 3),
        base_(SharedAddress(shared)) {}

  __device__ void Run() {
    int slot = 0;
    uint32_t parity = 0, state_parity = 0;
    while (true) {
      BarrierWait(at_.Bar(base_, p_.stages, at_.kItemFull + slot), parity);
      const DecodeItem& item = *reinterpret_cast<const DecodeItem*>(shared_ + at_.item + slot * 64);
      if (item.kind == kItemEnd) break;
      const bool pages = T::kQuantised && item.kind == kItemPages;
      LoadQ(item, slot, pages);
      Reset();
      if (pages) {
        if constexpr (T::kQuantised) {
          for (int i = warp_; i < item.count; i += T::kWarps) Page();
        }
      } else {
        for (int i = warp_; i < item.count; i += T::kWarps) Unit(ValidRows(item, item.first + i));
      }
      BarrierWait(at_.Bar(base_, p_.stages, at_.kStateEmpty), state_parity ^ 1u);
      state_parity ^= 1;
      WriteState(item, pages);
      BarrierArrive(at_.Bar(base_, p_.stages, at_.kStateFull));
      BarrierArrive(at_.Bar(base_, p_.stages, at_.kItemEmpty + slot));
      if (++slot == 2) slot = 0, parity ^= 1;
    }
  }

 private:
  static constexpr float kSlack = 4.0f;      // log2; how far the reference may lag
  static constexpr int kScaleExponent = 10;  // V scales are lifted to just below 2^11

  __device__ __forceinline__ uint32_t StageBar(int empty) const {
    return base_ + at_.bars + ((warp_ * p_.stages + stage_) * 2 + empty) * 8;
  }
  __device__ __forceinline__ int StageOffset() const {
    return at_.ring + (warp_ * p_.stages + stage_) * T::kStageBytes;
  }
  __device__ __forceinline__ void WaitStage() const { BarrierWait(StageBar(0), parity_); }
  __device__ __forceinline__ void ReleaseStage() {
    __syncwarp();
    if (lane_ == 0) BarrierArrive(StageBar(1));
    if (++stage_ == p_.stages) stage_ = 0, parity_ ^= 1;
  }

  __device__ static int ValidRows(const DecodeItem& item, int unit) {
    const int left = unit < item.sink_units
                         ? item.sink_tokens - unit * kUnitTokens
                         : item.recent_tokens - (unit - item.sink_units) * kUnitTokens;
    return min(left, kUnitTokens);
  }

  // B operand: column = head row_ of a block of 8, k = dims. For quantised pages fp16, times
  // 2^(4 - exponent of the k-step) and a power of two a head; for BF16 pages as it is.
  __device__ void LoadQ(const DecodeItem& item, int slot, bool pages) {
    const uint8_t* q = shared_ + at_.q + slot * min(p_.group_size, T::kHeads) * T::kDim * 2;
#pragma unroll
    for (int nb = 0; nb < T::kNB; ++nb) {
      const int head = nb * 8 + row_;
      const bool valid = head < item.heads;
      float largest = 0.0f;
      float sum[T::kGroups];
#pragma unroll
      for (int g = 0; g < T::kGroups; ++g) sum[g] = 0.0f;
#pragma unroll
      for (int s = 0; s < T::kSteps; ++s) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          uint32_t pair = 0;
          if (valid) {
            pair = *reinterpret_cast<const uint32_t*>(
                q + (head * T::kDim + s * 16 + quad_ * 2 + j * 8) * 2);
          }
          q_[nb][s][j] = pair;
          largest = fmaxf(largest, fmaxf(fabsf(Bf16Low(pair)), fabsf(Bf16High(pair))));
          sum[s / T::kStepsPerGroup] += Bf16Low(pair) + Bf16High(pair);
        }
      }
      float factor = p_.scale_log2;  // of column row_
      if (pages) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        const int exponent = largest > 0.0f ? ExponentOf(largest) - kScaleExponent : 0;
        const float down = Power2(-exponent);
#pragma unroll
        for (int s = 0; s < T::kSteps; ++s) {
          const float f = down * Power2(4 - T::Exponent(s));
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            q_[nb][s][j] = PackHalf(Bf16Low(q_[nb][s][j]) * f, Bf16High(q_[nb][s][j]) * f);
          }
        }
        factor *= Power2(20) * Power2(exponent);
#pragma unroll
        for (int g = 0; g < T::kGroups; ++g) {
          sum[g] += __shfl_xor_sync(~0u, sum[g], 1);
          sum[g] += __shfl_xor_sync(~0u, sum[g], 2);
          sum[g] *= Power2(-20) * down;
          q_sum_[nb][g][0] = __shfl_sync(~0u, sum[g], quad_ * 8);
          q_sum_[nb][g][1] = __shfl_sync(~0u, sum[g], quad_ * 8 + 4);
        }
      }
      factor_[nb][0] = __shfl_sync(~0u, factor, quad_ * 8);
      factor_[nb][1] = __shfl_sync(~0u, factor, quad_ * 8 + 4);
    }
  }

  __device__ static float Power2(int exponent) {
    return __uint_as_float(static_cast<uint32_t>(min(max(exponent + 127, 1), 254)) << 23);
  }
  __device__ static int ExponentOf(float positive) {
    return static_cast<int>(__float_as_uint(positive) >> 23) - 127;
  }

  __device__ void Reset() {
#pragma unroll
    for (int nb = 0; nb < T::kNB; ++nb) {
#pragma unroll
      for (int i = 0; i < T::kSteps; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) o_[nb][i][j] = 0.0f;
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        max_[nb][c] = kEmptyReference;
        reference_[nb][c] = kEmptyReference;
        l_[nb][c] = 0.0f;
#pragma unroll
        for (int g = 0; g < T::kGroups; ++g) z_[nb][g][c] = 0.0f;
      }
    }
    lift_ = 0;
    largest_scale_ = 0.0f;
  }

  __device__ static __forceinline__ float LaneMax(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
  }
  // Moves the reference to the new maximum. n: this lane's largest raw logits.
  __device__ __forceinline__ void Rescale(const float (&n)[T::kNB][2]) {
#pragma unroll
    for (int nb = 0; nb < T::kNB; ++nb) {
      float f[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        max_[nb][c] = fmaxf(max_[nb][c], LaneMax(n[nb][c]) * factor_[nb][c]);
        const float reference = max_[nb][c] - static_cast<float>(lift_);
        f[c] = Exp2(reference_[nb][c] - reference);
        reference_[nb][c] = reference;
        l_[nb][c] *= f[c];
#pragma unroll
        for (int g = 0; g < T::kGroups; ++g) z_[nb][g][c] *= f[c];
      }
#pragma unroll
      for (int i = 0; i < T::kSteps; ++i) {
        o_[nb][i][0] *= f[0];
        o_[nb][i][1] *= f[1];
        o_[nb][i][2] *= f[0];
        o_[nb][i][3] *= f[1];
      }
    }
  }

  // Code pairs at position `step` of a fragment word, as fp16 subnormals.
  template <int kStep>
  __device__ static __forceinline__ uint32_t Pick(uint32_t word, uint32_t shifted) {
    constexpr int kPos = kStep % T::kPerWord, kHalf = T::kPerWord / 2;
    constexpr uint32_t kMask = ((1u << T::kBits) - 1u) * 0x00010001u;
    return (kPos < kHalf ? word : shifted) & (kMask << (T::kBits * (kPos % kHalf)));
  }

  template <int kStep>
  __device__ static __forceinline__ void LoadWords(uint4& w, uint4& shifted, const uint8_t* codes,
                                                   int lane) {
    if constexpr (kStep % T::kPerWord == 0) {
      w = *reinterpret_cast<const uint4*>(codes + kStep / T::kPerWord * 512 + lane * 16);
      shifted = {w.x >> 8, w.y >> 8, w.z >> 8, w.w >> 8};
    }
  }

  // k-steps [kStep, kEnd) of tile kTile, all of one group.
  template <int kTile, int kStep, int kEnd>
  __device__ __forceinline__ void KeySteps(float (&c)[T::kNB][4], uint4& w, uint4& shifted,
                                           const uint8_t* codes) {
    if constexpr (kStep < kEnd) {
      constexpr int kSub = kStep / T::kSubSteps;
      constexpr int kWordStep = kTile * T::kSubSteps + kStep % T::kSubSteps;
      LoadWords<kWordStep>(w, shifted, codes + kSub * kSubBytes, lane_);
      const uint32_t a0 = Pick<kWordStep>(w.x, shifted.x), a1 = Pick<kWordStep>(w.z, shifted.z),
                     a2 = Pick<kWordStep>(w.y, shifted.y), a3 = Pick<kWordStep>(w.w, shifted.w);
#pragma unroll
      for (int nb = 0; nb < T::kNB; ++nb) {
        MmaFp16(c[nb], a0, a1, a2, a3, q_[nb][kStep][0], q_[nb][kStep][1]);
      }
      KeySteps<kTile, kStep + 1, kEnd>(c, w, shifted, codes);
    }
  }
  template <int kTile, int kGroup>
  __device__ __forceinline__ void KeyGroups(float (&s)[T::kNB][4], uint4& w, uint4& shifted,
                                            const uint8_t* block) {
    if constexpr (kGroup < T::kGroups) {
      float c[T::kNB][4] = {};
      KeySteps<kTile, kGroup * T::kStepsPerGroup, (kGroup + 1) * T::kStepsPerGroup>(
          c, w, shifted, block + T::kLayout.k_codes_offset());
      const uint2 meta = *reinterpret_cast<const uint2*>(block + T::kLayout.k_meta_offset() +
                                                         kGroup * PageLayout::kMetaPlaneBytes +
                                                         row_ * 32 + kTile * 8);
      const float2 a = HalfPair(meta.x), b = HalfPair(meta.y);
#pragma unroll
      for (int nb = 0; nb < T::kNB; ++nb) {
        const float q0 = q_sum_[nb][kGroup][0], q1 = q_sum_[nb][kGroup][1];
        if constexpr (kGroup == 0) {
          s[nb][0] = fmaf(c[nb][0], a.x, a.y * q0);
          s[nb][1] = fmaf(c[nb][1], a.x, a.y * q1);
          s[nb][2] = fmaf(c[nb][2], b.x, b.y * q0);
          s[nb][3] = fmaf(c[nb][3], b.x, b.y * q1);
        } else {
          s[nb][0] = fmaf(c[nb][0], a.x, fmaf(a.y, q0, s[nb][0]));
          s[nb][1] = fmaf(c[nb][1], a.x, fmaf(a.y, q1, s[nb][1]));
          s[nb][2] = fmaf(c[nb][2], b.x, fmaf(b.y, q0, s[nb][2]));
          s[nb][3] = fmaf(c[nb][3], b.x, fmaf(b.y, q1, s[nb][3]));
        }
      }
      KeyGroups<kTile, kGroup + 1>(s, w, shifted, block);
    }
  }
  template <int kTile>
  __device__ __forceinline__ void KeyTiles(float (&s)[4][T::kNB][4], uint4& w, uint4& shifted,
                                           const uint8_t* block) {
    if constexpr (kTile < 4) {
      KeyGroups<kTile, 0>(s[kTile], w, shifted, block);
      KeyTiles<kTile + 1>(s, w, shifted, block);
    }
  }

  template <int kTile, int kStep, int kEnd>
  __device__ __forceinline__ void ValueSteps(const uint32_t (&b)[T::kNB][2], uint4& w,
                                             uint4& shifted, const uint8_t* codes) {
    if constexpr (kStep < kEnd) {
      constexpr int kSub = kStep / T::kSubSteps;
      constexpr int kWordStep = kTile * T::kSubSteps + kStep % T::kSubSteps;
      LoadWords<kWordStep>(w, shifted, codes + kSub * kSubBytes, lane_);
      const uint32_t a0 = Pick<kWordStep>(w.x, shifted.x), a1 = Pick<kWordStep>(w.y, shifted.y),
                     a2 = Pick<kWordStep>(w.z, shifted.z), a3 = Pick<kWordStep>(w.w, shifted.w);
#pragma unroll
      for (int nb = 0; nb < T::kNB; ++nb) {
        MmaFp16(o_[nb][kStep], a0, a1, a2, a3, b[nb][0], b[nb][1]);
      }
      ValueSteps<kTile, kStep + 1, kEnd>(b, w, shifted, codes);
    }
  }
  template <int kTile, int kGroup>
  __device__ __forceinline__ void ValueGroups(const float (&p)[T::kNB][4], uint4& w, uint4& shifted,
                                              const uint8_t* block) {
    if constexpr (kGroup < T::kGroups) {
      const uint2 meta = *reinterpret_cast<const uint2*>(block + T::kLayout.v_meta_offset() +
                                                         kGroup * PageLayout::kMetaPlaneBytes +
                                                         row_ * 32 + kTile * 8);
      const float2 a = HalfPair(meta.x), d = HalfPair(meta.y);
      uint32_t b[T::kNB][2];
#pragma unroll
      for (int nb = 0; nb < T::kNB; ++nb) {
        z_[nb][kGroup][0] = fmaf(p[nb][0], a.y, fmaf(p[nb][2], d.y, z_[nb][kGroup][0]));
        z_[nb][kGroup][1] = fmaf(p[nb][1], a.y, fmaf(p[nb][3], d.y, z_[nb][kGroup][1]));
        b[nb][0] = Transpose8x8(PackHalf(p[nb][0] * a.x, p[nb][1] * a.x));
        b[nb][1] = Transpose8x8(PackHalf(p[nb][2] * d.x, p[nb][3] * d.x));
      }
      ValueSteps<kTile, kGroup * T::kStepsPerGroup, (kGroup + 1) * T::kStepsPerGroup>(
          b, w, shifted, block + T::kLayout.v_codes_offset());
      ValueGroups<kTile, kGroup + 1>(p, w, shifted, block);
    }
  }
  template <int kTile>
  __device__ __forceinline__ void ValueTiles(const float (&s)[4][T::kNB][4], uint4& w,
                                             uint4& shifted, const uint8_t* block) {
    if constexpr (kTile < 4) {
      float p[T::kNB][4];
#pragma unroll
      for (int nb = 0; nb < T::kNB; ++nb) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          p[nb][j] = Exp2(fmaf(s[kTile][nb][j], factor_[nb][j & 1], -reference_[nb][j & 1]));
        }
        l_[nb][0] += p[nb][0] + p[nb][2];
        l_[nb][1] += p[nb][1] + p[nb][3];
      }
      ValueGroups<kTile, 0>(p, w, shifted, block);
      ValueTiles<kTile + 1>(s, w, shifted, block);
    }
  }

  // The largest V scale of this lane's rows.
  __device__ __forceinline__ float LargestScale(const uint8_t* block) const {
    __half2 largest;
#pragma unroll
    for (int g = 0; g < T::kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 m =
            *reinterpret_cast<const uint4*>(block + T::kLayout.v_meta_offset() +
                                            g * PageLayout::kMetaPlaneBytes + row_ * 32 + i * 16);
        const __half2 x =
            __hmax2(__hmax2(AsHalf2(m.x), AsHalf2(m.y)), __hmax2(AsHalf2(m.z), AsHalf2(m.w)));
        largest = g == 0 && i == 0 ? x : __hmax2(largest, x);
      }
    }
    return __low2float(largest);
  }
  __device__ static __forceinline__ __half2 AsHalf2(uint32_t x) {
    return *reinterpret_cast<const __half2*>(&x);
  }

  // One page of 64 quantised tokens.
  __device__ __forceinline__ void Page() {
    WaitStage();
    const uint8_t* block = shared_ + StageOffset();
    float s[4][T::kNB][4];
    uint4 w, shifted;
    KeyTiles<0>(s, w, shifted, block);
    const float scale = LargestScale(block);
    bool moves = scale > largest_scale_;
    float n[T::kNB][2];
#pragma unroll
    for (int nb = 0; nb < T::kNB; ++nb) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        n[nb][c] =
            fmaxf(fmaxf(fmaxf(s[0][nb][c], s[0][nb][c + 2]), fmaxf(s[1][nb][c], s[1][nb][c + 2])),
                  fmaxf(fmaxf(s[2][nb][c], s[2][nb][c + 2]), fmaxf(s[3][nb][c], s[3][nb][c + 2])));
        moves = moves || n[nb][c] * factor_[nb][c] > max_[nb][c] + kSlack;
      }
    }
    if (__any_sync(~0u, moves)) {
      const float page_scale = LaneMax(scale);
      if (page_scale > largest_scale_) {
        const int exponent = max(ExponentOf(page_scale), -30);
        lift_ = kScaleExponent - exponent;
        largest_scale_ = Power2(exponent + 1);
      }
      Rescale(n);
    }
    ValueTiles<0>(s, w, shifted, block);
    ReleaseStage();
  }

  // 16 BF16 tokens, of which the first `valid` count.
  __device__ __forceinline__ void Unit(int valid) {
    WaitStage();
    const uint32_t keys = base_ + StageOffset();
    float s[T::kNB][4] = {};
#pragma unroll
    for (int step = 0; step < T::kSteps; ++step) {
      const int row = lane_ & 15, chunk = step % 4 * 2 + (lane_ >> 4);
      uint32_t a[4];
      LoadMatrix4(a,
                  keys + step / 4 * (kUnitTokens * 128) + row * 128 + ((chunk ^ (row & 7)) << 4));
#pragma unroll
      for (int nb = 0; nb < T::kNB; ++nb) {
        MmaBf16(s[nb], a[0], a[1], a[2], a[3], q_[nb][step][0], q_[nb][step][1]);
      }
    }
    ReleaseStage();
    float n[T::kNB][2];
    bool moves = false;
#pragma unroll
    for (int nb = 0; nb < T::kNB; ++nb) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (row_ >= valid) s[nb][c] = -INFINITY;
        if (row_ + 8 >= valid) s[nb][c + 2] = -INFINITY;
        n[nb][c] = fmaxf(s[nb][c], s[nb][c + 2]);
        moves = moves || n[nb][c] * factor_[nb][c] > max_[nb][c] + kSlack;
      }
    }
    if (__any_sync(~0u, moves)) Rescale(n);
    uint32_t high[T::kNB][2], low[T::kNB][2];  // P as a sum of two BF16
#pragma unroll
    for (int nb = 0; nb < T::kNB; ++nb) {
      float p[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        p[j] = Exp2(fmaf(s[nb][j], factor_[nb][j & 1], -reference_[nb][j & 1]));
      }
      l_[nb][0] += p[0] + p[2];
      l_[nb][1] += p[1] + p[3];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t h = PackBf16(p[2 * i], p[2 * i + 1]);
        high[nb][i] = Transpose8x8(h);
        low[nb][i] = Transpose8x8(PackBf16(p[2 * i] - Bf16Low(h), p[2 * i + 1] - Bf16High(h)));
      }
    }
    WaitStage();
    const uint32_t values = base_ + StageOffset();
    if (valid < kUnitTokens) ClearRows(valid);
#pragma unroll
    for (int step = 0; step < T::kSteps; ++step) {
      const int matrix = lane_ >> 3;
      const int row = (lane_ & 7) + (matrix >> 1) * 8, chunk = step % 4 * 2 + (matrix & 1);
      uint32_t a[4];
      LoadMatrix4Transposed(
          a, values + step / 4 * (kUnitTokens * 128) + row * 128 + ((chunk ^ (row & 7)) << 4));
#pragma unroll
      for (int nb = 0; nb < T::kNB; ++nb) {
        MmaBf16(o_[nb][step], a[0], a[1], a[2], a[3], high[nb][0], high[nb][1]);
        MmaBf16(o_[nb][step], a[0], a[1], a[2], a[3], low[nb][0], low[nb][1]);
      }
    }
    ReleaseStage();
  }

  // Rows beyond the sequence's end may hold anything, and 0 * NaN is NaN.
  __device__ void ClearRows(int valid) {
    uint8_t* rows = shared_ + StageOffset();
    for (int i = lane_; i < T::kDim / 64 * (kUnitTokens - valid) * 8; i += 32) {
      const int plane = i / ((kUnitTokens - valid) * 8), at = i % ((kUnitTokens - valid) * 8);
      *reinterpret_cast<uint4*>(rows + plane * (kUnitTokens * 128) + valid * 128 + at * 16) =
          uint4{0, 0, 0, 0};
    }
    ProxyFence();
    __syncwarp();
  }

  // Hands this warp's state to the merger.
  __device__ void WriteState(const DecodeItem& item, bool pages) {
    float* states = reinterpret_cast<float*>(shared_ + at_.state);
    float2* ml = reinterpret_cast<float2*>(shared_ + at_.ml);
#pragma unroll
    for (int nb = 0; nb < T::kNB; ++nb) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        l_[nb][c] = TokenSum(l_[nb][c]);
        if (pages) {
#pragma unroll
          for (int g = 0; g < T::kGroups; ++g) z_[nb][g][c] = TokenSum(z_[nb][g][c]);
        }
        const int head = nb * 8 + quad_ * 2 + c;
        if (head >= item.heads) continue;
        float* state = states + (warp_ * item.heads + head) * T::kStateStride;
#pragma unroll
        for (int i = 0; i < T::kSteps; ++i) {
          const float up = pages ? Power2(24 - T::Exponent(i)) : 1.0f;
          const float add = pages ? z_[nb][i / T::kStepsPerGroup][c] : 0.0f;
          state[i * 16 + row_] = fmaf(o_[nb][i][c], up, add);
          state[i * 16 + row_ + 8] = fmaf(o_[nb][i][c + 2], up, add);
        }
        if (row_ == 0) ml[warp_ * item.heads + head] = {reference_[nb][c], l_[nb][c]};
      }
    }
  }
  __device__ static __forceinline__ float TokenSum(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
  }

  static constexpr int kSubBytes = kPageTokens * (T::kSubSteps * 16) * T::kBits / 8;

  const DecodeKernelParams& p_;
  uint8_t* shared_;
  const DecodeShared<T>& at_;
  const int warp_, lane_, row_, quad_;  // row_: token or dim row of a fragment; quad_: its columns
  const uint32_t base_;
  int stage_ = 0;
  uint32_t parity_ = 0;

  uint32_t q_[T::kNB][T::kSteps][2];
  float q_sum_[T::kNB][T::kGroups][2];
  float factor_[T::kNB][2];  // raw logit -> log2 units, columns 2 quad_ + {0, 1}
  float o_[T::kNB][T::kSteps][4];
  float z_[T::kNB][T::kGroups][2];
  float l_[T::kNB][2], max_[T::kNB][2], reference_[T::kNB][2];
  int lift_;
  float largest_scale_;
};

// ---- the merger warp ----

// Merges the consumers' states of an item while they work on the next one. Writes the output, or a
// partial state that the last block to finish this (sequence, head) merges in slot order: windows
// first, then history by position.
template <typename T>
class DecodeMerger {
 public:
  __device__ DecodeMerger(const DecodeKernelParams& p, uint8_t* shared, const DecodeShared<T>& at,
                          int lane)
      : p_(p), shared_(shared), at_(at), lane_(lane), base_(SharedAddress(shared)) {}

  __device__ void Run() {
    int slot = 0;
    uint32_t parity = 0, state_parity = 0;
    int64_t last_slot = -1;
    BarrierWait(at_.Bar(base_, p_.stages, at_.kItemFull), 0);
    while (true) {
      const DecodeItem item = Item(slot);
      if (item.kind == kItemEnd) break;
      BarrierWait(at_.Bar(base_, p_.stages, at_.kStateFull), state_parity);
      state_parity ^= 1;
      Combine(item);
      BarrierArrive(at_.Bar(base_, p_.stages, at_.kStateEmpty));
      BarrierArrive(at_.Bar(base_, p_.stages, at_.kItemEmpty + slot));
      __syncwarp();  // before one lane releases the warp's partial state
      if (++slot == 2) slot = 0, parity ^= 1;
      const int64_t head = HeadIndex(p_, item);
      uint32_t is_last = 0;
      if (item.slots > 1 && lane_ == 0) is_last = Arrive(head, item.slots);
      is_last = __shfl_sync(~0u, is_last, 0);
      BarrierWait(at_.Bar(base_, p_.stages, at_.kItemFull + slot), parity);
      if (is_last == 0) continue;
      if (Item(slot).kind == kItemEnd) {
        last_slot = slot ^ 1;  // nothing else to do: the whole block merges
      } else {
        Merge(p_, item, lane_, 32);
      }
    }
    if (lane_ == 0) {
      *at_.LastSlot(shared_, p_.stages) = last_slot;
      BarrierArrive(at_.Bar(base_, p_.stages, at_.kEnd));
    }
  }

  // Merges the partial states of one (sequence, head) with `threads` threads.
  __device__ static __forceinline__ void Merge(const DecodeKernelParams& p, const DecodeItem& item,
                                               int thread, int threads) {
    constexpr int kBatch = 12;
    const int64_t head_index = HeadIndex(p, item);
    for (int i = thread; i < item.heads * kColumns; i += threads) {
      const int head = i / kColumns, column = i % kColumns;
      float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
      float reference = kEmptyReference, l = 0.0f;
      for (int begin = 0; begin < item.slots; begin += kBatch) {
        float4 o[kBatch];
        float2 ml[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const int64_t at =
              (head_index * p.slots + min(begin + k, item.slots - 1)) * T::kHeads + head;
          ml[k] = __ldcg(p.partial_ml + at);
          o[k] = __ldcg(reinterpret_cast<const float4*>(p.partial_o + at * T::kDim) + column);
        }
        float next = reference;
#pragma unroll
        for (int k = 0; k < kBatch; ++k) next = fmaxf(next, ml[k].x);
        const float old = Exp2(reference - next);
        sum = {sum.x * old, sum.y * old, sum.z * old, sum.w * old};
        l *= old;
        reference = next;
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const float f = begin + k < item.slots ? Exp2(ml[k].x - next) : 0.0f;
          Accumulate(sum, o[k], f);
          l = fmaf(ml[k].y, f, l);
        }
      }
      Store(p, item, head, column, sum, l);
    }
  }

 private:
  static constexpr int kColumns = T::kDim / 4;  // of float4

  __device__ const DecodeItem& Item(int slot) const {
    return *reinterpret_cast<const DecodeItem*>(shared_ + at_.item + slot * 64);
  }
  __device__ static int64_t HeadIndex(const DecodeKernelParams& p, const DecodeItem& item) {
    return (int64_t{item.row} * p.num_kv_heads + item.kv_head) * p.head_blocks + item.head_block;
  }
  __device__ static __forceinline__ void Accumulate(float4& sum, const float4& o, float f) {
    sum.x = fmaf(o.x, f, sum.x);
    sum.y = fmaf(o.y, f, sum.y);
    sum.z = fmaf(o.z, f, sum.z);
    sum.w = fmaf(o.w, f, sum.w);
  }

  __device__ void Combine(const DecodeItem& item) const {
    const float* states = reinterpret_cast<const float*>(shared_ + at_.state);
    const float2* ml = reinterpret_cast<const float2*>(shared_ + at_.ml);
    const int64_t partial = (HeadIndex(p_, item) * p_.slots + item.slot) * T::kHeads;
    for (int i = lane_; i < item.heads * kColumns; i += 32) {
      const int head = i / kColumns, column = i % kColumns;
      float2 of_warp[T::kWarps];
      float reference = kEmptyReference, l = 0.0f;
#pragma unroll
      for (int w = 0; w < T::kWarps; ++w) {
        of_warp[w] = ml[w * item.heads + head];
        reference = fmaxf(reference, of_warp[w].x);
      }
      float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int w = 0; w < T::kWarps; ++w) {
        const float f = Exp2(of_warp[w].x - reference);
        Accumulate(sum,
                   *reinterpret_cast<const float4*>(
                       states + (w * item.heads + head) * T::kStateStride + column * 4),
                   f);
        l = fmaf(of_warp[w].y, f, l);
      }
      if (item.slots == 1) {
        Store(p_, item, head, column, sum, l);
      } else {
        __stcg(reinterpret_cast<float4*>(p_.partial_o + (partial + head) * T::kDim) + column, sum);
        if (column == 0) __stcg(p_.partial_ml + partial + head, float2{reference, l});
      }
    }
  }

  // Counts this block's slot in; 1 for the last one. Releases the warp's partial state (ordered by
  // the __syncwarp before it) and acquires everybody else's.
  __device__ uint32_t Arrive(int64_t head_index, int slots) const {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(p_.arrived + head_index)
                 : "memory");
    if (before != static_cast<uint32_t>(slots - 1)) return 0;
    p_.arrived[head_index] = 0;
    return 1;
  }

  __device__ static __forceinline__ void Store(const DecodeKernelParams& p, const DecodeItem& item,
                                               int head, int column, float4 sum, float l) {
    const float f = l > 0.0f ? 1.0f / l : 0.0f;
    const int64_t row = (int64_t{item.row} * p.num_kv_heads + item.kv_head) * p.group_size +
                        item.head_block * T::kHeads + head;
    const int64_t at = row * T::kDim + column * 4;
    if (p.out_fp32) {
      *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = {sum.x * f, sum.y * f,
                                                                     sum.z * f, sum.w * f};
    } else {
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + at) = {
          PackBf16(sum.x * f, sum.y * f), PackBf16(sum.z * f, sum.w * f)};
    }
  }

  const DecodeKernelParams& p_;
  uint8_t* shared_;
  const DecodeShared<T>& at_;
  const int lane_;
  const uint32_t base_;
};

template <typename T>
__global__ void __maxnreg__(T::kRegisters)
    DecodeAttentionKernel(const __grid_constant__ DecodeKernelParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  const DecodeShared<T> at(p.stages, min(p.group_size, T::kHeads), p.batch);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    const uint32_t bars = SharedAddress(shared + at.bars);
    for (int i = 0; i < T::kWarps * p.stages; ++i) {
      BarrierInit(bars + i * 16, FullArrivals());
      BarrierInit(bars + i * 16 + 8, 1);
    }
    const uint32_t items = bars + 2 * T::kWarps * p.stages * 8;
    for (int i = 0; i < 2; ++i) {
      BarrierInit(items + (at.kItemFull + i) * 8, FullArrivals() + 1);
      BarrierInit(items + (at.kItemEmpty + i) * 8, (T::kWarps + 1) * 32);
    }
    BarrierInit(items + at.kStateFull * 8, T::kWarps * 32);
    BarrierInit(items + at.kStateEmpty * 8, 32);
    BarrierInit(items + at.kEnd * 8, 1);
    BarrierInitFence();
  }
  LetSuccessorStart();
  __syncthreads();
  if (warp == T::kWarps) {
    DecodeProducer<T>(p, shared, at, lane).Run();
    return;
  }
  if (warp == T::kWarps + 1) {
    DecodeMerger<T>(p, shared, at, lane).Run();
  } else {
    DecodeConsumer<T>(p, shared, at, warp, lane).Run();
  }
  // Everybody but the producer merges what only this block is left to merge.
  BarrierWait(at.Bar(SharedAddress(shared), p.stages, at.kEnd), 0);
  const int64_t slot = *at.LastSlot(shared, p.stages);
  if (slot >= 0) {
    const DecodeItem item = *reinterpret_cast<const DecodeItem*>(shared + at.item + slot * 64);
    const int helper = warp < T::kWarps ? warp : T::kWarps;
    DecodeMerger<T>::Merge(p, item, helper * 32 + lane, (T::kWarps + 1) * 32);
  }
}

}  // namespace oscar::cuda
