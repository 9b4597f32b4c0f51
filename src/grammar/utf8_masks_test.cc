#include "grammar/utf8_masks.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace oscar {
namespace {

TEST(Utf8Masks, ForbidWhatMakesNoUtf8) {
  const std::vector<std::string> tokens = {
      "",         "\x80",  "\x9f",      "\xa0", "\x8f", "\x90",     "a",           "\xed\xa0\x80",
      "\xe0\x9f", "x\xc0", "\xff<end>", "\xed", "é",    "\xf0\x90", "\xed\x9f\xbf"};
  const Utf8Masks masks(tokens);
  const auto allowed = [&](Utf8Masks::State state) {
    std::vector<uint32_t> mask(1, ~uint32_t{0});
    masks.Apply(state, mask);
    std::string bits;
    for (size_t i = 0; i < tokens.size(); ++i) bits += (mask[0] >> i & 1) != 0 ? '1' : '0';
    return bits;
  };
  // Tokens that are no text are the grammar's to decide.
  EXPECT_EQ(allowed(Utf8Masks::kAnywhere), "111111100011111");
  EXPECT_EQ(allowed(Utf8Masks::After("a\xe0")), "100100000010000");
  EXPECT_EQ(allowed(Utf8Masks::After("\xed")), "111011000010000");
  EXPECT_EQ(allowed(Utf8Masks::After("\xf0")), "101101000010000");
  EXPECT_EQ(allowed(Utf8Masks::After("\xf4")), "110010000010000");
  EXPECT_EQ(masks.After(11), Utf8Masks::After("\xed"));
  EXPECT_EQ(masks.After(12), Utf8Masks::kAnywhere);
  EXPECT_EQ(Utf8Masks::After(""), Utf8Masks::kAnywhere);
}

}  // namespace
}  // namespace oscar
