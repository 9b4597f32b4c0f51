#include "cli/line_editor.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace oscar::cli {
namespace {

using Event = LineBuffer::Event;

// Types, and says what the text and the cursor are: "abc|de".
std::string Typed(LineBuffer& buffer, std::string_view keys) {
  size_t used = 0;
  EXPECT_EQ(buffer.Feed(keys, &used), Event::kNone);
  EXPECT_EQ(used, keys.size());
  std::string text = buffer.text();
  return text.insert(buffer.cursor(), "|");
}
std::string Typed(std::string_view keys) {
  LineBuffer buffer;
  return Typed(buffer, keys);
}

TEST(LineBuffer, EditsByCharacter) {
  EXPECT_EQ(Typed("abc"), "abc|");
  EXPECT_EQ(Typed("ab\x7f"), "a|");
  EXPECT_EQ(Typed("\x7f\x7f"), "|");
  EXPECT_EQ(Typed("na\u00efve\x7f\x7f\x7f"), "na|");  // one key takes both bytes
  EXPECT_EQ(Typed("\U0001F600\u4f60\b"), "\U0001F600|");
  EXPECT_EQ(Typed("one two  three\x17"), "one two  |");
  EXPECT_EQ(Typed("one two  three\x17\x17"), "one |");
  EXPECT_EQ(Typed("one two\x15"), "|");
  EXPECT_EQ(Typed("one two\x1b[D\x1b[D\x1b[D\x15"), "|two");
  EXPECT_EQ(Typed("one two\x1b[D\x1b[D\x1b[D\x0b"), "one |");
  EXPECT_EQ(Typed("a\tb"), "a\tb|");
}

TEST(LineBuffer, MovesTheCursor) {
  EXPECT_EQ(Typed("\u4f60\u597d\x1b[D"), "\u4f60|\u597d");
  EXPECT_EQ(Typed("ab\x1b[D\x1b[D\x1b[D\x1b[C"), "a|b");
  EXPECT_EQ(Typed("ab\x1bOD"), "a|b");
  EXPECT_EQ(Typed("ab\x1b[Hc"), "c|ab");
  EXPECT_EQ(Typed("ab\x1b[H\x1b[Fc"), "abc|");
  EXPECT_EQ(Typed("ab\x01"
                  "c\x05"
                  "d"),
            "cabd|");
  EXPECT_EQ(Typed("ab\x1b[D\x1b[3~"), "a|");
  EXPECT_EQ(Typed("ab\x1b[D\x04"), "a|");
}

TEST(LineBuffer, OtherKeysLeaveNothingBehind) {
  EXPECT_EQ(Typed("a\x1b[1;5Cb"), "ab|");  // Ctrl-Right
  EXPECT_EQ(Typed("a\x1b[15~b"), "ab|");   // F5
  EXPECT_EQ(Typed("a\x1bOPb"), "ab|");     // F1
  EXPECT_EQ(Typed("a\x1bxb"), "ab|");      // Alt-x
  EXPECT_EQ(Typed("a\x1b[<35;10;10Mb"), "ab|");
  EXPECT_EQ(Typed("a\x0c\x12\x14"
                  "b"),
            "ab|");
  EXPECT_EQ(Typed("a\x1b\rb"), "a\nb|");  // Alt-Enter
  EXPECT_EQ(Typed("a\x1b[[Ab"), "ab|");   // F1 of Linux's console
}

TEST(LineBuffer, EscAloneDoesNotSpoilWhatFollows) {
  EXPECT_EQ(Typed("ab\x1b\x1b[D"), "a|b");         // Esc, Left
  EXPECT_EQ(Typed("ab\x1b\x1b\x1b[Dc"), "ac|b");   // twice
  EXPECT_EQ(Typed("a\x1b\u00e9b"), "a\u00e9b|");   // no half of a character
  EXPECT_EQ(Typed("a\x1bO\u00e9b"), "a\u00e9b|");  // Alt-O
  EXPECT_EQ(Typed("a\x1b[\u4f60b"), "a\u4f60b|");  // Alt-[
  EXPECT_EQ(Typed("ab\x1b[1;5\x1b[D"), "a|b");     // cut short
  EXPECT_EQ(Typed("ab\x1b[\x7f"), "a|");
  LineBuffer buffer;
  size_t used = 0;
  EXPECT_EQ(buffer.Feed("ab\x1b[\r", &used), Event::kLine);  // Enter is never swallowed
  EXPECT_EQ(buffer.Take(), "ab");
}

TEST(LineBuffer, LinesEnd) {
  LineBuffer buffer;
  size_t used = 0;
  EXPECT_EQ(buffer.Feed("one\ntwo\n", &used), Event::kLine);
  EXPECT_EQ(used, 4u);
  EXPECT_EQ(buffer.Take(), "one");
  EXPECT_EQ(buffer.text(), "");
  EXPECT_EQ(buffer.Feed("\x04", &used), Event::kEnd);
  Typed(buffer, "x\x04");
  EXPECT_EQ(buffer.Feed("\r", &used), Event::kLine);
  EXPECT_EQ(buffer.Take(), "x");
}

TEST(LineBuffer, APasteIsTextWhateverItHolds) {
  const std::string keys = "see: \x1b[200~one\r\ntwo\rthree\n\x7f\x04\x1b[A\x1b[201~!";
  const std::string expected = "see: one\ntwo\nthree\n\x7f\x04\x1b[A!|";
  EXPECT_EQ(Typed(keys), expected);
  LineBuffer split;  // the same, byte by byte
  for (const char key : keys) Typed(split, {&key, 1});
  EXPECT_EQ(Typed(split, ""), expected);
  split.Clear();
  Typed(split, "\x1b[200~half");
  split.Clear();  // Ctrl-C in the middle
  EXPECT_EQ(Typed(split, "next"), "next|");
}

TEST(LineBuffer, CallsLinesBack) {
  LineBuffer buffer;
  for (const char* line : {"one\r", "two\r", "two\r", "\r"}) {
    size_t used = 0;
    ASSERT_EQ(buffer.Feed(line, &used), Event::kLine);
    buffer.Take();
  }
  EXPECT_EQ(Typed(buffer, "draft\x1b[A"), "two|");
  EXPECT_EQ(Typed(buffer, "\x1b[A"), "one|");
  EXPECT_EQ(Typed(buffer, "\x1b[A"), "one|");
  EXPECT_EQ(Typed(buffer, "\x1b[B"), "two|");
  EXPECT_EQ(Typed(buffer, "\x1b[B"), "draft|");
  EXPECT_EQ(Typed(buffer, "\x1b[B"), "draft|");
}

TEST(LineBuffer, ShowsWhatIsAroundTheCursor) {
  LineBuffer buffer;
  int column = -1;
  EXPECT_EQ(buffer.Render(10, &column), "");
  EXPECT_EQ(column, 0);
  Typed(buffer, "0123456789abcdef");
  EXPECT_EQ(buffer.Render(10, &column), "789abcdef");
  EXPECT_EQ(column, 9);
  Typed(buffer, "\x1b[D\x1b[D");
  EXPECT_EQ(buffer.Render(10, &column), "789abcdef");
  EXPECT_EQ(column, 7);
  Typed(buffer, "\x01");
  EXPECT_EQ(buffer.Render(10, &column), "0123456789");
  EXPECT_EQ(column, 0);
  Typed(buffer,
        "\x05\x15"
        "a\u4f60\u4f60\u4f60\u4f60\u4f60");  // two columns each
  EXPECT_EQ(buffer.Render(10, &column), "\u4f60\u4f60\u4f60\u4f60");
  EXPECT_EQ(column, 8);
  Typed(buffer, "\x15\x1b[200~a\rb\x1b[31m\x1b[201~");
  EXPECT_EQ(buffer.Render(10, &column), "a\u21b5b[31m");  // cannot drive the terminal
  Typed(buffer, "\x15\x1b[200~a\u2028b\u0085c\u202ed\x1b[201~");
  EXPECT_EQ(buffer.Render(10, &column), "a\u21b5bcd");
  EXPECT_EQ(column, 5);
  buffer.Clear();
  Typed(buffer, "\xe4\xbd");  // half a character has arrived
  buffer.Render(10, &column);
  EXPECT_EQ(Typed(buffer, "\xa0\x7f"), "|");
}

TEST(LineBuffer, LongLinesAreQuick) {
  // Ten megabytes as a terminal delivers them, drawn after every read, pasted and typed.
  const std::string block(4000, 'x');
  for (const bool pasted : {false, true}) {
    LineBuffer buffer;
    const auto start = std::chrono::steady_clock::now();
    Typed(buffer, pasted ? "b\x1b[D\x1b[200~" : "");
    for (int i = 0; i < 2500; ++i) {
      size_t used = 0;
      ASSERT_EQ(buffer.Feed(block, &used), Event::kNone);
      int column = 0;
      buffer.Render(80, &column);
    }
    size_t used = 0;
    if (pasted) buffer.Feed("\x1b[201~", &used);
    EXPECT_EQ(buffer.Feed("\r", &used), Event::kLine);
    EXPECT_EQ(buffer.Take().size(), 2500 * block.size() + (pasted ? 1 : 0));
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  }
}

}  // namespace
}  // namespace oscar::cli
