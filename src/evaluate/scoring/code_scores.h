// Scores of answers that are programs: the code is found in the answer and run with the published
// tests in a sandbox. Stateless; safe from any thread. The functions that run code block for as
// long as the tests may take.
#pragma once

#include <string>
#include <string_view>

#include "oscar/status.h"
#include "tasks/suite.h"

namespace oscar {

// The inside of the first fenced block of Python, else of the first block that names no language,
// else all of the text. The last block of Python may lack its end.
std::string FirstPythonBlock(std::string_view text);

// The inside of the last fenced block of any kind, else all of the text.
std::string LastCodeBlock(std::string_view text);

// 1 where every test passes, else 0. Errors as of RunPython.
Result<double> HumanEvalScore(const EvalItem& item, std::string_view output);
Result<double> LiveCodeScore(const EvalItem& item, std::string_view output);

}  // namespace oscar
