// Counter-based random numbers (Philox4x32-10; Salmon et al., SC'11): a value is a pure function of
// (seed, stream, index), so parallel generation and resumption need no state and never depend on
// the number of threads.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace oscar {

class Philox {
 public:
  constexpr Philox(uint64_t seed, uint64_t stream) : seed_(seed), stream_(stream) {}

  // Four independent 32-bit words for counter `index`.
  constexpr std::array<uint32_t, 4> Block(uint64_t index) const {
    uint32_t c0 = static_cast<uint32_t>(index), c1 = static_cast<uint32_t>(index >> 32);
    uint32_t c2 = static_cast<uint32_t>(stream_), c3 = static_cast<uint32_t>(stream_ >> 32);
    uint32_t k0 = static_cast<uint32_t>(seed_), k1 = static_cast<uint32_t>(seed_ >> 32);
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
      const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
      const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
      const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
      c1 = static_cast<uint32_t>(p1);
      c3 = static_cast<uint32_t>(p0);
      c0 = n0;
      c2 = n2;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    return {c0, c1, c2, c3};
  }

  constexpr uint32_t Bits(uint64_t index) const { return Block(index >> 2)[index & 3]; }

  // Uniform in [0, 1), 24 bits.
  constexpr float Uniform(uint64_t index) const {
    return static_cast<float>(Bits(index) >> 8) * 0x1p-24f;
  }

  // Uniform in [0, bound), bound > 0. The bias is below bound / 2^32.
  constexpr uint32_t Below(uint64_t index, uint32_t bound) const {
    return static_cast<uint32_t>((uint64_t{Bits(index)} * bound) >> 32);
  }

  // Standard normal (Box-Muller over one pair of words).
  float Normal(uint64_t index) const {
    const auto block = Block(index >> 1);
    const size_t at = (index & 1) * 2;
    const double u = (block[at] + 0.5) * 0x1p-32;
    const double v = block[at + 1] * 0x1p-32;
    return static_cast<float>(std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v));
  }

 private:
  uint64_t seed_;
  uint64_t stream_;
};

}  // namespace oscar
