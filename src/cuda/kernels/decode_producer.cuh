// The decode kernel's producer warp: lays out the plan, takes items, keeps every consumer's ring of
// stages full. Device only; decode_attention.cuh describes the whole.
#pragma once

#include "cuda/kernels/decode_traits.cuh"

namespace oscar::cuda {

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
    item.first_warp = 0;
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
      next.first_warp = (item.first_warp + item.count) % T::kWarps;
      const int next_id = PageId(next, next_sequence, T::Rank(lane_, next.first_warp));
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
    const int* windows = reinterpret_cast<const int*>(views + p_.batch);
    const int* prefix = windows + p_.batch + 1;
    int64_t at = id / per_split;
    const int head = static_cast<int>(id % per_split);
    item->kind = kItemPages;
    if (at >= prefix[p_.batch]) {
      at -= prefix[p_.batch];
      prefix = windows;
      item->kind = kItemUnits;
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
    const int rank = T::Rank(lane_, item.first_warp);
    const int mine = lane_ < T::kWarps ? (item.count - rank + T::kWarps - 1) / T::kWarps : 0;
    const int fills = pages ? mine : 2 * mine;
    int next_id = PageId(item, sequence, rank + T::kWarps);
    int done = 0;
#if OSCAR_BULK_COPY
    while (__any_sync(~0u, done < fills)) {
      const bool ready = done < fills && BarrierTest(StageBar(lane_, stage_, 1), parity_ ^ 1u);
#ifdef OSCAR_RACECHECK
      for (uint32_t left = __ballot_sync(~0u, ready); left != 0; left &= left - 1) {
        __syncwarp();
        if (lane_ != __ffs(static_cast<int>(left)) - 1) continue;
        FillStage(item, pages, id, lane_, stage_, done, 0);
        Advance(item, sequence, pages, &done, &id, &next_id);
      }
#else
      if (!ready) continue;
      FillStage(item, pages, id, lane_, stage_, done, 0);
      Advance(item, sequence, pages, &done, &id, &next_id);
#endif
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
    *next_id =
        PageId(item, sequence,
               T::Rank(lane_, item.first_warp) + ((pages ? *done : *done / 2) + 1) * T::kWarps);
  }
  // The `fill`th stage of this item for one consumer.
  __device__ __forceinline__ void FillStage(const DecodeItem& item, bool pages, int64_t id,
                                            int warp, int stage, int fill, int copy_lane) const {
    constexpr int kSideBytes = kPageTokens * T::kDim * 2;
    const CacheView& cache = p_.cache;
    const uint32_t target = StageAddress(warp, stage);
    if (pages) {
      const StageFill copy(StageBar(warp, stage, 0), T::kBlockBytes, copy_lane);
      copy.CopyOnce(target,
                    cache.history_pool + int64_t{item.kv_head} * T::kBlockBytes +
                        id * cache.history_page_stride,
                    T::kBlockBytes);
      copy.End();
      return;
    }
    const bool is_window = item.kind == kItemUnits;
    const int unit = item.first + T::Rank(warp, item.first_warp) + fill / 2 * T::kWarps;
    const int part =
        (is_window && unit >= item.sink_units ? unit - item.sink_units : unit) % kUnitsPerPage;
    const std::byte* source = (is_window ? cache.window_pool + id * cache.window_page_stride
                                         : cache.history_pool + id * cache.history_page_stride) +
                              int64_t{item.kv_head} * (2 * kSideBytes) + (fill & 1) * kSideBytes +
                              part * (kUnitTokens * 128);
    const StageFill copy(StageBar(warp, stage, 0), T::kUnitBytes, copy_lane);
    for (int plane = 0; plane < T::kDim / 64; ++plane) {
      copy.CopyOnce(target + plane * (kUnitTokens * 128), source + plane * (kPageTokens * 128),
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

}  // namespace oscar::cuda
