// The tables of the two papers whose methods this project implements, OSCAR (arXiv 2605.17757) and
// OScaR (arXiv 2605.19660), and the figures that their authors publish, each with where it stands.
// Only figures that were read at the named commit are here; what a paper may have beside them is
// not guessed. Constant data; safe from any thread.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <string_view>

#include "oscar/status.h"

namespace oscar {

// What a column of a table is.
enum class PaperMeasureKind : uint8_t {
  kMeanScore,          // percent, the mean of the table's tasks
  kMillisecondsAStep,  // of a decode step of `batch` sequences of `context` tokens
  kTokensPerSecond,    // of the same
  kBits,               // per K/V element as stored at `context` tokens
  kHistoryRatio,       // BF16 bytes over the history's bytes, windows left out
};

struct PaperMeasure {
  PaperMeasureKind kind = {};
  std::string_view name;
  int64_t context = 0;
  int batch = 0;
};

struct PaperRow {
  std::string_view label;  // as the paper calls it
  std::string_view kv;     // our name of it; empty: not implemented
  std::string_view note;   // why not, or what differs
};

struct PaperFigure {
  std::string_view model;
  std::string_view row;
  size_t measure = 0;  // index into the table's
  double value = 0;
  double spread = NAN;  // as published: one standard deviation over seeds
};

struct PaperTable {
  std::string_view name = {};
  std::string_view title = {};
  std::string_view source = {};  // of the figures
  // Names of `--suite`, less their data; empty for tables of speed or memory.
  std::span<const std::string_view> suites = {};
  std::span<const PaperMeasure> measures = {};
  std::span<const PaperRow> rows = {};
  std::span<const PaperFigure> figures = {};
  std::span<const std::string_view> notes = {};  // where our setting departs from the published one
  std::string_view calibration = {};             // the suite whose prompts `oscar` is calibrated on
  std::span<const int64_t> lengths = {};         // of RULER's items
  int repeats = 0;                               // 0: the benchmarks' own
  int group_dims = 0;                            // 0: the method's own
  bool plain_prompts = false;                    // no chat template
  std::string_view refused = {};                 // why it cannot be run at all; empty: it can
};

std::span<const PaperTable> PaperTables();
// kInvalidArgument with the list of names.
Result<const PaperTable*> FindPaperTable(std::string_view name);

// The table's model that a directory or hub name stands for, by how its last part begins:
// "models/Qwen3-8B-FP8" is the paper's "Qwen3-8B". Empty: none of them.
std::string_view MatchPaperModel(const PaperTable& table, std::string_view model);

// The clip ratio of values that OSCAR's scripts have for a model; keys take .96 in all of them.
float PaperValueClip(std::string_view model);

// Where a suite's data is looked for below a directory, best first, and where it comes from.
struct PaperData {
  std::string_view suite;
  std::span<const std::string_view> files;
  std::string_view origin;
  bool optional = false;  // the table can do without
};
// Null: the suite needs none.
const PaperData* DataOf(std::string_view suite);

}  // namespace oscar
