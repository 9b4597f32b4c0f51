// Two methods on the same items: which of them each item was lost or won by, and what that says
// about the difference of their scores. Methods answer the same items, so a paired comparison sees
// differences that the methods' own standard errors hide. Plain values; one thread.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace oscar {

// Of a method against the baseline.
struct PairedScore {
  int64_t items = 0;  // that both have
  int64_t lost = 0;   // right in the baseline alone
  int64_t won = 0;    // right in the method alone
  // Exact McNemar test, two-sided: how often `lost` and `won` would be this uneven or more, if an
  // item that changes were as often lost as won.
  double p = 1;
  // The method's score less the baseline's, in points, and its 95 % interval: percentiles of
  // kResamples bootstrap samples of the items of each task.
  double difference = 0, low = 0, high = 0;

  friend bool operator==(const PairedScore&, const PairedScore&) = default;
};

inline constexpr int kResamples = 4000;

// Item by item, baseline first: right or wrong.
struct PairedItems {
  std::vector<bool> baseline, method;  // of the same size
};

// Two-sided p of the exact McNemar test.
double McNemarP(int64_t lost, int64_t won);

// The mean over tasks, each of which weighs the same, as in the tables; items are resampled within
// their task, by `seed`. One task alone is a map of one. Tasks without items are left out.
PairedScore ComparePaired(const std::map<std::string, PairedItems>& tasks, uint64_t seed);

}  // namespace oscar
