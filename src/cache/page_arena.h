// PageArena: where pages of two sizes lie in one fixed stretch of memory, by offsets alone. The
// stretch is a row of slabs, each one open page or as many sealed ones as fit. When an open page
// needs a slab and only partly used ones are left, sealed pages are moved together, so that any mix
// of pages within budget() fits, whatever came and went before. One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace oscar {

class PageArena {
 public:
  // Offsets are multiples of `unit`.
  struct Sizes {
    uint64_t open = 0, sealed = 0;  // bytes of a page; sealed ones are not larger
    uint64_t unit = 256;
    bool seals = true;  // false: there are open pages only

    uint64_t slab_bytes() const { return RoundUp(open); }
    uint64_t slot_bytes() const { return RoundUp(sealed); }
    int slots() const;
    // Page bytes that `bytes` of arena can hold in any mix, and the arena that a budget needs.
    uint64_t BudgetOf(uint64_t bytes) const;
    uint64_t ArenaBytes(uint64_t budget) const;
    uint64_t RoundUp(uint64_t bytes) const { return (bytes + unit - 1) / unit * unit; }
  };
  // The bytes of a sealed page are to be copied; its old place is free afterwards.
  using Move = std::function<void(uint64_t from, uint64_t to)>;

  PageArena(const Sizes& sizes, uint64_t bytes, Move move);

  std::optional<uint64_t> AllocateOpen();
  std::optional<uint64_t> AllocateSealed();
  void Free(uint64_t offset);

  const Sizes& sizes() const { return sizes_; }
  uint64_t budget() const { return sizes_.BudgetOf(slabs_.size() * sizes_.slab_bytes()); }
  uint64_t bytes() const { return slabs_.size() * sizes_.slab_bytes(); }
  int64_t SlabOf(uint64_t offset) const {
    return static_cast<int64_t>(offset / sizes_.slab_bytes());
  }

 private:
  struct Slab {
    uint32_t used = 0;  // one bit a sealed page; all ones: an open page
    int count = 0;
  };
  uint64_t At(int64_t slab, int slot) const {
    return static_cast<uint64_t>(slab) * sizes_.slab_bytes() +
           static_cast<uint64_t>(slot) * sizes_.slot_bytes();
  }
  bool FreeASlab();

  const Sizes sizes_;
  const int slots_;
  Move move_;
  std::vector<Slab> slabs_;
  std::vector<int64_t> free_;                  // slabs
  std::set<std::pair<int, int64_t>> partial_;  // (pages in it, slab): some sealed, not full
};

}  // namespace oscar
