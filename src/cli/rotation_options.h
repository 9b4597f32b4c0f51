// What the commands that fit or show rotations have in common.
#pragma once

#include <optional>
#include <string>

#include "oscar/status.h"
#include "rotation/recipe.h"
#include "rotation/rotation.h"

namespace oscar::cli {

// The composition given, or the published one. One that no objective would use is an error.
Result<Composition> ChooseComposition(const std::optional<std::string>& given,
                                      const ObjectivePair& objectives);

// "0.91", or "0.90-0.92" where heads differ.
std::string FormatClips(const SideRotation& side);

}  // namespace oscar::cli
