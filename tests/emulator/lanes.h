// Loops over the lanes of a warp, for handlers.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "emulator/machine.h"

namespace oscar::emulator {

#define OSCAR_INLINE __attribute__((always_inline)) inline

// d[lane] = f(lane) for the active lanes. `f` runs for the others, too, and must not mind.
template <typename T, typename F>
OSCAR_INLINE void Each(const Warp& w, T* d, F f) {
  const uint32_t active = w.active;
  if (active == kAllLanes) {
#pragma GCC ivdep
    for (uint32_t i = 0; i < kLanes; ++i) d[i] = f(i);
  } else {
#pragma GCC ivdep
    for (uint32_t i = 0; i < kLanes; ++i) {
      const T value = f(i);
      d[i] = ((active >> i) & 1) != 0 ? value : d[i];
    }
  }
}

// The active lanes one by one, for what must not run for the others.
template <typename F>
OSCAR_INLINE void ForActive(const Warp& w, F f) {
  for (uint32_t rest = w.active; rest != 0; rest &= rest - 1) {
    f(static_cast<uint32_t>(std::countr_zero(rest)));
  }
}

// Bits of a test per lane.
template <typename F>
OSCAR_INLINE uint32_t Where(F test) {
  uint32_t lanes = 0;
  for (uint32_t i = 0; i < kLanes; ++i) lanes |= static_cast<uint32_t>(test(i)) << i;
  return lanes;
}

template <typename To, typename From>
OSCAR_INLINE To As(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

// ---- floating point as the device has it ----

inline constexpr uint32_t kNanBits = 0x7fffffff;
OSCAR_INLINE float Canonical(float x) { return x == x ? x : As<float>(kNanBits); }
OSCAR_INLINE double Canonical(double x) { return x; }
OSCAR_INLINE float Flush(float x) {
  const uint32_t bits = As<uint32_t>(x);
  return (bits & 0x7f800000u) == 0 ? As<float>(bits & 0x80000000u) : x;
}
OSCAR_INLINE double Flush(double x) { return x; }
OSCAR_INLINE float Saturate(float x) { return x >= 0.0f ? (x > 1.0f ? 1.0f : x) : 0.0f; }

// By hand, without branches: compilers call a function for every one of the host's own.
OSCAR_INLINE float HalfToFloat(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, magnitude = (h & 0x7fffu) << 13;
  // Below 2^-14 the bits count steps of 2^-24: they are what a sum with 2^-14 adds to it.
  const float small = As<float>(0x38800000u + magnitude) - 0x1p-14f;
  const uint32_t bits = magnitude < 0x00800000u   ? As<uint32_t>(small)
                        : magnitude < 0x0f800000u ? magnitude + 0x38000000u
                                                  : magnitude + 0x70000000u;
  return As<float>(sign | bits);
}
OSCAR_INLINE float Bf16ToFloat(uint16_t b) { return As<float>(uint32_t{b} << 16); }
OSCAR_INLINE uint16_t FloatToHalf(float x) {
  const uint32_t bits = As<uint32_t>(x), magnitude = bits & 0x7fffffffu;
  // The sum with 1/2 rounds to steps of 2^-24.
  const uint32_t small = As<uint32_t>(As<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1)) >> 13;
  uint32_t half = magnitude < 0x38800000u ? small : normal;
  half = magnitude >= 0x47800000u ? 0x7c00u : half;
  half |= (bits >> 16) & 0x8000u;
  return static_cast<uint16_t>(magnitude > 0x7f800000u ? 0x7fffu : half);
}
OSCAR_INLINE uint16_t FloatToBf16(float x) {
  const uint32_t bits = As<uint32_t>(x);
  const auto rounded = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  return x == x ? rounded : uint16_t{0x7fff};
}

}  // namespace oscar::emulator
