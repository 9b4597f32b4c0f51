#include "engine/chunk_pacer.h"

#include <gtest/gtest.h>

#include <cmath>

namespace oscar {
namespace {

// A machine on which a pass takes `base` seconds and `each` per prompt token.
int After(ChunkPacer& pacer, int passes, double base, double each) {
  for (int i = 0; i < passes; ++i) pacer.Observe(pacer.limit(), base + each * pacer.limit());
  return pacer.limit();
}

TEST(ChunkPacer, PassesTendToTheTarget) {
  for (const double base : {0.0, 0.005, 0.015}) {
    for (const double each : {1e-5, 1e-4, 5e-4}) {
      ChunkPacer pacer(0.020, 4096);
      const int limit = After(pacer, 60, base, each);
      const double wanted = std::clamp((0.020 - base) / each, 16.0, 4096.0);
      EXPECT_NEAR(limit, wanted, 0.05 * wanted + 1) << base << " " << each;
      EXPECT_LE(base + each * (limit - 1), 0.020 + 17 * each);
    }
  }
}

TEST(ChunkPacer, FollowsAMachineThatChanges) {
  ChunkPacer pacer(0.020, 4096);
  After(pacer, 60, 0.002, 1e-5);
  EXPECT_GT(pacer.limit(), 1500);
  After(pacer, 8, 0.002, 1e-4);  // contexts have grown
  EXPECT_NEAR(pacer.limit(), 180, 20);
  After(pacer, 60, 0.002, 1e-5);
  EXPECT_GT(pacer.limit(), 1500);
}

TEST(ChunkPacer, OneSlowPassIsNotTheMachine) {
  ChunkPacer pacer(0.020, 4096);
  const int before = After(pacer, 60, 0.002, 1e-4);
  pacer.Observe(before, 5.0);
  EXPECT_GE(pacer.limit(), before / 4);
  // What a short prompt took says nothing of a full pass.
  const int now = pacer.limit();
  pacer.Observe(1, 0.001);
  EXPECT_EQ(pacer.limit(), now);
}

TEST(ChunkPacer, StaysWithinItsBounds) {
  ChunkPacer slow(0.001, 512), small(0.001, 4), off(0.0, 512);
  EXPECT_EQ(After(slow, 20, 1.0, 1.0), ChunkPacer::kFewest);
  EXPECT_EQ(After(small, 20, 1.0, 1.0), 4);
  EXPECT_EQ(After(off, 20, 1.0, 1.0), 512);
  ChunkPacer fast(1.0, 512);
  EXPECT_EQ(After(fast, 60, 1e-6, 1e-9), 512);
  fast.Observe(512, -1.0);
  fast.Observe(0, 5.0);
  EXPECT_EQ(fast.limit(), 512);
}

}  // namespace
}  // namespace oscar
