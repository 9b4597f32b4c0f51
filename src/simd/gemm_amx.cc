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

#define OSCAR_AMX __attribute__((target("amx-tile,amx-bf16,avx512f,prfchw")))

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

// Inputs of a slice, in tiles of 32: L2 holds one slice of all rows (512 KiB of 128, 768 KiB of
// 256), of this panel and of the next one beside what a neighbour on the core needs. The 4 KiB of
// sums that come in and go out with a slice cost a fiftieth of the products between; slices that L1
// would hold cost more in sums than they save in loads.
constexpr int SliceSteps(int steps, int row_blocks) {
  const int most = row_blocks > 8 ? 48 : 64;
  const int slices = (steps + most - 1) / most;
  return (steps + slices - 1) / slices;
}
constexpr int kTile = kAmxTileElements;  // BF16 numbers of a tile
constexpr int kLine = 64;                // bytes of a cache line

// Sixteen rows of 64 bytes, one after the other: rows as far apart as a matrix's would share one
// set of the L1 cache.
#define OSCAR_LOAD_TILE(tile, from) _tile_loadd(tile, from, 64)

// Cache lines to bring into L2 on the way, so many a step; the last step may reach past the end.
struct Fetch {
  const char* at = nullptr;
  const char* end = nullptr;
  int lines = 0;

  // By eights: with one row a step takes as long as its 32 lines, and looking at each for the end
  // costs a tenth of that.
  __attribute__((always_inline)) void Step() {
    if (at >= end) return;
    int i = 0;
    for (; i + 8 <= lines; i += 8) {
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) __builtin_prefetch(at + (i + j) * kLine, 0, 2);
    }
    for (; i < lines; ++i) __builtin_prefetch(at + i * kLine, 0, 2);
    at += lines * kLine;
  }
};

// Where the two tiles of a block's outputs go.
struct Sink {
  float* to = nullptr;
  ptrdiff_t half = 0;       // elements from the first tile to the second
  ptrdiff_t row_bytes = 0;  // between rows
  bool far = false;         // in the caller's matrix: its lines are in no cache of this core yet

  // Inlined by force: GCC 12 drops calls of functions that do nothing but prefetch.
  __attribute__((always_inline)) void FetchRow(int row) const {
    if (!far) return;
    const char* at = reinterpret_cast<const char*>(to) + row * row_bytes;
    __builtin_prefetch(at, 1, 3);
    __builtin_prefetch(at + kLine, 1, 3);
  }
};

// 32 (or 16) rows x 32 outputs over `steps` tiles of inputs: sums in tiles 0-3, x in 4 and 5,
// weights in 6 and 7. A tile is loaded anew as soon as its last product has been issued, a step
// ahead of its next one.
template <bool kTwoBlocks>
OSCAR_AMX void AmxBlock(const uint16_t* x, int steps, const uint16_t* w, Fetch next,
                        const float* sums, bool first, const Sink& sink0, const Sink& sink1) {
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
  OSCAR_LOAD_TILE(4, x);
  OSCAR_LOAD_TILE(6, w);
  OSCAR_LOAD_TILE(7, w + kTile);
  if constexpr (kTwoBlocks) OSCAR_LOAD_TILE(5, x + kTile);
  next.Step();
  for (int k = 1; k < steps; ++k) {
    x += 2 * kTile;
    w += 2 * kTile;
    next.Step();
    if (k <= 16) {
      sink0.FetchRow(k - 1);
      if constexpr (kTwoBlocks) sink1.FetchRow(k - 1);
    }
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    OSCAR_LOAD_TILE(4, x);
    if constexpr (kTwoBlocks) _tile_dpbf16ps(2, 5, 6);
    OSCAR_LOAD_TILE(6, w);
    if constexpr (kTwoBlocks) {
      _tile_dpbf16ps(3, 5, 7);
      OSCAR_LOAD_TILE(5, x + kTile);
    }
    OSCAR_LOAD_TILE(7, w + kTile);
  }
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (kTwoBlocks) {
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sink0.to, sink0.row_bytes);
  _tile_stored(1, sink0.to + sink0.half, sink0.row_bytes);
  if constexpr (kTwoBlocks) {
    _tile_stored(2, sink1.to, sink1.row_bytes);
    _tile_stored(3, sink1.to + sink1.half, sink1.row_bytes);
  }
}

// Slices outermost, then panels, then pairs of blocks of rows: a panel's slice comes from memory
// once, spread over the pairs of the panel before it, and x waits in L2.
OSCAR_AMX void AmxPanelsImpl(const uint16_t* x, int row_blocks, int padded_inputs,
                             const uint16_t* panels, int num_panels, float* sums,
                             const AmxOutput& output) {
  LoadTileConfig();
  const int steps = padded_inputs / 32, pairs = (row_blocks + 1) / 2;
  const int slice = SliceSteps(steps, row_blocks);
  const auto at = [](int tiles) { return static_cast<ptrdiff_t>(tiles) * kTile; };
  for (int s = 0; s < steps; s += slice) {
    const int count = std::min(slice, steps - s);
    const bool last = s + count == steps;
    for (int p = 0; p < num_panels; ++p) {
      const uint16_t* w = panels + at(2 * (p * steps + s));
      Fetch next;
      if (p + 1 < num_panels) {
        next.at = reinterpret_cast<const char*>(w + at(2 * steps));
        next.end = next.at + static_cast<ptrdiff_t>(count) * 32 * kLine;
      } else if (!last) {
        next.at = reinterpret_cast<const char*>(panels + at(2 * (s + count)));
        next.end =
            next.at + static_cast<ptrdiff_t>(std::min(slice, steps - s - count)) * 32 * kLine;
      }
      next.lines = (32 + pairs - 1) / pairs;
      for (int b = 0; b < row_blocks; b += 2) {
        float* block = sums + static_cast<ptrdiff_t>(p * row_blocks + b) * kAmxSums;
        Sink sinks[2];
        for (int i = 0; i < 2; ++i) {
          if (last && p < output.panels && b + i < output.row_blocks) {
            sinks[i] = {output.y + (b + i) * 16 * output.stride + p * kPanel, 16,
                        output.stride * static_cast<ptrdiff_t>(sizeof(float)), true};
          } else {
            sinks[i] = {block + i * kAmxSums, 256, 64, false};
          }
        }
        const uint16_t* rows = x + at(b * steps + 2 * s);
        if (b + 1 < row_blocks) {
          AmxBlock<true>(rows, count, w, next, block, s == 0, sinks[0], sinks[1]);
        } else {
          AmxBlock<false>(rows, count, w, next, block, s == 0, sinks[0], sinks[1]);
        }
        next.at += std::min<ptrdiff_t>(static_cast<ptrdiff_t>(count) * next.lines * kLine,
                                       next.end - next.at);
      }
    }
  }
  _tile_release();
}

// A loop of whole vectors where the inputs are 32.
__attribute__((target("avx512f"))) void AmxPackTileImpl(const float* x, size_t x_stride, int rows,
                                                        int inputs, uint16_t* tile) {
  if (rows < 16 || inputs < 32) std::fill_n(tile, kTile, uint16_t{0});
  for (int r = 0; r < rows; ++r, x += x_stride, tile += 32) {
    if (inputs == 32) {
      for (int i = 0; i < 32; ++i) tile[i] = ToBf16(x[i]).bits;
    } else {
      for (int i = 0; i < inputs; ++i) tile[i] = ToBf16(x[i]).bits;
    }
  }
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
__attribute__((target("avx512f,avx512bf16"))) void Bf16Block(const uint16_t* x, int x_stride,
                                                             int inputs, const uint16_t* panel,
                                                             float* c, size_t c_stride) {
  __m512 sum[kRows][2];
  for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
  for (int k = 0; k < inputs; k += 2) {
    const uint16_t* w = panel + static_cast<size_t>(k) * kPanel;
    const auto w0 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(w));
    const auto w1 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(w + kPanel));
    for (int r = 0; r < kRows; ++r) {
      int pair;
      std::memcpy(&pair, x + static_cast<size_t>(r) * static_cast<size_t>(x_stride) + k,
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
void Bf16Rows(int rows, const uint16_t* x, int x_stride, int inputs, const uint16_t* panel,
              float* c, size_t c_stride) {
  if (rows == kRows) {
    Bf16Block<kRows>(x, x_stride, inputs, panel, c, c_stride);
  } else if constexpr (kRows > 1) {
    Bf16Rows<kRows - 1>(rows, x, x_stride, inputs, panel, c, c_stride);
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
  AmxPanelsImpl(x, 1, 32, w, 1, sums, {});
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

void AmxPackTile(const float* x, size_t x_stride, int rows, int inputs, uint16_t* tile) {
  AmxPackTileImpl(x, x_stride, rows, inputs, tile);
}

void AmxPanels(const uint16_t* x, int row_blocks, int padded_inputs, const uint16_t* panels,
               int num_panels, float* sums, const AmxOutput& output) {
  AmxPanelsImpl(x, row_blocks, padded_inputs, panels, num_panels, sums, output);
}

double Bf16PeakOperations(GemmPath path, int64_t rounds) {
  if (path == GemmPath::kAmxBf16) {
    AmxPeakLoop(rounds);
    return 4.0 * 2.0 * 16 * 16 * 32 * static_cast<double>(rounds);
  }
  Bf16PeakLoop(rounds);
  return 16.0 * 2.0 * 32 * static_cast<double>(rounds);
}

void Avx512Bf16Panel(const uint16_t* x, int rows, int x_stride, int inputs, const uint16_t* panel,
                     float* c, size_t c_stride) {
  for (int r = 0; r < rows; r += kBf16Rows) {
    Bf16Rows(std::min(kBf16Rows, rows - r),
             x + static_cast<size_t>(r) * static_cast<size_t>(x_stride), x_stride, inputs, panel,
             c + static_cast<size_t>(r) * c_stride, c_stride);
  }
}

}  // namespace oscar::simd
