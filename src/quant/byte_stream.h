// Sequential writing and reading of an encoded tile: codes packed low bits first (code i takes bits
// [i b, (i + 1) b) of its run, little endian), metadata numbers in their stored type. A run of
// codes always fills whole bytes. Not owning; the caller has checked the size of the span.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "quant/row_quantizer.h"

namespace oscar {

constexpr size_t MetaBytes(MetaType type) { return type == MetaType::kFp32 ? 4 : 2; }
// REQUIRES: count * bits is a multiple of 8.
constexpr size_t CodeBytes(size_t count, int bits) { return count * static_cast<size_t>(bits) / 8; }

class ByteWriter {
 public:
  explicit ByteWriter(std::span<std::byte> bytes) : bytes_(bytes) {}
  void Codes(std::span<const uint8_t> codes, int bits);
  // `value` is already rounded to `type`.
  void Meta(float value, MetaType type);
  void Byte(uint8_t value);
  size_t written() const { return at_; }

 private:
  std::span<std::byte> bytes_;
  size_t at_ = 0;
};

class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  void Codes(std::span<uint8_t> codes, int bits);
  float Meta(MetaType type);
  uint8_t Byte();

 private:
  std::span<const std::byte> bytes_;
  size_t at_ = 0;
};

}  // namespace oscar
