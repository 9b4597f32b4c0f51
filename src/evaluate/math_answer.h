// The final answers of mathematics problems: where an output states one, and when two written forms
// mean the same. Answers are LaTeX as models and data sets write it: fractions, roots, tuples,
// intervals, sets, matrices, units, percent signs, thousands separators.
//
// Two expressions are the same when they have the same value; with free letters, when they agree at
// several points (i is the imaginary unit). What is no expression is compared as text. Decimals are
// not rounded: 0.333 is not 1/3. Free functions on text of any origin: nesting and length are
// bounded. Safe from any thread.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace oscar {

// The argument of the last \boxed or \fbox whose braces close.
std::optional<std::string> LastBoxed(std::string_view output);

// What the output gives as its answer: the last box; else what follows the last "answer is" or
// "Answer:" on its line; else the last formula between dollar signs; else the last number.
std::optional<std::string> FindMathAnswer(std::string_view output);

// The last number of a text, with signs, decimals and thousands separators: "$1,234.50." is 1234.5.
std::optional<double> LastNumber(std::string_view text);

bool IsSameMathAnswer(std::string_view a, std::string_view b);

}  // namespace oscar
