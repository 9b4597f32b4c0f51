// Element types of tensors on disk, with the names that safetensors files give them. Plain values;
// everything here is thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace oscar {

enum class DType : uint8_t {
  kF64,
  kF32,
  kF16,
  kBf16,
  kF8E4M3,  // the "fn" variant: no infinities, 0x7f and 0xff are NaN, largest value 448
  kF8E5M2,
  kI64,
  kI32,
  kI16,
  kI8,
  kU64,
  kU32,
  kU16,
  kU8,
  kBool,  // one byte; zero is false
};

// Bytes of one element.
size_t SizeOf(DType dtype);
// The safetensors spelling: "F32", "BF16", "F8_E4M3", "BOOL", ...
std::string_view NameOf(DType dtype);
std::optional<DType> DTypeFromName(std::string_view name);

// The value of an FP8 E4M3 (fn) code; exact.
float F8E4M3ToFloat(uint8_t bits);

}  // namespace oscar
