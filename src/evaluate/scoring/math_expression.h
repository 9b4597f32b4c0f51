// The value of a LaTeX expression at a given point. Part of math_answer.
//
// Values are carried twice. The approximation is a complex double with a bound on its rounding
// error. Where a value is rational (+ - * /, whole powers, factorials and binomials of numbers,
// letters and i) it is also carried exactly, as its residue modulo a prime of 61 bits: two
// rationals of any length are then equal when their residues are, without a number that could grow.
// Pure functions on text of any origin: length, nesting and loops are bounded. Safe from any
// thread.
#pragma once

#include <complex>
#include <cstdint>
#include <optional>
#include <string_view>

namespace oscar {

// Letters are positive at the first points; at the others their signs vary so that any two differ
// in sign at one of them. Magnitudes lie in [1/4, 16).
inline constexpr int kMathPoints = 16;

struct MathValue {
  std::complex<double> value;
  double error = 0;               // bound on |value - the true one|
  std::optional<uint64_t> exact;  // residue, where the value is rational
  bool is_defined = true;         // no: a pole, or too large, at this point
  bool has_letters = false;       // it may differ at another point
  bool leaves_reals = false;      // a root, logarithm or the like of a real number was not real
};

// `point` in [0, kMathPoints) chooses the values of free letters: a letter has the same value in
// every expression at one point. Nothing where the text is no expression.
std::optional<MathValue> EvaluateMath(std::string_view latex, int point);

// Whether both are defined and equal: exactly where both are exact, else within their rounding.
bool IsSameMathValue(const MathValue& a, const MathValue& b);

}  // namespace oscar
