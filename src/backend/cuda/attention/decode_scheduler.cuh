// The decode kernel's scheduler warp: lays out the plan, takes items one ahead of the consumers
// and hands each out with its Q and the ids of its first pages. Device only; decode_attention.cuh
// describes the whole.
#pragma once

#include "cuda/attention/decode_query_packed.cuh"
#include "cuda/attention/decode_traits.cuh"
#include "quant/turboquant.h"

namespace oscar::cuda {

template <typename T>
class DecodeScheduler {
 public:
  // What the full barrier of an item slot expects.
  __device__ static uint32_t ItemArrivals() { return T::kPacked ? 32u : FullArrivals() + 1; }

  __device__ DecodeScheduler(const typename T::Params& p, uint8_t* shared,
                             const DecodeShared<T>& at, int lane)
      : p_(p), shared_(shared), at_(at), lane_(lane), base_(SharedAddress(shared)) {}

  __device__ void Run() {
    // Lengths, tables and history are not the predecessor's work (DecodeArguments): the first item
    // is found, and where queries do not come with it, its pages are on their way before that ends.
    Plan();
    int slot = 0;
    uint32_t slot_parity = 1;
    int first_warp = 0;
    DecodeItem item = Locate(blockIdx.x);
    bool waited = false;
    [[maybe_unused]] bool second = true;
    if constexpr (!T::kPacked) WaitForPredecessor();
    while (true) {
      item.first_warp = first_warp;
      const int id = FirstId(item, lane_);
      const uint32_t full = at_.Bar(base_, p_.stages, at_.kItemFull + slot);
      BarrierWait(at_.Bar(base_, p_.stages, at_.kItemEmpty + slot), slot_parity);
      uint8_t* query = shared_ + at_.q + slot * at_.QueryBytes(min(p_.group_size, T::kHeads));
      [[maybe_unused]] typename DecodeQueryPacked<T>::Rows rows;
      if constexpr (T::kPacked) {
        // Before the ids are used, so that both loads are on their way at once.
        if (waited) LoadQuery(item, rows);
      }
      if (lane_ < 2 * T::kWarps) *at_.FirstIds(shared_, slot, lane_) = id;
      if (lane_ == 0) *at_.Item(shared_, slot) = item;
      if constexpr (T::kPacked) {
        BarrierArrive(full);  // copies may begin
        if (!waited) {
          WaitForPredecessor();
          waited = true;
          LoadQuery(item, rows);
        }
        if (item.kind == kItemPages) {
          BlockKind keys = T::kKind;
          if constexpr (T::kMixed) keys = p_.heads[item.kv_head].k;
          if constexpr (T::kForms) {
            WriteForForms(rows, query);
          } else {
            DecodeQueryPacked<T>::WriteForPages(rows, keys, p_.scale_log2, query, lane_);
          }
        } else if (item.kind == kItemUnits) {
          DecodeQueryPacked<T>::WriteForWindows(rows, query, lane_);
        }
        BarrierArrive(at_.Bar(base_, p_.stages, at_.kQueryFull + slot));
      } else {
        __syncwarp();
        if (lane_ == 0) BarrierArrive(full);
        const uint32_t bytes =
            item.kind == kItemEnd ? 0u : static_cast<uint32_t>(item.heads * T::kDim * 2);
        const StageFill fill(full, bytes, lane_);
        if (item.kind != kItemEnd) fill.Copy(SharedAddress(query), Query(item), bytes);
        fill.End();
      }
      if (item.kind == kItemEnd) break;
      if (++slot == 2) slot = 0, slot_parity ^= 1;
      first_warp = (first_warp + item.count) % T::kWarps;
      if constexpr (T::kMixed) {
        // Tickets are taken one item ahead, so that with few items more than blocks any block might
        // get them. These go to the blocks that began with windows.
        if (second) {
          second = false;
          item = Locate(gridDim.x + blockIdx.x);
          continue;
        }
      }
      const uint32_t ticket = lane_ == 0 ? atomicAdd(p_.queue, 1u) : 0u;
      item = Locate((T::kMixed ? 2 : 1) * gridDim.x + __shfl_sync(~0u, ticket, 0));
    }
    // The last block to leave clears the queue for the next launch; every ticket has been used.
    if (lane_ == 0 && atomicAdd(p_.queue + 1, 1u) == gridDim.x - 1) {
      p_.queue[0] = 0;
      p_.queue[1] = 0;
    }
  }

 private:
  __device__ const uint16_t* Query(const DecodeItem& item) const {
    const int64_t head = (int64_t{item.row} * p_.num_kv_heads + item.kv_head) * p_.group_size +
                         item.head_block * T::kHeads;
    return p_.q + head * T::kDim;
  }

  __device__ void LoadQuery(const DecodeItem& item,
                            typename DecodeQueryPacked<T>::Rows& rows) const {
    if (item.kind == kItemEnd) return;
    BlockKind keys = T::kKind;
    if constexpr (T::kMixed) keys = p_.heads[item.kv_head].k;
    DecodeQueryPacked<T>::Load(Query(item), item.heads, item.kind == kItemPages, keys, lane_, rows);
  }

  // Of keys that are not rows (DecodeConsumerPackedForms).
  __device__ __forceinline__ void WriteForForms(const typename DecodeQueryPacked<T>::Rows& rows,
                                                uint8_t* query) const {
    using Query = DecodeQueryPacked<T>;
    const BlockLayout& layout = p_.form.layout;
    if (layout.k_form() == SideForm::kCodebook) {
      // Sums count integers; WriteForPages() takes keys of 2 bits to count 64 of them.
      const float scale = p_.scale_log2 * 64.0f * CodebookFactor(layout.k_bits(), T::kDim, 1.0f);
      if (layout.k_bits() == 4) {
        Query::template WriteForPages<Query::Order::kLevelsInTurn>(rows, BlockKind::kInt2, scale,
                                                                   query, lane_);
      } else {
        Query::template WriteForPages<Query::Order::kLevelsBySteps>(rows, BlockKind::kInt2, scale,
                                                                    query, lane_);
      }
      return;
    }
    ForKind(
        layout.k_kind(), [&]<BlockKind kK>() __attribute__((always_inline)) {
          Query::template WriteForChannels<kK>(rows, p_.scale_log2, query, lane_);
        });
  }

  // Exclusive prefix sums over the batch: window items, then history items, a (KV head, head
  // block); history items of all of them where heads differ in bits.
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
        n = Items(view);
        if constexpr (T::kMixed) {
          n.history =
              p_.head_blocks * p_.split.AllSplits(p_.split.RoundsOf(view.history_pages, T::kWarps));
        }
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

  __device__ __forceinline__ DecodeItems Items(const SequenceView& sequence) const {
    if constexpr (T::kHasWindow) {
      if (p_.sliding_window > 0) {
        const int units = UnitsOf(sequence) - UnitsBefore(sequence, p_.sliding_window);
        return {(units + kUnitsPerItem - 1) / kUnitsPerItem, 0, 1};
      }
    }
    return ItemsOf(sequence, p_.split_pages, p_.max_splits, T::kQuantised ? T::kWarps : 1);
  }
  __device__ static int UnitsOf(const SequenceView& sequence) {
    return (sequence.sink_tokens + kUnitTokens - 1) / kUnitTokens +
           (sequence.recent_tokens + kUnitTokens - 1) / kUnitTokens;
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

  __device__ DecodeItem Locate(uint32_t id) const {
    DecodeItem item{};
    const auto per_split = static_cast<uint32_t>(p_.num_kv_heads * p_.head_blocks);
    const auto* views = reinterpret_cast<const SequenceView*>(shared_ + at_.plan);
    const int* windows = reinterpret_cast<const int*>(views + p_.batch);
    const int* prefix = windows + p_.batch + 1;
    int at = static_cast<int>(id / per_split);
    int head = static_cast<int>(id % per_split);
    item.kind = kItemPages;
    if constexpr (T::kMixed) {
      // Windows first, for each (KV head, block); history items are counted for all heads at once.
      const uint32_t items = static_cast<uint32_t>(windows[p_.batch]) * per_split;
      if (id < items) {
        prefix = windows;
        item.kind = kItemUnits;
      } else {
        at = static_cast<int>(id - items);
        if (at >= prefix[p_.batch]) {
          item.kind = kItemEnd;
          return item;
        }
      }
    } else if (at >= prefix[p_.batch]) {
      at -= prefix[p_.batch];
      prefix = windows;
      item.kind = kItemUnits;
      if (at >= prefix[p_.batch]) {
        item.kind = kItemEnd;
        return item;
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
    const DecodeItems n = Items(sequence);
    const int index = at - prefix[low];
    item.row = low;
    item.kv_head = head / p_.head_blocks;
    item.head_block = head % p_.head_blocks;
    item.heads = min(T::kHeads, p_.group_size - item.head_block * T::kHeads);
    item.slots = n.window + n.history;
    item.sink_units = (sequence.sink_tokens + kUnitTokens - 1) / kUnitTokens;
    item.sink_tokens = sequence.sink_tokens;
    item.recent_tokens = sequence.recent_tokens;
    item.table_row = sequence.table_row;
    item.ring_begin = sequence.sink_tokens / kPageTokens + sequence.history_pages;
    if (item.kind == kItemUnits) {
      const int units = item.sink_units + (sequence.recent_tokens + kUnitTokens - 1) / kUnitTokens;
      if constexpr (T::kMixed) {
        const MixedSplit::Rounds rounds = p_.split.RoundsOf(sequence.history_pages, T::kWarps);
        item.slots = n.window + p_.split.Splits(rounds, MixedSplit::SizeOf(p_.heads[item.kv_head]));
      }
      item.slot = index;
      item.first = index * kUnitsPerItem;
      if constexpr (T::kHasWindow) item.first += UnitsBefore(sequence, p_.sliding_window);
      item.count = min(kUnitsPerItem, units - item.first);
    } else if constexpr (T::kMixed) {
      LocateSplit(sequence, n.window, index, item);
    } else {
      item.slot = n.window + index;
      item.first = index * n.split_pages;
      item.count = min(n.split_pages, sequence.history_pages - item.first);
      if (!T::kQuantised) {  // BF16 history is dealt in units, all of them full
        item.first *= kUnitsPerPage;
        item.count *= kUnitsPerPage;
        item.sink_units = item.first + item.count;
        item.sink_tokens = item.sink_units * kUnitTokens;
      }
    }
    return item;
  }

  // History item `index` of a sequence whose heads differ in bits: whole splits before the last one
  // of each head, which may be short and so ends a wave well; of either the larger blocks first,
  // then by head and position. Lanes look at a size of blocks each, the largest first.
  __device__ void LocateSplit(const SequenceView& sequence, int windows, int index,
                              DecodeItem& item) const {
    constexpr int kSizes = MixedSplit::kSizes;
    item.head_block = index % p_.head_blocks;
    item.heads = min(T::kHeads, p_.group_size - item.head_block * T::kHeads);
    index /= p_.head_blocks;
    const MixedSplit::Rounds rounds = p_.split.RoundsOf(sequence.history_pages, T::kWarps);
    uint32_t block = 0;
    int heads = 0;
#pragma unroll
    for (int size = 0; size < kSizes; ++size) {
      if (lane_ != kSizes - 1 - size) continue;
      block = p_.split.units[size];
      heads = static_cast<int>(p_.split.heads[size]);
    }
    int pages = 0, splits = 1;
    if (heads > 0) {
      const uint32_t n = p_.split.SplitRounds(rounds, block);
      pages = static_cast<int>(n) * T::kWarps;
      splits = static_cast<int>((rounds.all + n - 1) / n);
    }
    const int whole = heads * (splits - 1);
    int whole_up_to = whole, heads_up_to = heads;  // of this size and those before it
    for (int step = 1; step < kSizes; step *= 2) {
      const int w = __shfl_up_sync(~0u, whole_up_to, step),
                h = __shfl_up_sync(~0u, heads_up_to, step);
      if (lane_ >= step) whole_up_to += w, heads_up_to += h;
    }
    const int all_whole = __shfl_sync(~0u, whole_up_to, kSizes - 1);
    const bool is_last = index >= all_whole;
    if (is_last) index -= all_whole;
    const int up_to = is_last ? heads_up_to : whole_up_to;
    const int found = __ffs(static_cast<int>(__ballot_sync(~0u, index < up_to))) - 1;
    splits = __shfl_sync(~0u, splits, found);
    pages = __shfl_sync(~0u, pages, found);
    index -= __shfl_sync(~0u, up_to - (is_last ? heads : whole), found);
    const int first_head = __shfl_sync(~0u, heads_up_to - heads, found);
    const int of_head = is_last ? index : index / (splits - 1);
    const int split = is_last ? splits - 1 : index - of_head * (splits - 1);
    item.kv_head = p_.split.order[first_head + of_head];
    item.slot = windows + split;
    item.slots = windows + splits;
    item.first = split * pages;
    item.count = min(pages, sequence.history_pages - item.first);
  }

  // Id of the page that holds page or unit `index` of the item; of the first two of every consumer.
  __device__ __forceinline__ int FirstId(const DecodeItem& item, int index) const {
    if (item.kind == kItemEnd || index >= item.count) return 0;
    return item.PageId<T>(p_.cache, index);
  }

  const typename T::Params& p_;
  uint8_t* shared_;
  const DecodeShared<T>& at_;
  const int lane_;
  const uint32_t base_;
};

}  // namespace oscar::cuda
