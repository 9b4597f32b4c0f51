// Reports as one HTML file each: no script, nothing loaded from elsewhere.
#pragma once

#include <string>

#include "run/results.h"

namespace oscar {

// Table, accuracy against stored bits, bars by task, errors by layer.
std::string RenderEvalReport(const EvalResults& results);

}  // namespace oscar
