// A table of a paper run again: what was measured here beside what is published, as a table for the
// terminal, JSON and one HTML page. Plain values; free functions; safe from any thread.
#pragma once

#include <cmath>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "reproduce/papers.h"
#include "run/results.h"

namespace oscar {

struct Measured {
  double value = 0;
  double low = NAN, high = NAN;  // the 95 % interval; NaN: none
};

struct ReproducedRow {
  const PaperRow* row = nullptr;
  std::string description;                    // of the method as it ran
  std::vector<std::optional<Measured>> ours;  // by measure
  std::map<std::string, double> tasks;        // percent
  std::string missing;                        // why something is not there
};

struct Reproduction {
  const PaperTable* table = nullptr;
  std::string model;        // as named
  std::string device;       // of speeds; empty: none was measured
  std::string_view column;  // the paper's model; empty: it has none like this one
  std::vector<ReproducedRow> rows;
  // Why these scores are not the published experiment: few items, missing data, other lengths.
  // Empty: differences from the published figures mean something.
  std::vector<std::string> departures;

  // None where either is missing, or where they are of different experiments. Speeds of different
  // machines always are.
  std::optional<double> Difference(size_t row, size_t measure) const;
  // Of speeds: how many times faster than the BF16 row of the same machine. Here, and as published
  // for `paper_model`.
  std::optional<double> Speedup(size_t row, size_t measure) const;
  std::optional<double> PublishedSpeedup(std::string_view paper_model, size_t row,
                                         size_t measure) const;
};

// The figure of a table; null: none is published.
const PaperFigure* FindFigure(const PaperTable& table, std::string_view model, std::string_view row,
                              size_t measure);

// Fills the scores of the rows whose method an evaluation has.
void AddScores(const EvalResults& results, Reproduction& reproduction);

std::string ReproductionToTable(const Reproduction& reproduction);
std::string ReproductionToJson(const Reproduction& reproduction);
// `beside`: a report of the same run to point at, by its file's name; empty: none.
std::string ReproductionToHtml(const Reproduction& reproduction, std::string_view beside);

// The tables there are, with what they need.
std::string PaperTablesToText();
std::string PaperTablesToJson();

}  // namespace oscar
