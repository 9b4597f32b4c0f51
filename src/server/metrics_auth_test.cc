#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <thread>

#include "server/auth.h"
#include "server/metrics.h"

namespace oscar::server {
namespace {

using testing::HasSubstr;

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

HttpRequest With(const char* header, const char* value) {
  HttpRequest request;
  request.headers.emplace_back(header, value);
  return request;
}

TEST(KeyRing, AcceptsItsKeysAndNothingElse) {
  KeyRing keys;
  ASSERT_TRUE(keys.Add("alpha-1").ok());
  ASSERT_TRUE(keys.Add("beta-2").ok());
  const auto alpha = keys.Check(With("Authorization", "Bearer alpha-1"));
  const auto beta = keys.Check(With("x-api-key", "beta-2"));
  ASSERT_TRUE(alpha.has_value() && beta.has_value());
  EXPECT_NE(*alpha, *beta);
  EXPECT_EQ(alpha->find("alpha"), std::string::npos);
  EXPECT_TRUE(keys.Check(With("authorization", "bearer  beta-2 ")).has_value());
  for (const char* bad :
       {"Bearer alpha-", "Bearer alpha-12", "Bearer ", "Bearer", "alpha-1", "Basic alpha-1", ""}) {
    EXPECT_FALSE(keys.Check(With("Authorization", bad)).has_value()) << bad;
  }
  EXPECT_FALSE(keys.Check(HttpRequest{}).has_value());
  EXPECT_FALSE(keys.Add("").ok());
  EXPECT_FALSE(keys.Add("a b").ok());
}

TEST(KeyRing, ReadsFiles) {
  const auto path = std::filesystem::path(testing::TempDir()) / "oscar_keys.txt";
  std::ofstream(path) << "# ours\n\n  one \r\ntwo\n";
  KeyRing keys;
  ASSERT_TRUE(keys.AddFile(path).ok());
  EXPECT_EQ(keys.size(), 2u);
  EXPECT_TRUE(keys.Check(With("X-Api-Key", "one")).has_value());
  std::ofstream(path) << "ok\nnot ok\n";
  const Status status = KeyRing().AddFile(path);
  EXPECT_THAT(status.message(), HasSubstr(":2"));
  EXPECT_THAT(status.message(), testing::Not(HasSubstr("not ok")));
  std::ofstream(path) << "# none\n";
  EXPECT_FALSE(KeyRing().AddFile(path).ok());
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace oscar::server
