#include "emulator/access.h"

namespace oscar::emulator {

const char* NameOf(Space space) {
  switch (space) {
    case Space::kGlobal:
      return "global";
    case Space::kShared:
      return "shared";
    case Space::kCluster:
      return "cluster-shared";
    case Space::kLocal:
      return "local";
    case Space::kParameter:
      return "parameter";
    default:
      return "generic";
  }
}

std::byte* BadAccess(Warp& w, const Instruction& in, Space space, uint64_t address, uint32_t bytes,
                     uint32_t lane, bool aligned) {
  std::string what =
      fmt::format("lane {}: {} bytes at {} address {:#x}", lane, bytes, NameOf(space), address);
  if (!aligned) {
    what = "misaligned access, " + what;
  } else if (space == Space::kGlobal) {
    what = fmt::format("illegal access, {}: {}", what, w.block->memory().Describe(address, bytes));
  } else {
    const bool shared = space == Space::kShared || space == Space::kCluster;
    const uint32_t size = shared                   ? w.block->shared_bytes() + kSharedBase
                          : space == Space::kLocal ? w.local_bytes()
                                                   : w.block->parameter_bytes();
    what = fmt::format("illegal access, {}: the memory ends at {:#x}", what, size);
  }
  w.Fault(in, what);
  return nullptr;
}

std::byte* FindGlobal(Warp& w, const Instruction& in, uint64_t address, uint32_t bytes,
                      uint32_t lane) {
  Allocation found;
  if (!w.block->memory().Find(address, &found) || !found.Contains(address, bytes)) {
    return BadAccess(w, in, Space::kGlobal, address, bytes, lane, true);
  }
  w.last = found;
  return reinterpret_cast<std::byte*>(address);
}

}  // namespace oscar::emulator
