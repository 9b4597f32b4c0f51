#include "server/metrics.h"

#include <gtest/gtest.h>

#include <limits>
#include <thread>

namespace oscar::server {
namespace {

TEST(Histogram, BucketsAreCumulativeAndBoundsInclusive) {
  const double bounds[] = {1.0, 2.0, 4.0};
  Histogram histogram(bounds);
  for (const double value : {0.5, 1.0, 1.5, 4.0, 100.0}) histogram.Observe(value);
  const auto snapshot = histogram.Read();
  EXPECT_EQ(snapshot.cumulative[0].second, 2u);
  EXPECT_EQ(snapshot.cumulative[1].second, 3u);
  EXPECT_EQ(snapshot.cumulative[2].second, 4u);
  EXPECT_EQ(snapshot.count, 5u);
  EXPECT_DOUBLE_EQ(snapshot.sum, 107.0);
}

TEST(Histogram, LosesNothingBetweenThreads) {
  Histogram histogram(LatencyBounds());
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 10'000; ++i) histogram.Observe(0.5);
      });
    }
  }
  EXPECT_EQ(histogram.Read().count, 40'000u);
  EXPECT_DOUBLE_EQ(histogram.Read().sum, 20'000.0);
}

TEST(Exposition, FamiliesLabelsAndEscapes) {
  ExpositionWriter out;
  LabelledCounter counter;
  counter.Add({{"endpoint", "chat"}, {"finish_reason", "a\"b\\c\nd"}}, 3);
  out.Counter("requests_total", "Requests", counter.Read());
  out.Gauge("kv_effective_bits", "Bits", 2.25);
  out.Gauge("odd", "Odd", std::numeric_limits<double>::infinity());
  const double bounds[] = {0.5};
  Histogram histogram(bounds);
  histogram.Observe(0.25);
  histogram.Observe(2.0);
  out.Add("queue_seconds", "Queue", histogram);
  EXPECT_EQ(out.text(),
            "# HELP oscar_requests_total Requests\n"
            "# TYPE oscar_requests_total counter\n"
            "oscar_requests_total{endpoint=\"chat\",finish_reason=\"a\\\"b\\\\c\\nd\"} 3\n"
            "# HELP oscar_kv_effective_bits Bits\n"
            "# TYPE oscar_kv_effective_bits gauge\n"
            "oscar_kv_effective_bits 2.25\n"
            "# HELP oscar_odd Odd\n"
            "# TYPE oscar_odd gauge\n"
            "oscar_odd +Inf\n"
            "# HELP oscar_queue_seconds Queue\n"
            "# TYPE oscar_queue_seconds histogram\n"
            "oscar_queue_seconds_bucket{le=\"0.5\"} 1\n"
            "oscar_queue_seconds_bucket{le=\"+Inf\"} 2\n"
            "oscar_queue_seconds_sum 2.25\n"
            "oscar_queue_seconds_count 2\n");
}

}  // namespace
}  // namespace oscar::server
