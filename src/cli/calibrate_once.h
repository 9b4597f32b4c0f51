// A calibration that a longer command needs on its way: made once, found again by the next run.
#pragma once

#include <filesystem>

#include "calibrate/calibrate.h"
#include "oscar/status.h"

namespace oscar::cli {

// Calibrates into `directory` unless it holds the same calibration: of the same text, budget and
// fit. Of another model it is refused when it is loaded, which names both. kInvalidArgument where
// another rotation lies there.
Status CalibrateOnce(const CalibrateOptions& options, const std::filesystem::path& directory);

}  // namespace oscar::cli
