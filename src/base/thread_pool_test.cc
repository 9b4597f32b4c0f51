#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

namespace oscar {
namespace {

TEST(ThreadPool, RunsEveryIndexOnce) {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (int64_t count : {0, 1, 3, 1000}) {
      std::vector<std::atomic<int>> hits(static_cast<size_t>(count));
      pool.ParallelFor(count, [&](int64_t i, int thread) {
        EXPECT_LT(thread, pool.num_threads());
        ++hits[static_cast<size_t>(i)];
      });
      for (const auto& hit : hits) EXPECT_EQ(hit.load(), 1);
    }
  }
}

TEST(ThreadPool, NestedCallsRunInline) {
  ThreadPool pool(3);
  std::atomic<int> total{0};
  pool.ParallelFor(4, [&](int64_t, int outer) {
    pool.ParallelFor(5, [&](int64_t, int inner) {
      EXPECT_EQ(inner, outer);
      ++total;
    });
  });
  EXPECT_EQ(total.load(), 20);
}

TEST(ThreadPool, RethrowsAndStaysUsable) {
  ThreadPool pool(3);
  EXPECT_THROW(pool.ParallelFor(100,
                                [](int64_t i, int) {
                                  if (i == 7) throw std::bad_alloc();
                                }),
               std::bad_alloc);
  std::atomic<int> total{0};
  pool.ParallelFor(10, [&](int64_t, int) { ++total; });
  EXPECT_EQ(total.load(), 10);
}

TEST(ThreadPool, ManyShortRegions) {
  ThreadPool pool(4);
  int64_t sum = 0;
  for (int round = 0; round < 2000; ++round) {
    std::vector<int64_t> parts(8);
    pool.ParallelFor(8, [&](int64_t i, int) { parts[static_cast<size_t>(i)] = i; });
    for (int64_t part : parts) sum += part;
  }
  EXPECT_EQ(sum, 2000 * 28);
}

}  // namespace
}  // namespace oscar
