// The tile instructions of AMX. Kernels reach them through a type `Tiles`, so that tests can put an
// emulation in their place on machines without AMX:
//   Configure(rows)       tiles 0-5 get `rows` rows of 64 bytes, 6 and 7 get 16
//   Zero<t>(), Load<t>(from, stride), Store<t>(to, stride), Release()
//   Dot<c, a, b>(), DotUnsigned<c, a, b>(), DotBf16<c, a, b>()
// Included once per target.
#if defined(OSCAR_SIMD_AMX_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OSCAR_SIMD_AMX_TILES_INL_H_
#undef OSCAR_SIMD_AMX_TILES_INL_H_
#else
#define OSCAR_SIMD_AMX_TILES_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#if HWY_TARGET == HWY_AVX3
HWY_BEFORE_NAMESPACE();
namespace oscar::simd::HWY_NAMESPACE {

inline constexpr int kTileRows = 16;
inline constexpr int kTileBytes = kTileRows * 64;

// Instructions by name, as elsewhere; no compiler uses tiles unasked.
struct AmxTiles {
  struct alignas(64) Config {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };
  static HWY_INLINE void Configure(int rows) {
    Config config;
    for (int t = 0; t < 8; ++t) {
      config.row_bytes[t] = 64;
      config.rows[t] = static_cast<uint8_t>(t < 6 ? rows : 16);
    }
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  static HWY_INLINE void Release() { asm volatile("tilerelease"); }
  template <int kTile>
  static HWY_INLINE void Zero() {
    asm volatile("tilezero %%tmm%c0" : : "n"(kTile));
  }
  template <int kTile>
  static HWY_INLINE void Load(const void* from, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "n"(kTile) : "memory");
  }
  template <int kTile>
  static HWY_INLINE void Store(void* to, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "n"(kTile) : "memory");
  }
  // c += a b, signed bytes times unsigned bytes.
  template <int kC, int kA, int kB>
  static HWY_INLINE void Dot() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(kC), "n"(kA), "n"(kB));
  }
  // The same, both unsigned.
  template <int kC, int kA, int kB>
  static HWY_INLINE void DotUnsigned() {
    asm volatile("tdpbuud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(kC), "n"(kA), "n"(kB));
  }
  // The same of BF16 into fp32, 32 of them in a row of a.
  template <int kC, int kA, int kB>
  static HWY_INLINE void DotBf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(kC), "n"(kA), "n"(kB));
  }
};

}  // namespace oscar::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_AVX3

#endif  // per-target include guard
