// What every consumer warp of the decode kernel does: walk the items, keep its ring of stages full,
// read it. Device only; decode_attention.cuh describes the whole.
//
// A warp copies for itself, as soon as it has read a stage: its copies run `stages` ahead of its
// arithmetic, into the next item where this one ends. Where heads differ in bits, the ring's bytes
// are cut into as many stages as an item's blocks allow, anew where the next item's are of another
// size: three stages of 2 bits, two of 4. A producer warp for all rings was slower (the way from a
// released stage to the next copy and back lies on every page's path).
#pragma once

#include "cuda/attention/decode_traits.cuh"

namespace oscar::cuda {

template <typename T>
class DecodeRing {
 protected:
  __device__ DecodeRing(const typename T::Params& p, uint8_t* shared, const DecodeShared<T>& at,
                        int warp, int lane)
      : p_(p),
        shared_(shared),
        at_(at),
        warp_(warp),
        lane_(lane),
        row_(lane >> 2),
        quad_(lane & 3),
        base_(SharedAddress(shared)) {}

  // Calls consume(item, q, rank) for every item: q, its query (DecodeShared::QueryBytes); rank,
  // this warp's place among those that its pages are dealt to. `consume` ends by writing the state
  // of that rank, after WaitForState().
  template <typename Consume>
  __device__ __forceinline__ void ForEachItem(Consume consume) {
    free_stages_ = p_.stages;
    if constexpr (T::kMixed) cut_ = {p_.stages, 0};
    if constexpr (T::kPacked) {
      // Pages of the history may be copied before the predecessor ends, rows of the windows not.
      BarrierWait(at_.Bar(base_, p_.stages, at_.kItemFull), 0);
      if (at_.Item(shared_, 0)->kind == kItemPages) BeginCopies();
    }
    WaitForPredecessor();
    int slot = 0;
    uint32_t parity = 0;
    const int q_bytes = at_.QueryBytes(min(p_.group_size, T::kHeads));
    while (true) {
      BarrierWait(at_.Bar(base_, p_.stages, at_.kItemFull + slot), parity);
      const DecodeItem& item = *at_.Item(shared_, slot);
      if (item.kind == kItemEnd) break;
      BeginCopies();
      if constexpr (T::kPacked) {
        BarrierWait(at_.Bar(base_, p_.stages, at_.kQueryFull + slot), parity);
      }
      consume(item, shared_ + at_.q + slot * q_bytes, T::Rank(warp_, item.first_warp));
      BarrierArrive(at_.Bar(base_, p_.stages, at_.kStateFull));
      BarrierArrive(at_.Bar(base_, p_.stages, at_.kItemEmpty + slot));
      if (++slot == 2) slot = 0, parity ^= 1;
    }
  }
  // Until the merger has read the states of the item before.
  __device__ __forceinline__ void WaitForState() {
    state_parity_ ^= 1;
    BarrierWait(at_.Bar(base_, p_.stages, at_.kStateEmpty), state_parity_);
  }

  __device__ __forceinline__ int StageOffset() const { return StageOffset(stage_); }
  __device__ __forceinline__ void WaitStage() const {
    // parity_: of all stages, or, where their number changes, a bit of each.
    BarrierWait(StageBar(stage_), T::kMixed ? parity_ >> stage_ & 1u : parity_);
  }
  // This warp has read the stage: the next copy goes there.
  __device__ __forceinline__ void ReleaseStage() {
    const int stage = stage_;
    __syncwarp();
    if constexpr (T::kMixed) {
      parity_ ^= 1u << stage;
      if (++stage_ == cut_.stages) stage_ = 0;
    } else {
      if (++stage_ == p_.stages) stage_ = 0, parity_ ^= 1;
    }
    if (page_copies_ > 0) {
      CopyPage(stage);
    } else {
      ++free_stages_;
      BeginCopies();
    }
  }

  // Loads the id of the page that ReleaseStage() will copy; call it as long before as possible, and
  // in the same iteration: the compiler lets no load cross the end of a loop.
  __device__ __forceinline__ void LoadId() {
    asm volatile("{ .reg .pred p; setp.gt.s32 p, %2, 0; @p ld.global.nc.s32 %0, [%1]; }"
                 : "+r"(id_)
                 : "l"(p_.cache.history_table + entry_), "r"(page_copies_));
    if constexpr (T::kForms) {  // of the page it was sealed with
      asm volatile("{ .reg .pred p; setp.gt.s32 p, %2, 0; @p ld.global.nc.s32 %0, [%1]; }"
                   : "+r"(mate_id_)
                   : "l"(p_.cache.history_table + mate_entry_), "r"(page_copies_));
    }
  }

  // Shared-memory address of this lane's row of ldmatrix.x4: 16 rows of dims [16 step, + 16).
  __device__ __forceinline__ uint32_t KeyRow(int step) const {
    return BrickRow(lane_ & 15, step, lane_ >> 4);
  }
  __device__ __forceinline__ uint32_t ValueRow(int step) const {
    return BrickRow((lane_ & 7) + (lane_ >> 4) * 8, step, (lane_ >> 3) & 1);
  }
  __device__ static int ValidRows(const DecodeItem& item, int unit) {
    const int left = unit < item.sink_units
                         ? item.sink_tokens - unit * kUnitTokens
                         : item.recent_tokens - (unit - item.sink_units) * kUnitTokens;
    return min(left, kUnitTokens);
  }
  // Rows of the unit before the sliding window.
  __device__ int SkippedRows(const DecodeItem& item, int unit) const {
    if (p_.sliding_window == 0 || item.kind != kItemUnits) return 0;
    const int recent_begin = item.ring_begin * kPageTokens;
    const int length =
        item.recent_tokens > 0 ? recent_begin + item.recent_tokens : item.sink_tokens;
    const int position = unit < item.sink_units
                             ? unit * kUnitTokens
                             : recent_begin + (unit - item.sink_units) * kUnitTokens;
    return length - p_.sliding_window - position;
  }
  // Rows beyond the sequence's end may hold anything, and 0 * NaN is NaN.
  __device__ __forceinline__ void ClearRows(int valid) {
    uint8_t* rows = shared_ + StageOffset();
    for (int i = lane_; i < T::kDim / 64 * (kUnitTokens - valid) * 8; i += 32) {
      const int plane = i / ((kUnitTokens - valid) * 8), at = i % ((kUnitTokens - valid) * 8);
      *reinterpret_cast<uint4*>(rows + plane * (kUnitTokens * 128) + valid * 128 + at * 16) =
          uint4{0, 0, 0, 0};
    }
    ProxyFence();
    __syncwarp();
  }

  __device__ static int ExponentOf(float positive) {
    return static_cast<int>(__float_as_uint(positive) >> 23) - 127;
  }
  // Over the lanes of one column pair, that is over a fragment's eight token rows.
  __device__ static __forceinline__ float TokenMax(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
  }
  __device__ static __forceinline__ float TokenSum(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
  }

  const typename T::Params& p_;
  uint8_t* shared_;
  const DecodeShared<T>& at_;
  const int warp_, lane_, row_, quad_;  // row_: token or dim row of a fragment; quad_: its columns
  const uint32_t base_;

 private:
  // 64-dim planes of 128-byte rows, 16-byte chunks swizzled by the row.
  __device__ __forceinline__ uint32_t BrickRow(int row, int step, int half) const {
    const int chunk = step % 4 * 2 + half;
    return base_ + StageOffset() + step / 4 * (kUnitTokens * 128) + row * 128 +
           ((chunk ^ (row & 7)) << 4);
  }

  __device__ __forceinline__ uint32_t StageBar(int stage) const {
    return base_ + at_.bars + (warp_ * p_.stages + stage) * 8;
  }
  __device__ __forceinline__ int StageOffset(int stage) const {
    if constexpr (T::kMixed) {
      return at_.ring + warp_ * p_.stages * T::StageBytes(p_) + stage * cut_.bytes;
    }
    return at_.ring + (warp_ * p_.stages + stage) * T::StageBytes(p_);
  }
  __device__ __forceinline__ int NumStages() const { return T::kMixed ? cut_.stages : p_.stages; }
  // Cuts the ring into stages of so many bytes; false as long as stages of other sizes are in use.
  __device__ __forceinline__ bool CutRing(int bytes) {
    if (bytes == cut_.bytes) return true;
    if (free_stages_ != cut_.stages) return false;
    const int all = p_.stages * T::StageBytes(p_);
    cut_ = {1, bytes};
    while (cut_.stages < p_.stages && (cut_.stages + 1) * bytes <= all) ++cut_.stages;
    free_stages_ = cut_.stages;
    stage_ = 0;
    return true;
  }

  // ---- copies: page or unit i of an item belongs to the warp of rank i % kWarps ----

  // The next page, into a stage that nobody reads. On the path of every page, hence so bare.
  __device__ __forceinline__ void CopyPage(int stage) {
    if constexpr (T::kForms) {
      CopyForm(stage);
      return;
    }
    const uint64_t page =
        uint64_t{static_cast<uint32_t>(id_)} * static_cast<uint32_t>(p_.cache.history_page_stride);
    const uint32_t bytes = T::kMixed ? static_cast<uint32_t>(unit_) : T::kBlockBytes;
    const StageFill copy(StageBar(stage), bytes, lane_);
    copy.CopyOnce(base_ + static_cast<uint32_t>(StageOffset(stage)),
                  p_.cache.history_pool + (page + head_offset_), bytes);
    copy.End();
    --page_copies_;
    entry_ += T::kWarps;
  }
  // The same of a block whose keys are not rows: with it comes what lies elsewhere.
  __device__ __forceinline__ void CopyForm(int stage) {
    const auto& at = p_.at;
    const auto stride = static_cast<uint32_t>(p_.cache.history_page_stride);
    const std::byte* page = p_.cache.history_pool + uint64_t{static_cast<uint32_t>(id_)} * stride;
    const std::byte* mate =
        p_.cache.history_pool + uint64_t{static_cast<uint32_t>(mate_id_)} * stride;
    const uint32_t target = base_ + static_cast<uint32_t>(StageOffset(stage));
    const StageFill copy(StageBar(stage), at.copied_bytes, lane_);
    copy.CopyOnce(target, page + head_offset_, at.block_bytes);
    if (at.mate_bytes != 0) {
      copy.Copy(target + at.mate, mate + head_offset_ + at.k_meta, at.mate_bytes);
    }
    if (at.norm_bytes != 0) {  // all heads read them
      copy.Copy(target + at.norms_over_heads, page + p_.form.norm_offset, at.norm_bytes);
    }
    copy.End();
    --page_copies_;
    entry_ += T::kWarps;
    mate_entry_ += T::kWarps;
  }
  // Fills free stages as far as items are known. Never waits: the next item may need this warp's
  // own arrival on one before it. Pages are left to copy only if no stage is free.
  __device__ __forceinline__ void BeginCopies() {
    while (free_stages_ > 0) {
      LoadId();
      if (page_copies_ == 0 && unit_copies_ == 0 && !OpenNextItem()) return;
      int stage = stage_ - free_stages_;  // the oldest of the free ones, which end before stage_
      if (stage < 0) stage += NumStages();
      --free_stages_;
      if (T::kQuantised && page_copies_ > 0) {
        CopyPage(stage);
      } else {
        CopyUnit(*at_.Item(shared_, (items_opened_ - 1) & 1), stage);
      }
    }
  }
  // The next item that has copies for this warp; false if it is not known yet, or at the end.
  __device__ __forceinline__ bool OpenNextItem() {
    while (true) {
      const int slot = items_opened_ & 1;
      const bool known = BarrierTest(at_.Bar(base_, p_.stages, at_.kItemFull + slot),
                                     static_cast<uint32_t>(items_opened_ >> 1) & 1u);
      if (!__all_sync(~0u, known)) return false;
      const DecodeItem& item = *at_.Item(shared_, slot);
      if (item.kind == kItemEnd) return false;
      if constexpr (T::kMixed) {
        // Units go where the smallest blocks do.
        uint32_t bytes = p_.split.smallest * MixedSplit::kUnitBytes;
        if (item.kind == kItemPages) {
          bytes = p_.heads[item.kv_head].Layout(T::kDim, T::kGroup).block_bytes();
        }
        if (!CutRing(max(static_cast<int>(bytes), T::kUnitBytes))) return false;
      }
      ++items_opened_;
      const int rank = T::Rank(warp_, item.first_warp);
      const int copies = (item.count - rank + T::kWarps - 1) / T::kWarps;
      id_ = *at_.FirstIds(shared_, slot, rank);
      next_id_ = *at_.FirstIds(shared_, slot, rank + T::kWarps);
      if (T::kQuantised && item.kind == kItemPages) {
        page_copies_ = copies;
        if constexpr (T::kMixed) {
          const HeadBlock head = p_.heads[item.kv_head];
          head_offset_ = head.offset;
          unit_ = static_cast<int>(head.Layout(T::kDim, T::kGroup).block_bytes());
        } else if constexpr (T::kForms) {
          head_offset_ = static_cast<uint32_t>(item.kv_head) * p_.at.block_bytes;
        } else {
          head_offset_ = static_cast<uint32_t>(item.kv_head * T::kBlockBytes);
        }
        entry_ = static_cast<uint32_t>(item.table_row * p_.cache.history_table_stride + item.first +
                                       rank);
        if constexpr (T::kForms) {
          static_assert(T::kWarps % 2 == 0);  // a warp's pages are all the first of a pair, or not
          mate_entry_ = entry_;
          if (p_.at.mate_bytes != 0) mate_entry_ += ((item.first + rank) & 1) == 0 ? 1 : -1;
          if (copies > 0) mate_id_ = __ldg(p_.cache.history_table + mate_entry_);
        }
      } else {
        unit_copies_ = 2 * copies;
        unit_ = rank;
      }
      if (copies > 0) return true;
    }
  }
  // A unit takes two stages: 16 rows of K, then those of V.
  __device__ __forceinline__ void CopyUnit(const DecodeItem& item, int stage) {
    constexpr BlockLayout kLayout(BlockKind::kBf16, CodeOrder::kTensorCore, T::kDim, T::kDim);
    constexpr int kSideBytes = static_cast<int>(kLayout.code_bytes());
    constexpr int kRowsBytes = kUnitTokens * BlockLayout::kBf16RowBytes;
    const CacheView& cache = p_.cache;
    const bool is_window = item.kind == kItemUnits, is_v = (unit_copies_ & 1) != 0;
    const int unit = item.first + unit_;
    const int part =
        (is_window && unit >= item.sink_units ? unit - item.sink_units : unit) % kUnitsPerPage;
    const std::byte* source = (is_window ? cache.window_pool + id_ * cache.window_page_stride
                                         : cache.history_pool + id_ * cache.history_page_stride) +
                              int64_t{item.kv_head} * (2 * kSideBytes) + (is_v ? kSideBytes : 0) +
                              part * kRowsBytes;
    const uint32_t target = base_ + static_cast<uint32_t>(StageOffset(stage));
    const StageFill copy(StageBar(stage), T::kUnitBytes, lane_);
    for (int plane = 0; plane < T::kDim / BlockLayout::kBf16PlaneDims; ++plane) {
      copy.CopyOnce(target + plane * kRowsBytes, source + plane * BlockLayout::kBf16PlaneBytes,
                    kRowsBytes);
    }
    copy.End();
    --unit_copies_;
    if (!is_v) return;
    id_ = next_id_;
    unit_ += T::kWarps;
    if (unit_copies_ > 2) next_id_ = item.PageId<T>(cache, unit_ + T::kWarps);
  }

  int stage_ = 0;  // the next to be read
  uint32_t parity_ = 0, state_parity_ = 0;
  int free_stages_ = 0, items_opened_ = 0;
  int page_copies_ = 0, unit_copies_ = 0;  // left of the item opened last
  int id_ = 0, next_id_ = 0;               // page of the next copy; of the unit after it
  uint32_t head_offset_ = 0, entry_ = 0;   // bytes in a page; where the next page's id is
  int unit_ = 0;                           // of pages whose heads differ in bits: bytes of a block
  struct Cut {
    int stages, bytes;
  };
  Cut cut_;                  // of the ring, where heads differ in bits
  int mate_id_ = 0;          // of keys that are not rows: the page sealed with the next one
  uint32_t mate_entry_ = 0;  // where its id is
};

}  // namespace oscar::cuda
