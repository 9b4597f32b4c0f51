// A grid of settings around each method: `--sweep sink=0,64 --sweep recent=64,256` measures every
// method that the axes concern once at each point. Points are methods like any others, so they are
// scored, resumed and compared as those are. Free functions; safe from any thread.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "oscar/status.h"
#include "run/evaluation.h"
#include "run/results.h"

namespace oscar {

inline constexpr size_t kMaxSweepAxes = 2;
inline constexpr size_t kMaxSweepPoints = 256;  // of one method

// What a rotation is calibrated on: whoever expands the sweep makes it (EvalMethod::rotation).
inline constexpr char kSweepTokens[] = "calibration-tokens";
inline constexpr char kSweepText[] = "calibration-text";

// "sink=0,64", "recent=64,256", "group=32,128", "bits=2.25,2.5", "calibration-tokens=3000,30000",
// "calibration-text=sample,gpqa=FILE". kInvalidArgument for others, for values that are no number
// where one is needed, for one twice and for more than kMaxSweepAxes axes.
Result<std::vector<SweepAxis>> ParseSweep(const std::vector<std::string>& texts);

// Every method at every point of the axes that concern it: all but the calibration concern those
// that quantise, bits those that take them, the calibration those that take a rotation and name
// none. kInvalidArgument where an axis concerns no method.
Result<std::vector<EvalMethod>> ExpandSweep(const std::vector<EvalMethod>& methods,
                                            const std::vector<SweepAxis>& axes);

// Charts of a sweep, as SVG by the name of a file ("sweep-oscar+-score.svg"): a heat map for two
// axes, bars for one. Empty where the results are of none.
std::vector<std::pair<std::string, std::string>> SweepCharts(const EvalResults& results);

}  // namespace oscar
