// The value of a LaTeX expression with letters at given points. Part of math_answer.
#pragma once

#include <complex>
#include <optional>
#include <string_view>

namespace oscar {

// `sample` chooses the values of free letters: the same letter has the same value in every
// expression of one sample. Nothing where the text is no expression.
std::optional<std::complex<double>> EvaluateMath(std::string_view latex, int sample);

}  // namespace oscar
