// Two runs of one evaluation, item by item: other devices, other arithmetic, other versions. Both
// followed the reference until one of them missed a token, so up to there they read the same
// tokens, and the margins at that token say how near the two were. Plain values; one thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "run/results.h"

namespace oscar {

// An item on which the runs' first wrong tokens differ.
struct Parting {
  std::string method, task, id;
  bool strict[2] = {};  // of each run
  int64_t token = 0;    // the first that one of them missed
  // Of each run at that token; none where it was not among those kept.
  std::optional<double> margin[2];

  // What the two may differ by at least: from hit to miss, the distance of the margins.
  std::optional<double> Distance() const;
};

struct TaskComparison {
  std::string method, task;
  int64_t items = 0;       // that both runs have
  int64_t strict[2] = {};  // of those
  int64_t diverged = 0;
};

struct Comparison {
  std::vector<TaskComparison> tasks;  // by method and task
  std::vector<Parting> partings;
  int64_t unmatched = 0;  // items of one run alone
};

// Records without a strict score are left out; where an item occurs twice, the last one counts.
Comparison CompareRuns(const std::vector<ItemRecord>& first, const std::vector<ItemRecord>& second);
std::string ComparisonToTable(const Comparison& comparison);

}  // namespace oscar
