// From addresses to memory, with the checks a device makes and some it does not.
#pragma once

#include <fmt/core.h>

#include "emulator/machine.h"

namespace oscar::emulator {

enum class Space : uint8_t { kGlobal, kShared, kLocal, kParameter, kGeneric, kCluster };

const char* NameOf(Space space);

// Says what is wrong with an access; always null.
std::byte* BadAccess(Warp& w, const Instruction& in, Space space, uint64_t address, uint32_t bytes,
                     uint32_t lane, bool aligned);
std::byte* FindGlobal(Warp& w, const Instruction& in, uint64_t address, uint32_t bytes,
                      uint32_t lane);

// The memory of `bytes` at an address; null, with a fault, where they do not lie in one allocation
// or are not aligned to their size.
template <Space kSpace>
inline std::byte* Access(Warp& w, const Instruction& in, uint64_t address, uint32_t bytes,
                         uint32_t lane, uint32_t align) {
  if ((address & (align - 1)) != 0) {
    return BadAccess(w, in, kSpace, address, bytes, lane, false);
  }
  if constexpr (kSpace == Space::kGlobal) {
    if (w.last.Contains(address, bytes)) return reinterpret_cast<std::byte*>(address);
    return FindGlobal(w, in, address, bytes, lane);
  } else if constexpr (kSpace == Space::kShared) {
    std::byte* at = w.block->Shared(address, bytes);
    return at != nullptr ? at : BadAccess(w, in, kSpace, address, bytes, lane, true);
  } else if constexpr (kSpace == Space::kCluster) {
    std::byte* at = w.block->SharedInCluster(address, bytes);
    return at != nullptr ? at : BadAccess(w, in, kSpace, address, bytes, lane, true);
  } else if constexpr (kSpace == Space::kLocal) {
    const bool inside = address <= w.local_bytes() && bytes <= w.local_bytes() - address;
    return inside ? w.local(static_cast<int>(lane)) + address
                  : BadAccess(w, in, kSpace, address, bytes, lane, true);
  } else if constexpr (kSpace == Space::kParameter) {
    const uint32_t size = w.block->parameter_bytes();
    const bool inside = address <= size && bytes <= size - address;
    return inside ? const_cast<std::byte*>(w.block->parameters()) + address
                  : BadAccess(w, in, kSpace, address, bytes, lane, true);
  } else {
    if (address - kSharedWindow < kWindowBytes) {
      return Access<Space::kShared>(w, in, address - kSharedWindow, bytes, lane, align);
    }
    if (address - kLocalWindow < kWindowBytes) {
      return Access<Space::kLocal>(w, in, address - kLocalWindow, bytes, lane, align);
    }
    return Access<Space::kGlobal>(w, in, address, bytes, lane, align);
  }
}

// The address of a lane: a base of 4 or 8 bytes, and the instruction's offset.
template <typename Base>
inline uint64_t AddressOf(const Warp& w, const Instruction& in, uint32_t place, uint32_t lane) {
  return static_cast<uint64_t>(
      static_cast<Base>(w.R<Base>(place)[lane] + static_cast<Base>(in.imm)));
}

}  // namespace oscar::emulator
