#include "io/tensor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "base/error_text.h"
#include "io/test_util.h"
#include "io/utf8.h"

namespace oscar {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(DTypes, NamesAndSizesRoundTrip) {
  for (const auto& [name, size] :
       std::initializer_list<std::pair<const char*, size_t>>{{"F64", 8},
                                                             {"F32", 4},
                                                             {"F16", 2},
                                                             {"BF16", 2},
                                                             {"F8_E4M3", 1},
                                                             {"F8_E5M2", 1},
                                                             {"I64", 8},
                                                             {"I32", 4},
                                                             {"I16", 2},
                                                             {"I8", 1},
                                                             {"U64", 8},
                                                             {"U32", 4},
                                                             {"U16", 2},
                                                             {"U8", 1},
                                                             {"BOOL", 1}}) {
    const auto dtype = DTypeFromName(name);
    ASSERT_TRUE(dtype.has_value()) << name;
    EXPECT_EQ(NameOf(*dtype), name);
    EXPECT_EQ(SizeOf(*dtype), size);
  }
  EXPECT_FALSE(DTypeFromName("F4").has_value());
  EXPECT_FALSE(DTypeFromName("f32").has_value());
}

// Landmarks of the OCP 8-bit format: bias 7, no infinities, one NaN a sign.
TEST(DTypes, F8E4M3) {
  EXPECT_EQ(F8E4M3ToFloat(0x00), 0.0f);
  EXPECT_TRUE(std::signbit(F8E4M3ToFloat(0x80)));
  EXPECT_EQ(F8E4M3ToFloat(0x38), 1.0f);
  EXPECT_EQ(F8E4M3ToFloat(0x7e), 448.0f);
  EXPECT_EQ(F8E4M3ToFloat(0xfe), -448.0f);
  EXPECT_EQ(F8E4M3ToFloat(0x01), std::ldexp(1.0f, -9));
  EXPECT_EQ(F8E4M3ToFloat(0x08), std::ldexp(1.0f, -6));
  EXPECT_TRUE(std::isnan(F8E4M3ToFloat(0x7f)));
  EXPECT_TRUE(std::isnan(F8E4M3ToFloat(0xff)));
  for (int bits = 1; bits < 0x7f; ++bits) {  // codes of one sign are ordered
    EXPECT_GT(F8E4M3ToFloat(static_cast<uint8_t>(bits)),
              F8E4M3ToFloat(static_cast<uint8_t>(bits - 1)));
  }
}

template <typename T>
TensorView View(DType dtype, const std::vector<T>& values) {
  return {"t", dtype, {static_cast<int64_t>(values.size())}, std::as_bytes(std::span(values))};
}

TEST(Tensors, ConvertToFloat) {
  EXPECT_THAT(*ToFloatVector(View<float>(DType::kF32, {1.5f, -2.0f})), ElementsAre(1.5f, -2.0f));
  EXPECT_THAT(*ToFloatVector(View<double>(DType::kF64, {0.1, 1e300})),
              ElementsAre(0.1f, std::numeric_limits<float>::infinity()));
  EXPECT_THAT(*ToFloatVector(View<uint16_t>(DType::kBf16, {0x3f80, 0xc000})),
              ElementsAre(1.0f, -2.0f));
  EXPECT_THAT(*ToFloatVector(View<uint16_t>(DType::kF16, {0x3c00, 0xc000, 0x0001})),
              ElementsAre(1.0f, -2.0f, std::ldexp(1.0f, -24)));
  EXPECT_THAT(*ToFloatVector(View<uint8_t>(DType::kF8E4M3, {0x38, 0xc0})),
              ElementsAre(1.0f, -2.0f));
  EXPECT_THAT(MessageOf(ToFloatVector(View<int32_t>(DType::kI32, {1}))),
              HasSubstr("tensor 't' has type I32; expected a floating type"));
  EXPECT_TRUE(ToFloatVector(View<float>(DType::kF32, {}))->empty());
}

TEST(Tensors, ReadsAtAnyAlignment) {
  std::vector<std::byte> bytes(4 * 8 + 8);
  const float values[] = {1, 2, 3, 4};
  for (size_t shift = 0; shift < 8; ++shift) {
    std::memcpy(bytes.data() + shift, values, sizeof values);
    const TensorView view{"t", DType::kF32, {4}, std::span(bytes).subspan(shift, 16)};
    EXPECT_THAT(*ToFloatVector(view), ElementsAre(1, 2, 3, 4));
    EXPECT_EQ(LoadElement<float>(view, 2), 3.0f);
  }
}

TEST(Tensors, ConvertToInts) {
  EXPECT_THAT(*ToIntVector(View<int64_t>(DType::kI64, {INT64_MIN, 7})), ElementsAre(INT64_MIN, 7));
  EXPECT_THAT(*ToIntVector(View<int32_t>(DType::kI32, {-5})), ElementsAre(-5));
  EXPECT_THAT(*ToIntVector(View<int16_t>(DType::kI16, {-5})), ElementsAre(-5));
  EXPECT_THAT(*ToIntVector(View<int8_t>(DType::kI8, {-5})), ElementsAre(-5));
  EXPECT_THAT(*ToIntVector(View<uint8_t>(DType::kU8, {255})), ElementsAre(255));
  EXPECT_THAT(*ToIntVector(View<uint16_t>(DType::kU16, {65535})), ElementsAre(65535));
  EXPECT_THAT(*ToIntVector(View<uint32_t>(DType::kU32, {UINT32_MAX})), ElementsAre(UINT32_MAX));
  EXPECT_THAT(*ToIntVector(View<uint8_t>(DType::kBool, {0, 1, 2})), ElementsAre(0, 1, 1));
  EXPECT_THAT(MessageOf(ToIntVector(View<uint64_t>(DType::kU64, {UINT64_MAX}))),
              HasSubstr("beyond"));
  EXPECT_FALSE(ToIntVector(View<float>(DType::kF32, {1})).has_value());
}

TEST(Tensors, SizesAreChecked) {
  using Shape = std::vector<int64_t>;
  EXPECT_EQ(*CheckedNumBytes(DType::kF32, Shape{}), 4u);
  EXPECT_EQ(*CheckedNumBytes(DType::kBf16, Shape{3, 5}), 30u);
  EXPECT_EQ(*CheckedNumBytes(DType::kF64, Shape{3, 0, 5}), 0u);
  EXPECT_FALSE(CheckedNumBytes(DType::kF32, Shape{-1}).has_value());
  EXPECT_FALSE(CheckedNumBytes(DType::kU8, Shape{INT64_MAX, 2}).has_value());
  EXPECT_FALSE(CheckedNumBytes(DType::kF64, Shape{int64_t{1} << 60}).has_value());
  EXPECT_FALSE(CheckedNumBytes(DType::kF64, Shape{0, int64_t{1} << 62, 4}).has_value());
  EXPECT_FALSE(CheckedNumBytes(DType::kU8, Shape(64, 2)).has_value());
}

TEST(Tensors, ExpectShape) {
  const std::vector<float> values(6);
  TensorView view = View(DType::kF32, values);
  view.shape = {2, 3};
  EXPECT_TRUE(ExpectShape(view, std::vector<int64_t>{2, 3}).ok());
  EXPECT_TRUE(ExpectShape(view, std::vector<int64_t>{-1, 3}).ok());
  EXPECT_EQ(ExpectShape(view, std::vector<int64_t>{3, 2}).message(),
            "tensor 't' has shape [2, 3], expected [3, 2]");
  EXPECT_FALSE(ExpectShape(view, std::vector<int64_t>{6}).ok());
}

TEST(ErrorText, IsOneShortPrintableLine) {
  EXPECT_EQ(Quote("a\nb\x1b[31m\xff"), "'a\\x0ab\\x1b[31m\\xff'");
  EXPECT_EQ(Quote(std::string(1000, 'x')).size(), 120u + 5u);
}

TEST(Utf8, Validation) {
  for (const char* good : {"", "abc", "d\xc3\xa9j\xc3\xa0", "\xe4\xbd\xa0", "\xf0\x9f\x98\x80",
                           "\xf4\x8f\xbf\xbf", "\xed\x9f\xbf", "\xee\x80\x80"}) {
    EXPECT_TRUE(IsValidUtf8(good)) << good;
  }
  for (const char* bad : {"\x80", "\xc3", "\xc0\x80", "\xc1\xbf", "\xe0\x80\x80", "\xe0\x9f\xbf",
                          "\xed\xa0\x80", "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80",
                          "\xf5\x80\x80\x80", "\xe4\xbd", "\xe4\xbdz", "a\xff"}) {
    EXPECT_FALSE(IsValidUtf8(bad)) << bad;
  }
}

}  // namespace
}  // namespace oscar
