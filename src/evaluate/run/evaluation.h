// The evaluation itself: methods x tasks on one model, with every finished item on disk before the
// next, so that a run can be stopped and started at any time. Results depend on the settings alone:
// not on threads, batches, interruptions or the order of methods.
//
// A shared prompt, or its first cell, is read once on a BF16 cache and handed to every method: its
// rows are rotated and sealed as if the method had read it in one cell.
// The rows pass through BF16 once more than in a run of the method's own. Generated tokens are the
// method's alone.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "oscar/options.h"
#include "oscar/status.h"
#include "run/results.h"
#include "tasks/suite.h"

namespace oscar {

// A method to measure: a `--kv` name and its own rotation.
struct EvalMethod {
  std::string label;
  std::string kv;
  std::filesystem::path rotation;  // as ModelOptions::rotation
  std::optional<double> bits = {};
  // In place of the model options' own.
  std::optional<int> sink = {}, recent = {}, group_dims = {};
  // Of a sweep: the label without its point, and the point (run/sweep.h).
  std::string base = {};
  std::map<std::string, std::string> swept = {};
};

// "oscar+", "oscar+:2.5", "oscar+@DIR", "oscar+@none". Methods that take a rotation or bits get
// `rotation` and `bits` unless they name their own, one method for each of several bits: "oscar+"
// is then "oscar+:2.25" and "oscar+:2.5". DIR is kept in the label as given.
Result<std::vector<EvalMethod>> ParseMethods(const std::vector<std::string>& names,
                                             const std::filesystem::path& rotation,
                                             const std::vector<double>& bits = {});

// Who reads the prompts.
enum class EvalPrefill : uint8_t {
  kMethod,  // each method itself, by cells
  kCell,    // the first cell is read once in BF16 and shared; each method reads what follows
  kExact,   // the whole prompt is read once in BF16 and shared
};

// Where the BF16 window of a method ends.
enum class EvalWindows : uint8_t {
  kAuto,    // cells of one page on the CPU: at the token where pages would keep more; else at pages
  kPages,   // as stored: 64 tokens leave it together
  kTokens,  // as methods are defined on paper
};

struct EvalOptions {
  ModelOptions model;  // kv, rotation and token_windows are each method's own
  std::vector<EvalMethod> methods;
  EvalSuite suite;
  EvalPrefill prefill = EvalPrefill::kMethod;
  EvalWindows windows = EvalWindows::kAuto;
  bool want_answers = true;  // false: an item ends at its first wrong token
  // Of sampled outputs, with the repeat and the item.
  uint64_t seed = 0;
  std::filesystem::path prose;  // JSON list of documents; empty: no text metrics
  int prose_windows = 8;
  int prose_tokens = 4096;
  std::vector<SweepAxis> sweep;  // that the methods are points of; for the report
  std::filesystem::path out;
  bool show_progress = true;
};

// Writes items.jsonl as it goes; the caller writes the rest. An item that does not fit the model's
// context counts as wrong and is named in the warnings; kOutOfRange where none fits.
Result<EvalResults> Evaluate(const EvalOptions& options);

// results.json, results.csv, report.html and the charts of a sweep into `directory`.
Status WriteResults(const EvalResults& results, const std::filesystem::path& directory);

}  // namespace oscar
