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
// sealed pages within the budget need at most a + ceil(b / slots) slabs, which there are. A state
// counts as its bytes, which are not more than its share of the slabs that it lies in; where states
// end inside a slab, the rest of that one is lost.
uint64_t PageArena::Sizes::BudgetOfSlab() const {
  uint64_t bytes = seals ? std::min(open, static_cast<uint64_t>(slots()) * sealed) : open;
  if (state > 0) bytes = std::min(bytes, slab_bytes() * state / place_bytes());
  return bytes;
}

uint64_t PageArena::Sizes::BudgetOf(uint64_t bytes) const {
  const uint64_t slabs = bytes / slab_bytes(), lost = state > 0 ? 1 : 0;
  return slabs > lost ? (slabs - lost) * BudgetOfSlab() : 0;
}

uint64_t PageArena::Sizes::ArenaBytes(uint64_t budget) const {
  const uint64_t per_slab = BudgetOfSlab();
  return ((budget + per_slab - 1) / per_slab + (state > 0 ? 1 : 0)) * slab_bytes();
}

PageArena::PageArena(const Sizes& sizes, uint64_t bytes, Move move)
    : sizes_(sizes),
      slots_(sizes.slots()),
      move_(std::move(move)),
      slabs_(bytes / sizes.slab_bytes()) {
  for (auto i = static_cast<int64_t>(slabs_.size()); i-- > 0;) free_.push_back(i);
}

std::optional<uint64_t> PageArena::AllocateOpen() {
  const std::optional<uint64_t> at = TakeOpen();
  return at.has_value() || !ShrinkStates() ? at : TakeOpen();
}

std::optional<uint64_t> PageArena::AllocateSealed() {
  const std::optional<uint64_t> at = TakeSealed();
  return at.has_value() || !ShrinkStates() ? at : TakeSealed();
}

std::optional<uint64_t> PageArena::AllocateState() {
  auto free = std::ranges::find(states_, 0);
  if (free == states_.end()) {
    if (!GrowStates()) return std::nullopt;
    free = std::prev(states_.end());
  }
  *free = 1;
  return StateAt(static_cast<size_t>(free - states_.begin()));
}

std::optional<uint64_t> PageArena::TakeOpen() {
  if (free_.empty() && !FreeASlab()) return std::nullopt;
  const int64_t slab = free_.back();
  free_.pop_back();
  slabs_[static_cast<size_t>(slab)] = {kOpen, 1};
  return At(slab, 0);
}

std::optional<uint64_t> PageArena::TakeSealed() {
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

// A place more, out of the last slabs that pages have.
bool PageArena::GrowStates() {
  const int64_t before = SlabsBeside(states_.size()), after = SlabsBeside(states_.size() + 1);
  if (after < 0) return false;
  std::erase_if(free_, [&](int64_t slab) { return slab >= after; });
  std::erase_if(partial_, [&](const auto& entry) { return entry.second >= after; });
  for (int64_t i = after; i < before; ++i) {
    Slab& slab = slabs_[static_cast<size_t>(i)];
    const bool open = slab.used == kOpen;
    for (int slot = 0; slot < (open ? 1 : slots_); ++slot) {
      if ((slab.used >> slot & 1u) == 0) continue;
      const std::optional<uint64_t> to = open ? TakeOpen() : TakeSealed();
      // Within the budget there is room for them: see BudgetOfSlab.
      OSCAR_CHECK(to.has_value(), "more bytes of pages and states than the arena's budget");
      move_(At(i, slot), *to, open ? sizes_.open : sizes_.sealed);
    }
    slab = {};
  }
  states_.push_back(0);
  return true;
}

// Moves states into free places and gives back slabs; whether there were any.
bool PageArena::ShrinkStates() {
  const int64_t before = SlabsBeside(states_.size());
  const auto count = static_cast<size_t>(std::ranges::count(states_, 1));
  if (SlabsBeside(count) == before) return false;
  auto free = std::ranges::find(states_, 0);
  for (size_t i = count; i < states_.size(); ++i) {
    if (states_[i] == 0) continue;
    move_(StateAt(i), StateAt(static_cast<size_t>(free - states_.begin())), sizes_.state);
    *free = 1;
    free = std::find(free, states_.end(), 0);
  }
  states_.resize(count);
  for (int64_t slab = SlabsBeside(count); slab-- > before;) free_.push_back(slab);
  return true;
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
    if ((used >> slot & 1u) != 0) move_(At(slab, slot), *TakeSealed(), sizes_.sealed);
  }
  slabs_[static_cast<size_t>(slab)] = {};
  free_.push_back(slab);
  return true;
}

void PageArena::Free(uint64_t offset) {
  if (const uint64_t back = bytes() - offset; back <= states_.size() * sizes_.place_bytes()) {
    uint8_t& state = states_[back / sizes_.place_bytes() - 1];
    OSCAR_CHECK(state == 1, "a state is freed twice");
    state = 0;
    return;
  }
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
