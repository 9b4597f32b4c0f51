// PageArena: where pages of two sizes lie in one fixed stretch of memory, by offsets alone. The
// stretch is a row of slabs, each one open page or as many sealed ones as fit. When an open page
// needs a slab and only partly used ones are left, sealed pages are moved together, so that any mix
// of pages within budget() fits, whatever came and went before.
//
// Recurrent states, which are larger than slabs or not, lie side by side at the end. That part
// grows into slabs, whose pages move, and shrinks when slabs run out: then states move together.
// One thread.
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
    bool seals = true;   // false: there are open pages only
    uint64_t state = 0;  // bytes of a state; 0: there are none

    uint64_t slab_bytes() const { return RoundUp(open); }
    uint64_t slot_bytes() const { return RoundUp(sealed); }
    uint64_t place_bytes() const { return RoundUp(state); }
    int slots() const;
    // Bytes that `bytes` of arena can hold in any mix, and the arena that a budget needs.
    uint64_t BudgetOf(uint64_t bytes) const;
    uint64_t ArenaBytes(uint64_t budget) const;
    uint64_t RoundUp(uint64_t bytes) const { return (bytes + unit - 1) / unit * unit; }

   private:
    uint64_t BudgetOfSlab() const;
  };
  // So many bytes are to be copied; their old place is free afterwards.
  using Move = std::function<void(uint64_t from, uint64_t to, uint64_t bytes)>;

  PageArena(const Sizes& sizes, uint64_t bytes, Move move);

  std::optional<uint64_t> AllocateOpen();
  std::optional<uint64_t> AllocateSealed();
  std::optional<uint64_t> AllocateState();
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
  // Where the i-th state from the end lies, and how many slabs `count` of them leave to pages.
  uint64_t StateAt(size_t i) const { return bytes() - (i + 1) * sizes_.place_bytes(); }
  int64_t SlabsBeside(size_t count) const {
    const uint64_t taken = count * sizes_.place_bytes();
    return taken > bytes() ? -1 : static_cast<int64_t>((bytes() - taken) / sizes_.slab_bytes());
  }
  // Of the slabs as they are divided now.
  std::optional<uint64_t> TakeOpen();
  std::optional<uint64_t> TakeSealed();
  bool FreeASlab();
  bool GrowStates();
  bool ShrinkStates();

  const Sizes sizes_;
  const int slots_;
  Move move_;
  std::vector<Slab> slabs_;
  std::vector<int64_t> free_;                  // slabs
  std::set<std::pair<int, int64_t>> partial_;  // (pages in it, slab): some sealed, not full
  std::vector<uint8_t> states_;                // by place from the end: whether there is one
};

}  // namespace oscar
