#include "cli/rotation_options.h"

#include <fmt/core.h>

#include <algorithm>

namespace oscar::cli {

Result<Composition> ChooseComposition(const std::optional<std::string>& given,
                                      const ObjectivePair& objectives) {
  if (!given.has_value()) return Composition::kRHPbr;
  OSCAR_ASSIGN_OR_RETURN(const Composition composition, ParseComposition(*given));
  if (IgnoresComposition(objectives.k) && IgnoresComposition(objectives.v)) {
    return Unexpected(InvalidArgument(fmt::format(
        "--composition {}: objective {} has none; leave it out", *given, NameOf(objectives))));
  }
  return composition;
}

std::string FormatClips(const SideRotation& side) {
  const auto [low, high] = std::minmax_element(side.clip.begin(), side.clip.end());
  return *low == *high ? fmt::format("{:.2f}", *low) : fmt::format("{:.2f}-{:.2f}", *low, *high);
}

}  // namespace oscar::cli
