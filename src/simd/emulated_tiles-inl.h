// Tiles of AMX (amx_tiles-inl.h) in plain code, so that machines without them test kernels that use
// them. For tests. Included once per target.
#if defined(OSCAR_SIMD_EMULATED_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OSCAR_SIMD_EMULATED_TILES_INL_H_
#undef OSCAR_SIMD_EMULATED_TILES_INL_H_
#else
#define OSCAR_SIMD_EMULATED_TILES_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/half.h"

#if HWY_TARGET == HWY_AVX3
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {

// What the manual says each instruction does, one number at a time. Rows beyond the configured ones
// are poisoned: a kernel that reads them shows.
struct EmulatedTiles {
  struct State {
    int rows[8] = {};
    uint8_t data[8][16][64];
  };
  static State& Get() {
    thread_local State state;
    return state;
  }
  static void Configure(int rows) {
    for (int t = 0; t < 8; ++t) Get().rows[t] = t < 6 ? rows : 16;
    std::memset(Get().data, 0x5a, sizeof(Get().data));
  }
  static void Release() { std::fill_n(Get().rows, 8, 0); }
  template <int kTile>
  static void Zero() {
    std::memset(Get().data[kTile], 0, static_cast<size_t>(Get().rows[kTile]) * 64);
  }
  template <int kTile>
  static void Load(const void* from, size_t stride) {
    for (int r = 0; r < Get().rows[kTile]; ++r) {
      std::memcpy(Get().data[kTile][r],
                  static_cast<const char*>(from) + static_cast<size_t>(r) * stride, 64);
    }
  }
  template <int kTile>
  static void Store(void* to, size_t stride) {
    for (int r = 0; r < Get().rows[kTile]; ++r) {
      std::memcpy(static_cast<char*>(to) + static_cast<size_t>(r) * stride, Get().data[kTile][r],
                  64);
    }
  }
  // c += sum over k of left(byte of a) times a byte of b, for kernels of bytes.
  template <int kC, int kA, int kB, typename Left>
  static void DotBytes() {
    State& s = Get();
    for (int r = 0; r < s.rows[kC]; ++r) {
      for (int n = 0; n < 16; ++n) {
        int32_t sum;
        std::memcpy(&sum, s.data[kC][r] + n * 4, 4);
        for (int k = 0; k < 64; ++k) {
          sum += static_cast<Left>(s.data[kA][r][k]) * s.data[kB][k / 4][n * 4 + k % 4];
        }
        std::memcpy(s.data[kC][r] + n * 4, &sum, 4);
      }
    }
  }
  template <int kC, int kA, int kB>
  static void Dot() {
    DotBytes<kC, kA, kB, int8_t>();
  }
  template <int kC, int kA, int kB>
  static void DotUnsigned() {
    DotBytes<kC, kA, kB, uint8_t>();
  }
  // Even and odd numbers each in one fused chain, then their sum.
  template <int kC, int kA, int kB>
  static void DotBf16() {
    State& s = Get();
    const auto number = [](const uint8_t* p) {
      Bf16 x;
      std::memcpy(&x.bits, p, sizeof(x.bits));
      return oscar::ToFloat(x);
    };
    for (int r = 0; r < s.rows[kC]; ++r) {
      for (int n = 0; n < 16; ++n) {
        float part[2] = {};
        for (int k = 0; k < 32; ++k) {
          const float a = number(s.data[kA][r] + k * 2);
          const float b = number(s.data[kB][k / 2] + n * 4 + k % 2 * 2);
          part[k % 2] = std::fma(a, b, part[k % 2]);
        }
        float sum;
        std::memcpy(&sum, s.data[kC][r] + n * 4, 4);
        sum += part[0] + part[1];
        std::memcpy(s.data[kC][r] + n * 4, &sum, 4);
      }
    }
  }
};

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_AVX3

#endif  // per-target include guard
