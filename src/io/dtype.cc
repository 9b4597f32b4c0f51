#include "io/dtype.h"

#include <array>
#include <cmath>
#include <limits>

#include "base/check.h"

namespace oscar {
namespace {

struct DTypeInfo {
  DType dtype;
  std::string_view name;
  size_t size;
};

constexpr std::array<DTypeInfo, 15> kDTypes = {{
    {DType::kF64, "F64", 8},
    {DType::kF32, "F32", 4},
    {DType::kF16, "F16", 2},
    {DType::kBf16, "BF16", 2},
    {DType::kF8E4M3, "F8_E4M3", 1},
    {DType::kF8E5M2, "F8_E5M2", 1},
    {DType::kI64, "I64", 8},
    {DType::kI32, "I32", 4},
    {DType::kI16, "I16", 2},
    {DType::kI8, "I8", 1},
    {DType::kU64, "U64", 8},
    {DType::kU32, "U32", 4},
    {DType::kU16, "U16", 2},
    {DType::kU8, "U8", 1},
    {DType::kBool, "BOOL", 1},
}};

const DTypeInfo& InfoOf(DType dtype) {
  const auto index = static_cast<size_t>(dtype);
  OSCAR_CHECK(index < kDTypes.size() && kDTypes[index].dtype == dtype, "dtype {}", index);
  return kDTypes[index];
}

}  // namespace

size_t SizeOf(DType dtype) { return InfoOf(dtype).size; }

std::string_view NameOf(DType dtype) { return InfoOf(dtype).name; }

std::optional<DType> DTypeFromName(std::string_view name) {
  for (const DTypeInfo& info : kDTypes) {
    if (info.name == name) return info.dtype;
  }
  return std::nullopt;
}

float F8E4M3ToFloat(uint8_t bits) {
  const int exponent = (bits >> 3) & 0xf;  // bias 7
  const int mantissa = bits & 0x7;
  float magnitude = 0;
  if (exponent == 0xf && mantissa == 0x7) {
    magnitude = std::numeric_limits<float>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(mantissa), -9);
  } else {
    magnitude = std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  }
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

}  // namespace oscar
