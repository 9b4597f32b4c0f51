#include "base/progress.h"

#include <gtest/gtest.h>

namespace oscar {
namespace {

struct FakeTerminal {
  std::string text;
  std::chrono::steady_clock::time_point time{};
  Progress::Terminal Make(bool tty) {
    return {tty, 60, [this](const std::string& s) { text += s; }, [this] { return time; }};
  }
  void Advance(double seconds) {
    time += std::chrono::duration_cast<std::chrono::steady_clock::duration>(
        std::chrono::duration<double>(seconds));
  }
};

TEST(Progress, SilentForShortWork) {
  FakeTerminal terminal;
  {
    Progress progress("work", 10, "items", terminal.Make(true));
    for (int i = 0; i < 10; ++i) {
      terminal.Advance(0.1);
      progress.Add(1);
    }
  }
  EXPECT_EQ(terminal.text, "");
}

TEST(Progress, PlainLinesEveryFiveSeconds) {
  FakeTerminal terminal;
  {
    Progress progress("fit", 100, "layers", terminal.Make(false));
    for (int i = 0; i < 100; ++i) {
      terminal.Advance(0.125);
      progress.Add(1);
    }
  }
  EXPECT_EQ(terminal.text,
            "fit: 16 of 100 layers (16%), 8 layers/s, 10.5 s left\n"
            "fit: 56 of 100 layers (56%), 8 layers/s, 5.5 s left\n"
            "fit: 96 of 100 layers (96%), 8 layers/s, 0.5 s left\n"
            "fit: 100 of 100 layers (100%), 8 layers/s, 12.5 s\n");
}

TEST(Progress, TheEndIsSaidOnce) {
  FakeTerminal terminal;
  {
    Progress progress("fit", 9, "layers", terminal.Make(false));
    terminal.Advance(3);
    progress.Add(9);
  }
  EXPECT_EQ(terminal.text, "fit: 9 of 9 layers (100%), 3 layers/s, 3.0 s\n");
}

TEST(Progress, TerminalLineIsRewrittenAndFitsTheWidth) {
  FakeTerminal terminal;
  {
    Progress progress("a label that is rather long for sixty columns", 4, "items",
                      terminal.Make(true));
    terminal.Advance(3);
    progress.Add(1);
    terminal.Advance(0.05);
    progress.Add(1);  // too soon
  }
  EXPECT_EQ(std::count(terminal.text.begin(), terminal.text.end(), '\r'), 2);
  EXPECT_EQ(std::count(terminal.text.begin(), terminal.text.end(), '\n'), 1);
  const size_t line = terminal.text.find("\x1b[K");
  EXPECT_LT(line, 61u);
}

TEST(Progress, FormatsUnits) {
  EXPECT_EQ(FormatBytes(512), "512 B");
  EXPECT_EQ(FormatBytes(1536 * 1024), "1.50 MiB");
  EXPECT_EQ(FormatDuration(65), "1 min 05 s");
  EXPECT_EQ(FormatDuration(7380), "2 h 03 min");
}

}  // namespace
}  // namespace oscar
