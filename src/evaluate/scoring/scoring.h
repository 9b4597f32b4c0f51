// How an output becomes a score. Every scorer looks at what follows the last </think>. Stateless;
// safe from any thread.
#pragma once

#include <string>
#include <string_view>

#include "oscar/status.h"
#include "tasks/suite.h"

namespace oscar {

// [0, 1]. An error says that the output could not be judged at all (no python3), not that it is
// wrong.
Result<double> ScoreOutput(Scorer scorer, const EvalItem& item, std::string_view output);

// What the scorer reads out of the output, for records and tests: the code block, the letter, the
// boxed answer; the answer itself where it compares texts.
std::string ReadAnswer(Scorer scorer, std::string_view output);

}  // namespace oscar
