#include "run/paired.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/rng.h"

namespace oscar {

double McNemarP(int64_t lost, int64_t won) {
  const int64_t n = lost + won, k = std::min(lost, won);
  if (n == 0) return 1.0;
  // Sum of binomial probabilities up to k at one half, by logarithms: n may be thousands.
  double tail = 0;
  for (int64_t i = 0; i <= k; ++i) {
    const auto x = static_cast<double>(i), all = static_cast<double>(n);
    tail += std::exp(std::lgamma(all + 1) - std::lgamma(x + 1) - std::lgamma(all - x + 1) -
                     all * std::log(2.0));
  }
  return std::min(1.0, 2 * tail);
}

PairedScore ComparePaired(const std::map<std::string, PairedItems>& tasks, uint64_t seed) {
  PairedScore out;
  // Of each task, what an item changes: -1, 0 or 1.
  std::vector<std::vector<int8_t>> changes;
  for (const auto& [name, items] : tasks) {
    OSCAR_CHECK(items.baseline.size() == items.method.size());
    if (items.baseline.empty()) continue;
    std::vector<int8_t>& task = changes.emplace_back();
    for (size_t i = 0; i < items.baseline.size(); ++i) {
      task.push_back(static_cast<int8_t>(int{items.method[i]} - int{items.baseline[i]}));
      out.lost += task.back() < 0 ? 1 : 0;
      out.won += task.back() > 0 ? 1 : 0;
    }
    out.items += static_cast<int64_t>(task.size());
    int64_t sum = 0;
    for (const int8_t change : task) sum += change;
    out.difference += 100.0 * static_cast<double>(sum) / static_cast<double>(task.size());
  }
  out.p = McNemarP(out.lost, out.won);
  if (changes.empty()) return out;
  const auto num_tasks = static_cast<double>(changes.size());
  out.difference /= num_tasks;
  std::vector<double> means(kResamples);
  for (size_t sample = 0; sample < means.size(); ++sample) {
    const Philox random(seed, sample);
    uint64_t at = 0;
    for (const std::vector<int8_t>& task : changes) {
      int64_t sum = 0;
      for (size_t i = 0; i < task.size(); ++i) {
        sum += task[random.Below(at++, static_cast<uint32_t>(task.size()))];
      }
      means[sample] += 100.0 * static_cast<double>(sum) / static_cast<double>(task.size());
    }
    means[sample] /= num_tasks;
  }
  std::sort(means.begin(), means.end());
  const auto percentile = [&](double share) {
    return means[static_cast<size_t>(share * static_cast<double>(means.size() - 1))];
  };
  out.low = percentile(0.025);
  out.high = percentile(0.975);
  return out;
}

}  // namespace oscar
