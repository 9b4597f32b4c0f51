// The final answers of mathematics problems: where an output states one, and when two written forms
// mean the same. Answers are LaTeX as models and data sets write it: fractions, roots, tuples,
// intervals, sets, matrices, equations, units, percent signs, thousands separators.
//
// Two expressions are the same when they have the same value; with free letters, when they agree at
// several points, of both signs (i is the imaginary unit). Rational values are compared exactly,
// others within their rounding; decimals are not rounded: 0.333 is not 1/3. Equations are the same
// up to a constant factor, inequalities up to a positive one. Letters are numbers, whose products
// commute: AB is BA. What is no expression is compared as text. Free functions on text of any
// origin: nesting, length and work are bounded. Safe from any thread.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace oscar {

// The argument of the last \boxed or \fbox whose braces close.
std::optional<std::string> LastBoxed(std::string_view output);

// What the output gives as its answer: the last box; else what follows the last "answer is" or
// "Answer:"; else the last formula between dollar signs or \( \); else the last number. A dollar
// sign opens a formula where no space follows it, and closes one where no space precedes and no
// digit follows it: elsewhere it is money.
std::optional<std::string> FindMathAnswer(std::string_view output);

// The number that the output gives as its answer (GSM8K): the last box, where it has digits; else
// what follows the last "####"; else what follows the last "answer is" or "Answer:"; else the last
// number.
std::optional<std::string> FindNumberAnswer(std::string_view output);

// The last number of a text in plain digits, with its sign: "$1,234.50." is 1234.50. A fraction or
// a power belongs to its number ("2/5"); the powers of units (m^2) and indices are none, and where
// the last is a time (12:30) or a date there is none.
std::optional<std::string> LastNumber(std::string_view text);

bool IsSameMathAnswer(std::string_view a, std::string_view b);

// Whether the text is one expression, or an equation that ends with one.
bool IsMathExpression(std::string_view text);

}  // namespace oscar
