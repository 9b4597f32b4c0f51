// A spectrum as text, for terminals.
#pragma once

#include <span>
#include <string>

namespace oscar {

// Eigenvalues, largest first, as columns of blocks on a log scale: `width` columns (at least 8; the
// mean of log10 over the eigenvalues that share one) and `height` lines (at least 2), with the
// scale at the left and a caption below. Values that are not positive and finite lie on the floor.
// Every line ends in a newline.
std::string SpectrumPlot(std::span<const float> eigenvalues, int width, int height);

}  // namespace oscar
