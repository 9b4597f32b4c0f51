#include "quant/byte_stream.h"

#include <bit>

#include "base/check.h"

namespace oscar {

void ByteWriter::Codes(std::span<const uint8_t> codes, int bits) {
  OSCAR_CHECK(codes.size() * static_cast<size_t>(bits) % 8 == 0);
  OSCAR_CHECK(at_ + CodeBytes(codes.size(), bits) <= bytes_.size());
  uint32_t pending = 0;
  int filled = 0;
  for (const uint8_t code : codes) {
    pending |= static_cast<uint32_t>(code) << filled;
    for (filled += bits; filled >= 8; filled -= 8, pending >>= 8) {
      bytes_[at_++] = static_cast<std::byte>(pending & 0xffu);
    }
  }
}

void ByteWriter::Meta(float value, MetaType type) {
  uint32_t word = std::bit_cast<uint32_t>(value);
  if (type == MetaType::kFp16) word = SaturateToFp16(value).bits;
  if (type == MetaType::kBf16) word = ToBf16(value).bits;
  for (size_t i = 0; i < MetaBytes(type); ++i) Byte(static_cast<uint8_t>(word >> (8 * i)));
}

void ByteWriter::Byte(uint8_t value) {
  OSCAR_CHECK(at_ < bytes_.size());
  bytes_[at_++] = static_cast<std::byte>(value);
}

void ByteReader::Codes(std::span<uint8_t> codes, int bits) {
  OSCAR_CHECK(at_ + CodeBytes(codes.size(), bits) <= bytes_.size());
  uint32_t pending = 0;
  int available = 0;
  for (uint8_t& code : codes) {
    if (available < bits) {
      pending |= static_cast<uint32_t>(bytes_[at_++]) << available;
      available += 8;
    }
    code = static_cast<uint8_t>(pending & ((1u << bits) - 1u));
    pending >>= bits;
    available -= bits;
  }
}

float ByteReader::Meta(MetaType type) {
  uint32_t word = 0;
  for (size_t i = 0; i < MetaBytes(type); ++i) word |= static_cast<uint32_t>(Byte()) << (8 * i);
  if (type == MetaType::kFp16) return ToFloat(Fp16{static_cast<uint16_t>(word)});
  if (type == MetaType::kBf16) return ToFloat(Bf16{static_cast<uint16_t>(word)});
  return std::bit_cast<float>(word);
}

uint8_t ByteReader::Byte() {
  OSCAR_CHECK(at_ < bytes_.size());
  return static_cast<uint8_t>(bytes_[at_++]);
}

}  // namespace oscar
