#include "rotation/spectrum.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <string_view>
#include <vector>

namespace oscar {
namespace {

constexpr std::array<std::string_view, 9> kEighths = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
// Decades shown at most: below that a covariance of BF16 data is rounding.
constexpr double kMaxDecades = 12;

}  // namespace

std::string SpectrumPlot(std::span<const float> eigenvalues, int width, int height) {
  width = std::max(width, 8);
  height = std::max(height, 2);
  std::vector<float> sorted(eigenvalues.begin(), eigenvalues.end());
  // NaN has no order: it goes to the floor like everything that has no logarithm.
  for (float& x : sorted) x = std::isfinite(x) && x > 0 ? x : 0.0f;
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  if (sorted.empty() || sorted[0] == 0.0f) return "no positive eigenvalues\n";

  const double top = std::log10(static_cast<double>(sorted[0]));
  float smallest = sorted[0];
  double sum = 0;
  for (const float x : sorted) {
    if (x > 0) smallest = x;
    sum += x;
  }
  const double bottom = std::max(std::log10(static_cast<double>(smallest)), top - kMaxDecades);
  const double range = std::max(top - bottom, 1e-9);

  const auto count = static_cast<int64_t>(sorted.size());
  const auto columns = std::min<int64_t>(width, count);
  std::vector<int> eighths(static_cast<size_t>(columns));
  for (int64_t column = 0; column < columns; ++column) {
    const int64_t first = column * count / columns;
    const int64_t last = std::max((column + 1) * count / columns, first + 1);
    double mean = 0;
    for (int64_t i = first; i < last; ++i) {
      const float x = sorted[static_cast<size_t>(i)];
      mean += x > 0 ? std::max(std::log10(static_cast<double>(x)), bottom) : bottom;
    }
    mean /= static_cast<double>(last - first);
    // A flat spectrum fills the plot; the smallest value of any other keeps one eighth.
    const double share = top - bottom < 1e-9 ? 1.0 : (mean - bottom) / range;
    eighths[static_cast<size_t>(column)] =
        1 + static_cast<int>(std::lround(share * (8 * height - 1)));
  }

  std::string out;
  for (int line = height - 1; line >= 0; --line) {
    if (line == height - 1) {
      out += fmt::format("{:>9.2e} ", sorted[0]);
    } else if (line == 0) {
      out += fmt::format("{:>9.2e} ", std::pow(10.0, bottom));
    } else {
      out += std::string(10, ' ');
    }
    for (const int level : eighths) {
      out += kEighths[static_cast<size_t>(std::clamp(level - 8 * line, 0, 8))];
    }
    out += '\n';
  }
  double held = 0;
  int64_t needed = 0;
  while (needed < count && held < 0.9 * sum) held += sorted[static_cast<size_t>(needed++)];
  out +=
      fmt::format("{:10}{} eigenvalues, log scale; {} hold 90% of the trace\n", "", count, needed);
  return out;
}

}  // namespace oscar
