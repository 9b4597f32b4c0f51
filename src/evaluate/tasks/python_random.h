// The random numbers of Python's `random` module: published evaluations order their choices and
// samples with it, so reproducing them needs the same numbers. Not for security. One thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace oscar {

class PythonRandom {
 public:
  explicit PythonRandom(uint32_t seed);
  // random.Random(text) and random.Random(number) for a str and for a float.
  static PythonRandom OfText(std::string_view text);
  static PythonRandom OfFloat(double number);

  uint32_t GetBits(int count);     // 1 to 32
  uint32_t Below(uint32_t limit);  // > 0
  double Random();                 // [0, 1)
  // `count` distinct indexes of range(size) in the order of random.sample. REQUIRES: count <= size.
  std::vector<uint32_t> Sample(uint32_t size, uint32_t count);
  template <typename T>
  void Shuffle(std::vector<T>& values) {
    for (size_t i = values.size(); i > 1; --i) {
      std::swap(values[i - 1], values[Below(static_cast<uint32_t>(i))]);
    }
  }

 private:
  static constexpr size_t kSize = 624;
  // The magnitude of a whole number in words, the lowest first.
  explicit PythonRandom(std::span<const uint32_t> words);
  uint32_t Next();
  std::array<uint32_t, kSize> state_;
  size_t at_ = kSize;
};

}  // namespace oscar
