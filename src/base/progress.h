// A progress line for anything that may take over two seconds. On a terminal: one live line with a
// bar, the rate and the time left, at most ten times a second. Elsewhere: a plain line every five
// seconds. Work that ends within two seconds prints nothing. Add and Finish may be called from any
// thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

namespace oscar {

class Progress {
 public:
  // Where lines go and what time it is; tests replace both. The defaults are stderr and the clock.
  struct Terminal {
    bool is_tty = false;
    int columns = 80;
    std::function<void(const std::string&)> write;
    std::function<std::chrono::steady_clock::time_point()> now;
    static Terminal Stderr();
  };

  // `total` of 0 means unknown. `unit` is plural ("tokens", "layers"); "B" prints as MiB and GiB.
  Progress(std::string label, uint64_t total, std::string unit,
           Terminal terminal = Terminal::Stderr());
  ~Progress();  // finishes
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Add(uint64_t amount);
  void Finish();

 private:
  void Show(std::chrono::steady_clock::time_point now, bool last);

  std::mutex mutex_;
  std::string label_;
  uint64_t total_;
  std::string unit_;
  Terminal terminal_;
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point shown_;
  uint64_t done_ = 0;
  bool visible_ = false;
  bool finished_ = false;
};

inline double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
// "3.2 s", "1 min 05 s", "2 h 03 min".
std::string FormatDuration(double seconds);
// "512 B", "1.50 MiB", "12.0 GiB".
std::string FormatBytes(uint64_t bytes);

}  // namespace oscar
