// What cuTensorMapEncodeTiled writes here and tensor copies read: matrices, with 128-byte swizzle
// or none.
#pragma once

#include <cstdint>

namespace oscar::emulator {

struct TensorMap {
  static constexpr uint64_t kMagic = 0x70616d726f736e74;
  uint64_t magic = 0;
  uint64_t address = 0, row_bytes = 0, rows = 0, pitch = 0;
  uint32_t element_bytes = 0, box_bytes = 0, box_rows = 0, swizzled = 0;
};
static_assert(sizeof(TensorMap) <= 128);

// The driver's function; null under any other name.
void* TensorMapEncoder(const char* name);

}  // namespace oscar::emulator
