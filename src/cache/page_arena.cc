#include "cache/page_arena.h"

#include <algorithm>
#include <bit>

#include "base/check.h"

namespace oscar {
namespace {

constexpr uint32_t kOpen = ~0u;
constexpr uint64_t kMaxSlots = 31;  // kOpen is not a set of slots

}  // namespace

int PageArena::Sizes::slots() const {
  if (!seals) return 1;  // there is no sealed size to divide by
  return static_cast<int>(std::clamp<uint64_t>(slab_bytes() / slot_bytes(), 1, kMaxSlots));
}

// A slab counts as what its sealed pages hold, and an open page is not less than that: a open and b
// sealed pages within the budget need at most a + ceil(b / slots) slabs, which there are.
uint64_t PageArena::Sizes::BudgetOf(uint64_t bytes) const {
  const uint64_t slabs = bytes / slab_bytes();
  if (!seals) return slabs * open;
  return slabs * std::min(open, static_cast<uint64_t>(slots()) * sealed);
}

uint64_t PageArena::Sizes::ArenaBytes(uint64_t budget) const {
  const uint64_t per_slab = BudgetOf(slab_bytes());
  return (budget + per_slab - 1) / per_slab * slab_bytes();
}

PageArena::PageArena(const Sizes& sizes, uint64_t bytes, Move move)
    : sizes_(sizes),
      slots_(sizes.slots()),
      move_(std::move(move)),
      slabs_(bytes / sizes.slab_bytes()) {
  for (auto i = static_cast<int64_t>(slabs_.size()); i-- > 0;) free_.push_back(i);
}

std::optional<uint64_t> PageArena::AllocateOpen() {
  if (free_.empty() && !FreeASlab()) return std::nullopt;
  const int64_t slab = free_.back();
  free_.pop_back();
  slabs_[static_cast<size_t>(slab)] = {kOpen, 1};
  return At(slab, 0);
}

std::optional<uint64_t> PageArena::AllocateSealed() {
  int64_t slab = 0;
  if (!partial_.empty()) {  // the fullest, so that others may become empty
    const auto last = std::prev(partial_.end());
    slab = last->second;
    partial_.erase(last);
  } else {
    if (free_.empty()) return std::nullopt;
    slab = free_.back();
    free_.pop_back();
    slabs_[static_cast<size_t>(slab)] = {};
  }
  Slab& at = slabs_[static_cast<size_t>(slab)];
  const int slot = std::countr_one(at.used);
  at.used |= 1u << slot;
  if (++at.count < slots_) partial_.emplace(at.count, slab);
  return At(slab, slot);
}

// Moves the pages of the emptiest slab into others.
bool PageArena::FreeASlab() {
  if (partial_.size() < 2) return false;
  const auto [count, slab] = *partial_.begin();
  int room = 0;
  for (auto it = std::next(partial_.begin()); it != partial_.end() && room < count; ++it) {
    room += slots_ - it->first;
  }
  if (room < count) return false;
  partial_.erase(partial_.begin());
  const uint32_t used = slabs_[static_cast<size_t>(slab)].used;
  for (int slot = 0; slot < slots_; ++slot) {
    if ((used >> slot & 1u) != 0) move_(At(slab, slot), *AllocateSealed());
  }
  slabs_[static_cast<size_t>(slab)] = {};
  free_.push_back(slab);
  return true;
}

void PageArena::Free(uint64_t offset) {
  const int64_t slab = SlabOf(offset);
  Slab& at = slabs_[static_cast<size_t>(slab)];
  if (at.used == kOpen) {
    at = {};
    free_.push_back(slab);
    return;
  }
  const auto slot = static_cast<int>(offset % sizes_.slab_bytes() / sizes_.slot_bytes());
  OSCAR_CHECK((at.used >> slot & 1u) != 0, "a page is freed twice");
  partial_.erase({at.count, slab});
  at.used &= ~(1u << slot);
  if (--at.count == 0) {
    free_.push_back(slab);
  } else {
    partial_.emplace(at.count, slab);
  }
}

}  // namespace oscar
