// Virtual registers to slots that registers of other times share, so that a warp's file fits the
// host's caches.
#pragma once

#include <vector>

#include "emulator/ptx_parser.h"

namespace oscar::emulator {

// The slot of every register among those of its width; -1 where it is not used.
std::vector<int> AssignSlots(const Body& body);

}  // namespace oscar::emulator
