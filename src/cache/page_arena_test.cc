#include "cache/page_arena.h"

#include <gtest/gtest.h>

#include <map>

#include "base/rng.h"

namespace oscar {
namespace {

enum class Kind { kOpen, kSealed, kState };
struct Placed {
  uint64_t bytes;
  Kind kind;
};

// Pages and states come and go at random, always as full as the accounts allow: every request
// within the budget must succeed, no two pages may overlap, and moves must keep track.
TEST(PageArena, WhateverTheBudgetAllowsFits) {
  for (const PageArena::Sizes sizes :
       {PageArena::Sizes{9437184, 1327104, 256, true}, PageArena::Sizes{524288, 73728, 256, true},
        PageArena::Sizes{1000, 530, 256, true}, PageArena::Sizes{65536, 2048, 256, true},
        PageArena::Sizes{4096, 4096, 256, false}, PageArena::Sizes{4096, 0, 256, false},
        // States larger than slabs, smaller, and of a size that is no multiple of anything.
        PageArena::Sizes{1310720, 188416, 256, true, 9000000},
        PageArena::Sizes{65536, 2048, 256, true, 10240},
        PageArena::Sizes{1000, 530, 256, true, 700},
        PageArena::Sizes{4096, 0, 256, false, 20001}}) {
    std::map<uint64_t, Placed> placed;
    int moves = 0;
    PageArena arena(sizes, 37 * sizes.slab_bytes() + 5,
                    [&](uint64_t from, uint64_t to, uint64_t bytes) {
                      ++moves;
                      ASSERT_TRUE(placed.contains(from) && placed.at(from).bytes == bytes);
                      // Open pages move for states alone.
                      ASSERT_TRUE(sizes.state > 0 || placed.at(from).kind == Kind::kSealed);
                      ASSERT_FALSE(placed.contains(to));
                      placed[to] = placed.at(from);
                      placed.erase(from);
                    });
    const Philox rng(5, sizes.open);
    uint64_t draw = 0, in_use = 0;
    for (int step = 0; step < 4000; ++step) {
      const bool open = !sizes.seals || rng.Below(draw++, 8) == 0;
      // Now mostly pages, now mostly states.
      const bool is_state = sizes.state > 0 && rng.Below(draw++, step / 500 % 2 == 0 ? 20 : 3) == 0;
      const Kind kind = is_state ? Kind::kState : open ? Kind::kOpen : Kind::kSealed;
      const uint64_t bytes = is_state ? sizes.state : open ? sizes.open : sizes.sealed;
      if (in_use + bytes <= arena.budget() && rng.Below(draw++, 100) < 70) {
        const auto offset = is_state ? arena.AllocateState()
                            : open   ? arena.AllocateOpen()
                                     : arena.AllocateSealed();
        ASSERT_TRUE(offset.has_value()) << in_use << " of " << arena.budget() << " in use";
        ASSERT_LE(*offset + bytes, arena.bytes());
        ASSERT_EQ(*offset % sizes.unit, 0u);
        ASSERT_TRUE(placed.emplace(*offset, Placed{bytes, kind}).second);
        in_use += bytes;
      } else if (!placed.empty()) {
        auto victim = placed.begin();
        std::advance(victim, rng.Below(draw++, static_cast<uint32_t>(placed.size())));
        arena.Free(victim->first);
        in_use -= victim->second.bytes;
        placed.erase(victim);
      }
      uint64_t end = 0;
      for (const auto& [offset, page] : placed) {
        ASSERT_GE(offset, end);
        end = offset + page.bytes;
      }
    }
    // With few slots a slab the arena is full soon enough for pages to be in the way.
    EXPECT_TRUE(moves > 0 || (sizes.state == 0 && !sizes.seals) || sizes.slots() > 16 ||
                sizes.slots() == 1)
        << sizes.open;
  }
}

TEST(PageArena, ArenaForABudgetHoldsIt) {
  for (const uint64_t state : {uint64_t{0}, uint64_t{65863680}}) {
    const PageArena::Sizes sizes{9437184, 1327104, 256, true, state};
    for (const uint64_t budget :
         {uint64_t{1}, uint64_t{9437184}, uint64_t{1} << 30, uint64_t{137} << 30}) {
      const uint64_t bytes = sizes.ArenaBytes(budget);
      EXPECT_GE(sizes.BudgetOf(bytes), budget);
      EXPECT_LE(static_cast<double>(bytes), 1.02 * static_cast<double>(budget) + 2 * 9437184.0);
    }
  }
}

}  // namespace
}  // namespace oscar
