// What the stand-in for cuTensorMapEncodeTiled writes into a CUtensorMap, for the copies that read
// it.
#pragma once

#include <cstdint>

namespace oscar::emulator {

struct TensorMap {
  static constexpr uint64_t kMagic = 0x70616d726f736e74;
  uint64_t magic, base;
  uint64_t size[2], pitch;  // columns and rows; bytes
  uint32_t box[2], element_bytes, swizzled;
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace oscar::emulator
