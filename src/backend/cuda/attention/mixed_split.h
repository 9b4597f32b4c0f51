// MixedSplit: how decode attention splits history where heads differ in bits. Plain data, host and
// device.
#pragma once

#include <cstdint>

#include "cuda/attention/cache_view.h"

namespace oscar::cuda {

// How history is split where heads differ in bits: a head's splits are as many as its bytes ask
// for, so that a head of larger blocks is no tail. Depends on the layer's map and the device.
struct MixedSplit {
  static constexpr int kSizes = 5;  // HeadBlock::bits() from 4 to 8
  static constexpr uint32_t kUnitBytes = 128;
  uint32_t units[kSizes];  // of a block, in kUnitBytes; 0: no head has that many bits
  uint32_t heads[kSizes];  // that have so many
  uint32_t smallest;       // units that there are, at least
  uint32_t total;          // units of all heads
  uint32_t target;      // splits that one sequence's history has in all, as near as rounding allows
  uint32_t least;       // rounds of a split of the smallest blocks
  uint32_t max_splits;  // of a head
  uint8_t order[kMaxMixedHeads];  // heads, those with the largest blocks first

  static MixedSplit Make(int head_dim, int group_dims, const HeadBlocks& heads, int least,
                         int target, int max_splits) {
    MixedSplit split{};
    for (const HeadBlock& head : heads) {
      const uint32_t units = head.Layout(head_dim, group_dims).block_bytes() / kUnitBytes;
      split.units[SizeOf(head)] = units;
      ++split.heads[SizeOf(head)];
      split.total += units;
      if (split.smallest == 0 || units < split.smallest) split.smallest = units;
    }
    int placed = 0;
    for (int size = kSizes - 1; size >= 0; --size) {
      for (size_t head = 0; head < heads.size(); ++head) {
        if (SizeOf(heads[head]) == size) split.order[placed++] = static_cast<uint8_t>(head);
      }
    }
    split.target = static_cast<uint32_t>(target);
    split.least = static_cast<uint32_t>(least);
    split.max_splits = static_cast<uint32_t>(max_splits);
    return split;
  }

  OSCAR_HD static constexpr int SizeOf(const HeadBlock& head) { return head.bits() - 4; }

  // Of one sequence. A round is a page for each of the block's warps.
  struct Rounds {
    uint32_t all;       // of the history
    uint32_t smallest;  // of a split of the smallest blocks
  };
  OSCAR_HD Rounds RoundsOf(int pages, int warps) const {
    const auto all = static_cast<uint32_t>((pages + warps - 1) / warps);
    const uint32_t share = smallest * target;
    const uint32_t rounds = (all * total + share - 1) / share;
    return {all, rounds > least ? rounds : least};
  }
  // Of one split of a head whose blocks have so many units.
  OSCAR_HD uint32_t SplitRounds(const Rounds& rounds, uint32_t block) const {
    const uint32_t nearest = (2 * rounds.smallest * smallest + block) / (2 * block);
    const uint32_t fewest = (rounds.all + max_splits - 1) / max_splits;
    const uint32_t n = nearest > fewest ? nearest : fewest;
    return n > 1 ? n : 1;
  }
  OSCAR_HD int Splits(const Rounds& rounds, int size) const {
    const uint32_t n = SplitRounds(rounds, units[size]);
    return static_cast<int>((rounds.all + n - 1) / n);
  }
  // Of all heads.
  OSCAR_HD int AllSplits(const Rounds& rounds) const {
    int sum = 0;
    for (int size = 0; size < kSizes; ++size) {
      if (heads[size] > 0) sum += static_cast<int>(heads[size]) * Splits(rounds, size);
    }
    return sum;
  }
};

}  // namespace oscar::cuda
