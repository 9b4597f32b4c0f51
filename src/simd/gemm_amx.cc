// BF16 matrix kernels that Highway 1.0.3 cannot express: AMX tiles and VDPBF16PS. The module's one
// file of intrinsics; functions carry their own target attributes and run only behind HasAmx() and
// HasAvx512Bf16().
//
// Both kernels take the K sum in ascending pairs for each row by itself, so a row's bits do not
// depend on the rows beside it.
#include <asm/prctl.h>
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "simd/gemm_kernels.h"

namespace oscar::simd {
namespace {

constexpr int kPanel = PackedMatrix::kPanel;

// Palette 1: a tile is up to 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

#define OSCAR_AMX __attribute__((target("amx-tile,amx-bf16,avx512f")))

// In static memory: the intrinsic tells GCC 12 of its first 8 bytes alone, so stores into a local
// one could be dropped.
constexpr TileConfig kTileConfig = [] {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.row_bytes[t] = 64;
    config.rows[t] = 16;
  }
  return config;
}();

OSCAR_AMX void LoadTileConfig() { _tile_loadconfig(&kTileConfig); }

// Inputs of a slice, in tiles of 32. Of a task, one slice of 32 rows and of four panels is 640 KiB,
// so that L2 holds it even where two threads share a core; the 4 KiB of sums that come in and go
// out with it cost a fiftieth of the 256 products between.
constexpr int kSliceSteps = 64;
constexpr int kTile = kAmxTileElements;  // BF16 numbers of a tile

// Sixteen rows of 64 bytes, one after the other: rows as far apart as a matrix's would share one
// set of the L1 cache.
#define OSCAR_LOAD_TILE(tile, from) _tile_loadd(tile, from, 64)

// 32 (or 16) rows x 32 outputs over `steps` tiles of inputs: sums in tiles 0-3, x in 4 and 5,
// weights in 6 and 7. A tile is loaded anew as soon as its last product has been issued, a step
// ahead of its next one. Fetches 32 cache lines of `next`, if given, a step on the way.
template <bool kTwoBlocks>
OSCAR_AMX void AmxBlock(const uint16_t* x0, const uint16_t* x1, int steps, const uint16_t* w,
                        const char* next, float* sums, bool first) {
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTwoBlocks) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    OSCAR_LOAD_TILE(0, sums);
    OSCAR_LOAD_TILE(1, sums + 256);
    if constexpr (kTwoBlocks) {
      OSCAR_LOAD_TILE(2, sums + 512);
      OSCAR_LOAD_TILE(3, sums + 768);
    }
  }
  OSCAR_LOAD_TILE(4, x0);
  OSCAR_LOAD_TILE(6, w);
  OSCAR_LOAD_TILE(7, w + kTile);
  if constexpr (kTwoBlocks) OSCAR_LOAD_TILE(5, x1);
  for (int k = 1; k < steps; ++k) {
    x0 += kTile;
    x1 += kTile;
    w += 2 * kTile;
    if (next != nullptr) {
      for (int i = 0; i < 32; ++i) __builtin_prefetch(next + i * 64, 0, 2);
      next += 2048;
    }
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    OSCAR_LOAD_TILE(4, x0);
    if constexpr (kTwoBlocks) _tile_dpbf16ps(2, 5, 6);
    OSCAR_LOAD_TILE(6, w);
    if constexpr (kTwoBlocks) {
      _tile_dpbf16ps(3, 5, 7);
      OSCAR_LOAD_TILE(5, x1);
    }
    OSCAR_LOAD_TILE(7, w + kTile);
  }
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (kTwoBlocks) {
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  if constexpr (kTwoBlocks) {
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
  }
}

// Slices outermost, then pairs of blocks of rows, then panels: x passes through L1 once a slice and
// meets panels that wait in L2.
OSCAR_AMX void AmxPanelsImpl(const uint16_t* x, int row_blocks, int padded_inputs,
                             const uint16_t* panels, int num_panels, float* sums) {
  LoadTileConfig();
  const int steps = padded_inputs / 32;
  const auto at = [](int tiles) { return static_cast<ptrdiff_t>(tiles) * kTile; };
  for (int s = 0; s < steps; s += kSliceSteps) {
    const int count = std::min(kSliceSteps, steps - s);
    for (int b = 0; b < row_blocks; b += 2) {
      for (int p = 0; p < num_panels; ++p) {
        const uint16_t* w = panels + at(2 * (p * steps + s));
        // The first rows meet each panel in memory: the next one is fetched meanwhile, at the end
        // of a slice the first of the next slice.
        const uint16_t* next = nullptr;
        if (b == 0 && p + 1 < num_panels) {
          next = w + at(2 * steps);
        } else if (b + 2 >= row_blocks && p + 1 == num_panels && s + count < steps) {
          next = panels + at(2 * (s + count));
        }
        const uint16_t* x0 = x + at(b * steps + s);
        float* c = sums + static_cast<ptrdiff_t>(p * row_blocks + b) * kAmxSums;
        const char* fetch = reinterpret_cast<const char*>(next);
        if (b + 1 < row_blocks) {
          AmxBlock<true>(x0, x0 + at(steps), count, w, fetch, c, s == 0);
        } else {
          AmxBlock<false>(x0, x0, count, w, fetch, c, s == 0);
        }
      }
    }
  }
  _tile_release();
}

// Keeps all four sums busy from registers. Of ones, not zeros: those draw less power and reach a
// clock that no real product does (17 % higher on a Sapphire Rapids).
OSCAR_AMX void AmxPeakLoop(int64_t rounds) {
  alignas(64) uint16_t ones[kTile];
  std::fill_n(ones, kTile, ToBf16(1.0f).bits);
  LoadTileConfig();
  _tile_zero(0);  // the numbers are immediates: no loop
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  OSCAR_LOAD_TILE(4, ones);
  OSCAR_LOAD_TILE(5, ones);
  OSCAR_LOAD_TILE(6, ones);
  OSCAR_LOAD_TILE(7, ones);
  for (int64_t r = 0; r < rounds; ++r) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}

__attribute__((target("avx512f,avx512bf16"))) void Bf16PeakLoop(int64_t rounds) {
  __m512 sum[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) sum[i] = _mm512_set1_ps(static_cast<float>(i));
  auto factor = reinterpret_cast<__m512bh>(_mm512_setzero_si512());
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 16
    for (auto& part : sum) part = _mm512_dpbf16_ps(part, factor, factor);
    asm volatile("" : "+v"(factor));  // keeps the loop from being folded
  }
  __m512 total = sum[0];
#pragma GCC unroll 16
  for (int i = 1; i < 16; ++i) total = _mm512_add_ps(total, sum[i]);
  asm volatile("" : : "v"(total));
}

constexpr int kBf16Rows = 8;  // 8 x 2 accumulators

template <int kRows>
__attribute__((target("avx512f,avx512bf16"))) void Bf16Block(const uint16_t* x, int padded_inputs,
                                                             const uint16_t* panel, float* c,
                                                             size_t c_stride) {
  __m512 sum[kRows][2];
  for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
  for (int k = 0; k < padded_inputs; k += 2) {
    const uint16_t* w = panel + static_cast<size_t>(k) * kPanel;
    const auto w0 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(w));
    const auto w1 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(w + kPanel));
    for (int r = 0; r < kRows; ++r) {
      int pair;
      std::memcpy(&pair, x + static_cast<size_t>(r) * static_cast<size_t>(padded_inputs) + k,
                  sizeof(pair));
      const auto xs = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
      sum[r][0] = _mm512_dpbf16_ps(sum[r][0], xs, w0);
      sum[r][1] = _mm512_dpbf16_ps(sum[r][1], xs, w1);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    _mm512_storeu_ps(c + static_cast<size_t>(r) * c_stride, sum[r][0]);
    _mm512_storeu_ps(c + static_cast<size_t>(r) * c_stride + 16, sum[r][1]);
  }
}

template <int kRows = kBf16Rows>
void Bf16Rows(int rows, const uint16_t* x, int padded_inputs, const uint16_t* panel, float* c,
              size_t c_stride) {
  if (rows == kRows) {
    Bf16Block<kRows>(x, padded_inputs, panel, c, c_stride);
  } else if constexpr (kRows > 1) {
    Bf16Rows<kRows - 1>(rows, x, padded_inputs, panel, c, c_stride);
  }
}

uint64_t Xcr0() {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

constexpr uint64_t kXcr0Avx512 = 0xe6;         // SSE, AVX, opmask, two halves of ZMM
constexpr uint64_t kXcr0Tiles = 0x3ull << 17;  // tile configuration and data

bool OsSavesState(uint64_t mask) {
  uint32_t a, b, c, d;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & (1u << 27)) == 0) return false;  // OSXSAVE
  return (Xcr0() & mask) == mask;
}

// One small product with known sums: 16 rows x 32 inputs.
bool AmxAnswersRight() {
  alignas(64) uint16_t x[kTile], w[2 * kTile];
  alignas(64) float sums[kAmxSums];
  for (int i = 0; i < kTile; ++i) x[i] = ToBf16(static_cast<float>(i % 7 - 3)).bits;
  for (int i = 0; i < 2 * kTile; ++i) w[i] = ToBf16(static_cast<float>(i % 5 - 2)).bits;
  AmxPanelsImpl(x, 1, 32, w, 1, sums);
  for (int r = 0; r < 16; ++r) {
    for (int n = 0; n < kPanel; ++n) {
      float sum = 0.0f;
      for (int k = 0; k < 32; ++k) {
        const int at = n / 16 * kTile + k / 2 * 32 + n % 16 * 2 + k % 2;
        sum += ToFloat(Bf16{x[r * 32 + k]}) * ToFloat(Bf16{w[at]});
      }
      // Small integers: exact in any order.
      if (sum != sums[n / 16 * 256 + r * 16 + n % 16]) return false;
    }
  }
  return true;
}

// One product of bytes, signed by unsigned: 16 rows x 64 inputs.
__attribute__((target("amx-tile,amx-int8,avx512f"))) bool AmxInt8AnswersRight() {
  alignas(64) int8_t x[16][64];
  alignas(64) uint8_t w[16][64];  // [inputs / 4][16 outputs][4]
  alignas(64) int32_t sums[16][16];
  for (int i = 0; i < 1024; ++i) {
    x[i / 64][i % 64] = static_cast<int8_t>(i * 37 % 255 - 127);
    w[i / 64][i % 64] = static_cast<uint8_t>(i * 91 % 256);
  }
  LoadTileConfig();
  _tile_zero(0);
  _tile_loadd(1, x, 64);
  _tile_loadd(2, w, 64);
  _tile_dpbsud(0, 1, 2);
  _tile_stored(0, sums, 64);
  _tile_release();
  for (int r = 0; r < 16; ++r) {
    for (int n = 0; n < 16; ++n) {
      int32_t sum = 0;
      for (int k = 0; k < 64; ++k) sum += x[r][k] * w[k / 4][n * 4 + k % 4];
      if (sum != sums[r][n]) return false;
    }
  }
  return true;
}

struct AmxSupport {
  bool bf16 = false;
  bool int8 = false;
};

AmxSupport ProbeAmx() {
  if (const char* off = std::getenv("OSCAR_DISABLE_AMX");
      off != nullptr && *off != '\0' && *off != '0') {
    return {};
  }
  uint32_t a, b, c, d;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return {};
  constexpr uint32_t kHasTiles = 1u << 24, kHasBf16 = 1u << 22, kHasInt8 = 1u << 25;
  if ((d & kHasTiles) == 0) return {};
  if (!OsSavesState(kXcr0Avx512 | kXcr0Tiles)) return {};
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return {};
  // Hypervisors exist that show the feature bits and then fault. A child takes the risk: it does
  // nothing but arithmetic and _exit, both safe after fork in a threaded process.
  const pid_t child = fork();
  if (child < 0) return {};
  if (child == 0) {
    const bool bf16 = (d & kHasBf16) != 0 && AmxAnswersRight();
    const bool int8 = (d & kHasInt8) != 0 && AmxInt8AnswersRight();
    _exit((bf16 ? 1 : 0) + (int8 ? 2 : 0));
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return {};
  }
  if (!WIFEXITED(status)) return {};
  return {(WEXITSTATUS(status) & 1) != 0, (WEXITSTATUS(status) & 2) != 0};
}

const AmxSupport& ThisAmx() {
  static const AmxSupport support = ProbeAmx();
  return support;
}

bool ProbeAvx512Bf16() {
  uint32_t a, b, c, d;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (b & (1u << 16)) == 0) return false;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) == 0 || (a & (1u << 5)) == 0) return false;
  return OsSavesState(kXcr0Avx512);
}

}  // namespace

bool HasAmx() { return ThisAmx().bf16; }

bool HasAmxInt8() { return ThisAmx().int8; }

bool HasAvx512Bf16() {
  static const bool has = ProbeAvx512Bf16();
  return has;
}

void AmxPanels(const uint16_t* x, int row_blocks, int padded_inputs, const uint16_t* panels,
               int num_panels, float* sums) {
  AmxPanelsImpl(x, row_blocks, padded_inputs, panels, num_panels, sums);
}

double Bf16PeakOperations(GemmPath path, int64_t rounds) {
  if (path == GemmPath::kAmxBf16) {
    AmxPeakLoop(rounds);
    return 4.0 * 2.0 * 16 * 16 * 32 * static_cast<double>(rounds);
  }
  Bf16PeakLoop(rounds);
  return 16.0 * 2.0 * 32 * static_cast<double>(rounds);
}

void Avx512Bf16Panel(const uint16_t* x, int rows, int padded_inputs, const uint16_t* panel,
                     float* c, size_t c_stride) {
  for (int r = 0; r < rows; r += kBf16Rows) {
    Bf16Rows(std::min(kBf16Rows, rows - r),
             x + static_cast<size_t>(r) * static_cast<size_t>(padded_inputs), padded_inputs, panel,
             c + static_cast<size_t>(r) * c_stride, c_stride);
  }
}

}  // namespace oscar::simd
