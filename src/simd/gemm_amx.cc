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

OSCAR_AMX void LoadTileConfig() {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.row_bytes[t] = 64;
    config.rows[t] = 16;
  }
  _tile_loadconfig(&config);
}

// Rows r .. r + 32 (or 16) times one panel: accumulators 0-3, x in 4 and 5, weights in 6 and 7.
template <bool kTwoBlocks>
OSCAR_AMX void AmxBlock(const uint16_t* x, int padded_inputs, const uint16_t* panel, float* c,
                        size_t c_stride) {
  const size_t x_bytes = static_cast<size_t>(padded_inputs) * 2;
  const size_t c_bytes = c_stride * sizeof(float);
  const uint16_t* x1 = x + 16 * static_cast<size_t>(padded_inputs);
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTwoBlocks) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < padded_inputs; k += 32) {
    // [k / 2][32 outputs][2]: 16 rows of 128 bytes, of which a tile takes the left or right half.
    const uint16_t* w = panel + static_cast<size_t>(k) * kPanel;
    _tile_loadd(6, w, kPanel * 4);
    _tile_loadd(7, w + kPanel, kPanel * 4);
    _tile_loadd(4, x + k, x_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwoBlocks) {
      _tile_loadd(5, x1 + k, x_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + 16, c_bytes);
  if constexpr (kTwoBlocks) {
    _tile_stored(2, c + 16 * c_stride, c_bytes);
    _tile_stored(3, c + 16 * c_stride + 16, c_bytes);
  }
}

OSCAR_AMX void AmxPanelImpl(const uint16_t* x, int rows, int padded_inputs, const uint16_t* panel,
                            float* c, size_t c_stride) {
  LoadTileConfig();
  int r = 0;
  for (; r + 32 <= rows; r += 32) {
    AmxBlock<true>(x + static_cast<size_t>(r) * static_cast<size_t>(padded_inputs), padded_inputs,
                   panel, c + static_cast<size_t>(r) * c_stride, c_stride);
  }
  if (r < rows) {
    AmxBlock<false>(x + static_cast<size_t>(r) * static_cast<size_t>(padded_inputs), padded_inputs,
                    panel, c + static_cast<size_t>(r) * c_stride, c_stride);
  }
  _tile_release();
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

// One small product with known sums. 16 rows x 32 inputs.
bool AmxAnswersRight() {
  alignas(64) uint16_t x[16 * 32], w[32 * kPanel];
  alignas(64) float c[16 * kPanel];
  for (int i = 0; i < 16 * 32; ++i) x[i] = ToBf16(static_cast<float>(i % 7 - 3)).bits;
  for (int i = 0; i < 32 * kPanel; ++i) w[i] = ToBf16(static_cast<float>(i % 5 - 2)).bits;
  AmxPanelImpl(x, 16, 32, w, c, kPanel);
  for (int r = 0; r < 16; ++r) {
    for (int n = 0; n < kPanel; ++n) {
      float sum = 0.0f;
      for (int k = 0; k < 32; ++k) {
        sum += ToFloat(Bf16{x[r * 32 + k]}) * ToFloat(Bf16{w[k / 2 * 2 * kPanel + n * 2 + k % 2]});
      }
      if (sum != c[r * kPanel + n]) return false;  // small integers: exact in any order
    }
  }
  return true;
}

bool ProbeAmx() {
  if (const char* off = std::getenv("OSCAR_DISABLE_AMX");
      off != nullptr && *off != '\0' && *off != '0') {
    return false;
  }
  uint32_t a, b, c, d;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr uint32_t kTile = 1u << 24, kBf16 = 1u << 22;
  if ((d & kTile) == 0 || (d & kBf16) == 0) return false;
  if (!OsSavesState(kXcr0Avx512 | kXcr0Tiles)) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return false;
  // Hypervisors exist that show the feature bits and then fault. A child takes the risk: it does
  // nothing but arithmetic and _exit, both safe after fork in a threaded process.
  const pid_t child = fork();
  if (child < 0) return false;
  if (child == 0) _exit(AmxAnswersRight() ? 0 : 1);
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return false;
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

bool ProbeAvx512Bf16() {
  uint32_t a, b, c, d;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (b & (1u << 16)) == 0) return false;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) == 0 || (a & (1u << 5)) == 0) return false;
  return OsSavesState(kXcr0Avx512);
}

}  // namespace

bool HasAmx() {
  static const bool has = ProbeAmx();
  return has;
}

bool HasAvx512Bf16() {
  static const bool has = ProbeAvx512Bf16();
  return has;
}

void AmxPanel(const uint16_t* x, int rows, int padded_inputs, const uint16_t* panel, float* c,
              size_t c_stride) {
  AmxPanelImpl(x, rows, padded_inputs, panel, c, c_stride);
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
