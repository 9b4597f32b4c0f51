// The evaluation itself: methods x tasks on one model, with every finished item on disk before the
// next, so that a run can be stopped and started at any time. Results depend on the settings alone:
// not on threads, batches, interruptions or the order of methods.
//
// With a shared exact prefill, a prompt is read once on a BF16 cache and handed to every method:
// its rows are rotated and sealed as if the method had read it in one cell as long as the prompt.
// The rows pass through BF16 once more than in a run of the method's own. Generated tokens are the
// method's alone.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "evaluate/results.h"
#include "evaluate/suite.h"
#include "oscar/options.h"
#include "oscar/status.h"

namespace oscar {

// A method to measure: a `--kv` name and a rotation of its own.
struct EvalMethod {
  std::string label;
  std::string kv;
  std::filesystem::path rotation;  // empty: none
};

// "oscar+", "oscar+@DIR", "oscar+@none". Methods that take a rotation get `rotation` unless they
// name one; DIR is kept in the label as given.
Result<std::vector<EvalMethod>> ParseMethods(const std::vector<std::string>& names,
                                             const std::filesystem::path& rotation);

struct EvalOptions {
  ModelOptions model;  // kv and rotation are each method's own
  std::vector<EvalMethod> methods;
  EvalSuite suite;
  bool share_prefill = false;
  bool want_answers = true;  // false: an item ends at its first wrong token
  // Set: outputs are drawn, seeded by (seed, repeat, item); unset: greedy, one repeat.
  std::optional<SamplingOptions> sampling;
  int repeats = 1;
  uint64_t seed = 0;
  std::filesystem::path prose;  // JSON list of documents; empty: no text metrics
  int prose_windows = 8;
  int prose_tokens = 4096;
  std::filesystem::path out;
  bool show_progress = true;
};

// Writes items.jsonl as it goes; the caller writes the rest.
Result<EvalResults> Evaluate(const EvalOptions& options);

// results.json, results.csv and report.html into `directory`.
Status WriteResults(const EvalResults& results, const std::filesystem::path& directory);

}  // namespace oscar
