#include "base/progress.h"

#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace oscar {
namespace {

constexpr double kSilentSeconds = 2.0;
constexpr double kTtySeconds = 0.1;
constexpr double kPlainSeconds = 5.0;

double Seconds(std::chrono::steady_clock::duration d) {
  return std::chrono::duration<double>(d).count();
}

std::string FormatCount(double amount, const std::string& unit) {
  if (unit == "B") return FormatBytes(static_cast<uint64_t>(amount));
  if (amount >= 1e7) return fmt::format("{:.1f}M {}", amount / 1e6, unit);
  if (amount >= 1e4) return fmt::format("{:.1f}k {}", amount / 1e3, unit);
  if (amount >= 100 || amount == static_cast<uint64_t>(amount)) {
    return fmt::format("{:.0f} {}", amount, unit);
  }
  return fmt::format("{:.1f} {}", amount, unit);
}

}  // namespace

std::string FormatDuration(double seconds) {
  if (seconds < 60) return fmt::format("{:.1f} s", seconds);
  const auto whole = static_cast<uint64_t>(std::llround(seconds));
  if (whole < 3600) return fmt::format("{} min {:02} s", whole / 60, whole % 60);
  return fmt::format("{} h {:02} min", whole / 3600, whole % 3600 / 60);
}

std::string FormatBytes(uint64_t bytes) {
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes) / 1024;
  int unit = 0;
  while (value >= 1024 && unit < 3) {
    value /= 1024;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", value, value < 10 ? 2 : 1, kUnits[unit]);
}

Progress::Terminal Progress::Terminal::Stderr() {
  Terminal terminal;
  terminal.is_tty = ::isatty(STDERR_FILENO) == 1;
  winsize size{};
  if (terminal.is_tty && ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    terminal.columns = size.ws_col;
  }
  terminal.write = [](const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stderr);
    std::fflush(stderr);
  };
  terminal.now = [] { return std::chrono::steady_clock::now(); };
  return terminal;
}

Progress::Progress(std::string label, uint64_t total, std::string unit, Terminal terminal)
    : label_(std::move(label)),
      total_(total),
      unit_(std::move(unit)),
      terminal_(std::move(terminal)),
      start_(terminal_.now()),
      shown_(start_) {}

Progress::~Progress() { Finish(); }

void Progress::Add(uint64_t amount) {
  std::lock_guard lock(mutex_);
  if (finished_) return;
  done_ += amount;
  const auto now = terminal_.now();
  const double since_start = Seconds(now - start_);
  if (since_start < kSilentSeconds) return;
  const double wait = terminal_.is_tty ? kTtySeconds : kPlainSeconds;
  if (visible_ && Seconds(now - shown_) < wait) return;
  visible_ = true;
  if (!terminal_.is_tty && total_ > 0 && done_ >= total_) return;  // Finish() says so, once
  shown_ = now;
  Show(now, /*last=*/false);
}

void Progress::Finish() {
  std::lock_guard lock(mutex_);
  if (finished_) return;
  finished_ = true;
  if (visible_) Show(terminal_.now(), /*last=*/true);
}

void Progress::Show(std::chrono::steady_clock::time_point now, bool last) {
  const double elapsed = std::max(Seconds(now - start_), 1e-9);
  const double rate = static_cast<double>(done_) / elapsed;
  std::string counts = FormatCount(static_cast<double>(done_), unit_);
  if (total_ > 0) {
    counts = fmt::format("{} of {}", unit_ == "B" ? FormatBytes(done_) : fmt::format("{}", done_),
                         FormatCount(static_cast<double>(total_), unit_));
  }
  std::string tail = fmt::format("{}/s", FormatCount(rate, unit_));
  if (last) {
    tail += fmt::format(", {}", FormatDuration(elapsed));
  } else if (total_ > done_ && rate > 0) {
    tail += fmt::format(", {} left", FormatDuration(static_cast<double>(total_ - done_) / rate));
  }
  if (!terminal_.is_tty) {
    const std::string percent = total_ > 0
                                    ? fmt::format(" ({:.0f}%)", 100.0 * static_cast<double>(done_) /
                                                                    static_cast<double>(total_))
                                    : "";
    terminal_.write(fmt::format("{}: {}{}, {}\n", label_, counts, percent, tail));
    return;
  }
  std::string line = fmt::format("{} ", label_);
  if (total_ > 0) {
    constexpr int kBar = 24;
    const double fraction = std::min(1.0, static_cast<double>(done_) / static_cast<double>(total_));
    const int full = static_cast<int>(fraction * kBar);
    line += fmt::format("[{}{}] {:3.0f}% ", std::string(static_cast<size_t>(full), '#'),
                        std::string(static_cast<size_t>(kBar - full), '.'), 100 * fraction);
  }
  line += fmt::format("{}, {}", counts, tail);
  if (static_cast<int>(line.size()) >= terminal_.columns) {
    line.resize(static_cast<size_t>(std::max(terminal_.columns - 1, 1)));
  }
  terminal_.write("\r" + line + "\x1b[K" + (last ? "\n" : ""));
}

}  // namespace oscar
