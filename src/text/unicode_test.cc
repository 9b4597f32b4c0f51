#include "text/unicode.h"

#include <gtest/gtest.h>

#include <set>

#include "base/rng.h"
#include "text/detokenizer.h"

namespace oscar {
namespace {

TEST(UnicodeTest, RoundTripsEveryCodePoint) {
  for (char32_t c = 0; c < 0x110000; ++c) {
    std::string text;
    AppendUtf8(c, &text);
    const Utf8Step step = DecodeUtf8(text, 0);
    const bool surrogate = c >= 0xD800 && c <= 0xDFFF;
    ASSERT_EQ(step.valid, !surrogate);
    if (!surrogate) {
      ASSERT_EQ(step.code_point, c);
      ASSERT_EQ(step.length, text.size());
    }
  }
}

// The table of "maximal subparts" in the Unicode standard, section 3.9.
TEST(UnicodeTest, ReplacesMaximalSubparts) {
  const std::string r(kReplacementUtf8);
  EXPECT_EQ(ReplaceInvalidUtf8("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41"),
            r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(ReplaceInvalidUtf8("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41"),
            r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(ReplaceInvalidUtf8("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42"),
            r + r + r + r + r + "A" + r + r + "B");
  EXPECT_EQ(ReplaceInvalidUtf8("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41"), r + r + r + r + "A");
}

TEST(UnicodeTest, FindsTheFirstInvalidByte) {
  EXPECT_TRUE(IsValidUtf8("a\xC3\xA9\xF0\x9F\x98\x80"));
  EXPECT_EQ(FindInvalidUtf8("ab\xC3"), 2u);
  EXPECT_EQ(FindInvalidUtf8("ab\xF5zz"), 2u);
}

TEST(UnicodeTest, ByteAlphabetIsABijection) {
  std::set<char32_t> seen;
  for (int byte = 0; byte < 256; ++byte) {
    const char32_t symbol = ByteAlphabet()[static_cast<size_t>(byte)];
    seen.insert(symbol);
    EXPECT_EQ(ByteOfAlphabet(symbol), byte);
  }
  EXPECT_EQ(seen.size(), 256u);
  EXPECT_EQ(ByteAlphabet()[' '], 0x120u);   // the familiar dotted G
  EXPECT_EQ(ByteAlphabet()['\n'], 0x10Au);  // dotted C
  EXPECT_EQ(ByteOfAlphabet(0x144), -1);
  EXPECT_EQ(ByteOfAlphabet(' '), -1);
}

TEST(UnicodeTest, NfcCarriesMarks) {
  std::string text = "ae\xCC\x81z e\xCC\x81";  // a e ◌́ z space e ◌́
  std::vector<bool> marks = {true, true, false, false, true, true, true, true, true};
  ASSERT_TRUE(NormalizeNfc(&text, &marks));
  EXPECT_EQ(text, "a\xC3\xA9z \xC3\xA9");
  // The first é has an unmarked part, so neither of its bytes is marked.
  EXPECT_EQ(marks, (std::vector<bool>{true, false, false, true, true, true, true}));
}

TEST(UnicodeTest, NfcIsIdempotentAndIndependentOfSplitsAtAscii) {
  const Philox rng(11, 0);
  const std::vector<char32_t> pool = {'a',     'e',    0x301,   0x323, 0x30A, 0x1100, 0x1161,
                                      0x11A8,  0xAC00, 0x345,   0x3B1, 0xE9,  0x212B, 0x0958,
                                      0x1D15E, 0x4E00, 0x1F600, ' ',   0x9C7, 0x9BE,  0x315};
  for (uint64_t round = 0; round < 2000; ++round) {
    std::string left, right = "x";
    for (uint64_t i = 0; i < 8; ++i) {
      AppendUtf8(pool[rng.Below(round * 16 + i, static_cast<uint32_t>(pool.size()))], &left);
      AppendUtf8(pool[rng.Below(round * 16 + 8 + i, static_cast<uint32_t>(pool.size()))], &right);
    }
    std::string whole = left + right;
    NormalizeNfc(&whole, nullptr);
    std::string again = whole;
    EXPECT_FALSE(NormalizeNfc(&again, nullptr));
    NormalizeNfc(&left, nullptr);
    NormalizeNfc(&right, nullptr);
    ASSERT_EQ(whole, left + right);
  }
}

// As the tokenizers library (0.23) normalises: what Unicode 10 and later brought stays where it is.
TEST(UnicodeTest, NfcIsThatOfUnicode9) {
  const auto normal = [](std::initializer_list<char32_t> points) {
    std::string text;
    for (const char32_t c : points) AppendUtf8(c, &text);
    NormalizeNfc(&text, nullptr);
    std::vector<char32_t> out;
    for (size_t at = 0; at < text.size();) {
      const Utf8Step step = DecodeUtf8(text, at);
      out.push_back(step.code_point);
      at += step.length;
    }
    return out;
  };
  using Points = std::vector<char32_t>;
  EXPECT_EQ(normal({'x', 0x301, 0x323}), (Points{'x', 0x323, 0x301}));
  for (const char32_t newer : {0x899, 0x8CF, 0x9FE, 0x1AC5, 0x10F47, 0x1E136, 0x1E4EE}) {
    EXPECT_EQ(normal({'x', 0x301, newer}), (Points{'x', 0x301, newer}));
    EXPECT_EQ(normal({'x', newer, 0x301, 0x323}), (Points{'x', newer, 0x323, 0x301}));
    EXPECT_EQ(normal({'e', newer, 0x301}), (Points{'e', newer, 0x301}));
  }
  EXPECT_EQ(normal({0x11935, 0x11930}), (Points{0x11935, 0x11930}));
  EXPECT_EQ(normal({0x11938}), (Points{0x11938}));
  EXPECT_EQ(normal({0x11938, 0x301, 0x323}), (Points{0x11938, 0x323, 0x301}));
}

// The sums of the standard, section 3.12: a leading and a vowel jamo make a syllable, that and a
// trailing one another, and no other jamo joins or goes, U+11A7 (the zero of the last sum)
// included.
TEST(UnicodeTest, NfcOfJamoIsArithmetic) {
  for (char32_t second = 0x1100; second <= 0x11FF; ++second) {
    for (const char32_t first : {U'\u1100', U'\uAC00', U'\uB4DC', U'\uAC01', U'\u1112', U'a'}) {
      std::string text, expected;
      AppendUtf8(first, &text);
      AppendUtf8(second, &text);
      const bool leads = first >= 0x1100 && first <= 0x1112;
      const bool open = first >= 0xAC00 && (first - 0xAC00) % 28 == 0;
      if (leads && second >= 0x1161 && second <= 0x1175) {
        AppendUtf8(0xAC00 + ((first - 0x1100) * 21 + (second - 0x1161)) * 28, &expected);
      } else if (open && second > 0x11A7 && second <= 0x11C2) {
        AppendUtf8(first + (second - 0x11A7), &expected);
      } else {
        expected = text;
      }
      NormalizeNfc(&text, nullptr);
      EXPECT_EQ(text, expected) << std::hex << static_cast<uint32_t>(first) << ' '
                                << static_cast<uint32_t>(second);
    }
  }
}

TEST(UnicodeTest, NfcOfManyMarksIsNotQuadratic) {
  // Alternating classes force a full reordering: 400,000 marks would need 4e10 swaps.
  std::string text = "a";
  for (int i = 0; i < 200000; ++i) text += "\xCC\x81\xCC\xA3";
  EXPECT_TRUE(NormalizeNfc(&text, nullptr));
  EXPECT_EQ(text.substr(0, 3), "\xE1\xBA\xA1");  // a with dot below
}

TEST(Utf8StreamTest, AnySplitGivesTheSameText) {
  const Philox rng(5, 0);
  for (uint64_t round = 0; round < 500; ++round) {
    std::string bytes;
    for (uint64_t i = 0; i < 24; ++i) {
      // Lead and trailing bytes are frequent, so that broken sequences of all kinds occur.
      static constexpr uint8_t kPool[] = {'a',  0x80, 0xBF, 0xC3, 0xE2, 0x82,
                                          0xAC, 0xF0, 0x9F, 0x98, 0xED, 0xFF};
      bytes.push_back(static_cast<char>(kPool[rng.Below(round * 64 + i, sizeof kPool)]));
    }
    Utf8Stream stream;
    std::string out;
    for (size_t at = 0; at < bytes.size();) {
      const size_t count = 1 + rng.Below(round * 64 + 32 + at, 4);
      std::string piece;
      stream.Push(std::string_view(bytes).substr(at, count), &piece);
      EXPECT_TRUE(IsValidUtf8(piece));
      out += piece;
      at += count;
    }
    stream.Finish(&out);
    EXPECT_EQ(out, ReplaceInvalidUtf8(bytes));
  }
}

}  // namespace
}  // namespace oscar
