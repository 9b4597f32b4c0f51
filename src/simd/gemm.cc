#include "simd/gemm.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "base/check.h"
#include "base/mxfp4.h"
#include "simd/gemm_kernels.h"
#include "simd/vec_ops.h"

namespace oscar::simd {
namespace {

// A slice of a panel (64 bytes an input) must stay in L1 beside the rows that pass over it:
// 256 x (64 + 12 x 4) bytes = 28 KiB.
constexpr int kInputsPerSlice = 256;
// Rows whose slice of X (1 KiB each) stays in L2 while the panels pass over it. A multiple of every
// tile_rows.
constexpr int kRowsPerChunk = 240;

constexpr int CeilDiv(int a, int b) { return (a + b - 1) / b; }

// Copies a tile's rows into y, adding the bias; the last panel may be partly padding.
void StoreTile(const float* tile, int tile_stride, int rows, int columns, const float* bias,
               float* y, size_t y_stride) {
  for (int r = 0; r < rows; ++r) {
    float* out = y + static_cast<size_t>(r) * y_stride;
    for (int j = 0; j < columns; ++j) {
      const float sum = tile[r * tile_stride + j];
      out[j] = bias != nullptr ? sum + bias[j] : sum;
    }
  }
}

// [row block][k][tile_rows], padding rows left as they are: no kernel reads them.
void PackBlock(const float* x, size_t x_stride, int rows, int inputs, int tile_rows, float* out) {
  for (int k = 0; k < inputs; ++k) {
    for (int r = 0; r < rows; ++r) {
      out[static_cast<ptrdiff_t>(k) * tile_rows + r] =
          x[static_cast<size_t>(r) * x_stride + static_cast<size_t>(k)];
    }
  }
}

void GemmFma(ThreadPool& pool, GemmWorkspace& workspace, const float* x, int num_rows,
             size_t x_stride, const PackedMatrix& w, const float* bias, float* y, size_t y_stride) {
  const FmaKernels& kernels = ActiveFmaKernels();
  const int inputs = w.num_inputs(), panels = w.num_panels();
  int tile_rows = kernels.tile_rows;
  const int blocks = CeilDiv(num_rows, tile_rows);
  const size_t block_size = static_cast<size_t>(tile_rows) * static_cast<size_t>(inputs);
  const float* packed = x;
  if (num_rows == 1) {
    tile_rows = 1;  // the row itself is [k, 1]
  } else {
    workspace.x.Grow(static_cast<size_t>(blocks) * block_size);
    pool.ParallelFor(blocks, [&](int64_t b, int) {
      const int first = static_cast<int>(b) * tile_rows;
      PackBlock(x + static_cast<size_t>(first) * x_stride, x_stride,
                std::min(tile_rows, num_rows - first), inputs, tile_rows,
                workspace.x.data() + static_cast<size_t>(b) * block_size);
    });
    packed = workspace.x.data();
  }

  const int chunks = CeilDiv(num_rows, kRowsPerChunk);
  const int panels_per_task = std::clamp(CeilDiv(panels * chunks, pool.num_threads() * 8), 1, 16);
  const int groups = CeilDiv(panels, panels_per_task);
  pool.ParallelFor(static_cast<int64_t>(groups) * chunks, [&](int64_t task, int) {
    const int chunk = static_cast<int>(task) / groups;
    const int first_panel = static_cast<int>(task) % groups * panels_per_task;
    const int end_panel = std::min(panels, first_panel + panels_per_task);
    const int first_row = chunk * kRowsPerChunk;
    const int end_row = std::min(num_rows, first_row + kRowsPerChunk);
    for (int slice = 0; slice < inputs; slice += kInputsPerSlice) {
      const int k_count = std::min(kInputsPerSlice, inputs - slice);
      const bool last = slice + k_count == inputs;
      for (int p = first_panel; p < end_panel; ++p) {
        const uint16_t* weights = w.Panel(p) + static_cast<size_t>(slice) * PackedMatrix::kPanel;
        const int column = p * PackedMatrix::kPanel;
        const int columns = std::min(PackedMatrix::kPanel, w.num_outputs() - column);
        for (int row = first_row; row < end_row; row += tile_rows) {
          const int rows = std::min(tile_rows, end_row - row);
          const float* xs = packed + static_cast<size_t>(row) * static_cast<size_t>(inputs) +
                            static_cast<size_t>(slice) * static_cast<size_t>(tile_rows);
          float* target = y + static_cast<size_t>(row) * y_stride + column;
          if (columns == PackedMatrix::kPanel) {
            kernels.tile(xs, tile_rows, rows, weights, k_count, target, y_stride, slice == 0);
            if (last && bias != nullptr) {
              for (int r = 0; r < rows; ++r) {
                Add({target + static_cast<size_t>(r) * y_stride, PackedMatrix::kPanel},
                    {bias + column, PackedMatrix::kPanel});
              }
            }
            continue;
          }
          // The partial panel: sums live in a tile of full width and leave it at the end.
          alignas(64) float tile[kMaxTileRows * PackedMatrix::kPanel];
          std::memset(tile, 0, sizeof(tile));
          for (int r = 0; r < rows && slice > 0; ++r) {
            std::memcpy(tile + r * PackedMatrix::kPanel, target + static_cast<size_t>(r) * y_stride,
                        static_cast<size_t>(columns) * sizeof(float));
          }
          kernels.tile(xs, tile_rows, rows, weights, k_count, tile, PackedMatrix::kPanel,
                       slice == 0);
          StoreTile(tile, PackedMatrix::kPanel, rows, columns,
                    last && bias != nullptr ? bias + column : nullptr, target, y_stride);
        }
      }
    }
  });
}

// Rows of x, rounded, in the tiles that AmxPanels takes; rows and inputs past the end are zeros.
void PackTiles(ThreadPool& pool, const float* x, int num_rows, size_t x_stride, int num_inputs,
               int steps, uint16_t* out) {
  constexpr int kStepsPerTask = 16;
  const int blocks = CeilDiv(num_rows, 16), parts = CeilDiv(steps, kStepsPerTask);
  pool.ParallelFor(static_cast<int64_t>(blocks) * parts, [&](int64_t task, int) {
    const int b = static_cast<int>(task) / parts, first = static_cast<int>(task) % parts;
    const int end = std::min((first + 1) * kStepsPerTask, steps);
    for (int k = first * kStepsPerTask; k < end; ++k) {
      const size_t at = static_cast<size_t>(b) * 16 * x_stride + static_cast<size_t>(k) * 32;
      AmxPackTile(
          x + at, x_stride, std::min(16, num_rows - b * 16), std::min(32, num_inputs - k * 32),
          out + (static_cast<ptrdiff_t>(b / 2 * 2) * steps + 2 * k + b % 2) * kAmxTileElements);
    }
  });
}

// Tiles of AMX. On one or two threads a task has many panels, which share the slices of 256 rows
// that it brings in, and weights pass once for all of these: 8 to 10 points of the peak. On more,
// which may share cores and their L2, it loses up to 10: there tasks are small, and 128 rows stay
// in L2 with all their inputs from task to task where they fit.
void GemmAmx(ThreadPool& pool, GemmWorkspace& workspace, const float* x, int num_rows,
             size_t x_stride, const PackedMatrix& w, const float* bias, float* y, size_t y_stride) {
  const int padded = w.padded_inputs(), panels = w.num_panels();
  const int blocks = CeilDiv(num_rows, 16), steps = padded / 32;
  constexpr int kMostPanels = 32, kLargeTask = 16, kLargeTaskThreads = 2;
  const int threads = pool.num_threads();
  const bool few = blocks < 8;  // rows are read soon whatever the order
  const bool large =
      threads <= kLargeTaskThreads && panels * CeilDiv(blocks, 16) >= threads * 2 * kLargeTask;
  const bool resident = !large && steps <= kAmxResidentSteps;
  const int most_blocks = resident ? std::min(8 * kAmxResidentSteps / steps, 16) : 16;
  const int chunks = CeilDiv(blocks, most_blocks);
  const int blocks_per_chunk = CeilDiv(CeilDiv(blocks, chunks), 2) * 2;
  workspace.x_bf16.Grow(static_cast<size_t>(CeilDiv(blocks, 2)) * 2 * static_cast<size_t>(steps) *
                        kAmxTileElements);
  PackTiles(pool, x, num_rows, x_stride, w.num_inputs(), steps, workspace.x_bf16.data());
  const int tasks_per_thread = resident && !few ? 8 : 2;
  const int most_panels = resident || few ? 4 : (large ? kMostPanels : kLargeTask);
  const int panels_per_task =
      std::clamp(CeilDiv(panels * chunks, threads * tasks_per_thread), 1, most_panels);
  const int groups = CeilDiv(panels, panels_per_task);
  const size_t sums_size = static_cast<size_t>(panels_per_task * blocks_per_chunk) * kAmxSums;
  workspace.x.Grow(sums_size * static_cast<size_t>(threads));
  pool.ParallelFor(static_cast<int64_t>(groups) * chunks, [&](int64_t task, int thread) {
    const int first_block = static_cast<int>(task) / groups * blocks_per_chunk;
    const int count = std::min(blocks_per_chunk, blocks - first_block);
    const int first_panel = static_cast<int>(task) % groups * panels_per_task;
    const int used = std::min(panels_per_task, panels - first_panel);
    const int first_row = first_block * 16, first_column = first_panel * PackedMatrix::kPanel;
    float* sums = workspace.x.data() + sums_size * static_cast<size_t>(thread);
    AmxOutput output{y + static_cast<size_t>(first_row) * y_stride + first_column,
                     static_cast<ptrdiff_t>(y_stride)};
    if (bias == nullptr) {
      output.row_blocks = std::min(count, (num_rows - first_row) / 16);
      output.panels = std::min(used, (w.num_outputs() - first_column) / PackedMatrix::kPanel);
    }
    AmxPanels(
        workspace.x_bf16.data() + static_cast<ptrdiff_t>(first_block) * steps * kAmxTileElements,
        count, padded, w.Panel(first_panel), used, sums, output);
    for (int p = 0; p < used; ++p) {
      for (int b = p < output.panels ? output.row_blocks : 0; b < count; ++b) {
        const float* block = sums + static_cast<ptrdiff_t>(p * count + b) * kAmxSums;
        const int row = first_row + b * 16;
        for (int half = 0; half < 2; ++half) {
          const int column = first_column + p * PackedMatrix::kPanel + half * 16;
          const int columns = std::min(16, w.num_outputs() - column);
          if (columns <= 0) break;
          StoreTile(block + half * 256, 16, std::min(16, num_rows - row), columns,
                    bias != nullptr ? bias + column : nullptr,
                    y + static_cast<size_t>(row) * y_stride + column, y_stride);
        }
      }
    }
  });
}

// VDPBF16PS: x row by row.
void GemmBf16(ThreadPool& pool, GemmWorkspace& workspace, const float* x, int num_rows,
              size_t x_stride, const PackedMatrix& w, const float* bias, float* y,
              size_t y_stride) {
  const int padded = w.padded_inputs(), panels = w.num_panels();
  const auto row_size = static_cast<size_t>(padded);
  const auto inputs = static_cast<size_t>(w.num_inputs());
  workspace.x_bf16.Grow(static_cast<size_t>(num_rows) * row_size);
  pool.ParallelFor(num_rows, [&](int64_t r, int) {
    uint16_t* out = workspace.x_bf16.data() + static_cast<size_t>(r) * row_size;
    std::fill(out + inputs, out + row_size, uint16_t{0});
    ToBf16Row({x + static_cast<size_t>(r) * x_stride, inputs},
              {reinterpret_cast<Bf16*>(out), inputs});
  });
  const int chunks = CeilDiv(num_rows, kRowsPerChunk);
  pool.ParallelFor(static_cast<int64_t>(panels) * chunks, [&](int64_t task, int) {
    const int first_row = static_cast<int>(task) / panels * kRowsPerChunk;
    const int p = static_cast<int>(task) % panels;
    const int rows = std::min(kRowsPerChunk, num_rows - first_row);
    alignas(64) float tile[kRowsPerChunk * PackedMatrix::kPanel];
    Avx512Bf16Panel(workspace.x_bf16.data() + static_cast<size_t>(first_row) * row_size, rows,
                    padded, padded, w.Panel(p), tile, PackedMatrix::kPanel);
    const int column = p * PackedMatrix::kPanel;
    StoreTile(tile, PackedMatrix::kPanel, rows,
              std::min(PackedMatrix::kPanel, w.num_outputs() - column),
              bias != nullptr ? bias + column : nullptr,
              y + static_cast<size_t>(first_row) * y_stride + column, y_stride);
  });
}

Bf16 AsBf16(Bf16 x) { return x; }
Bf16 AsBf16(float x) { return ToBf16(x); }
Bf16 AsBf16(Fp16 x) { return ToBf16(ToFloat(x)); }

}  // namespace

std::string_view GemmPathName(GemmPath path) {
  switch (path) {
    case GemmPath::kFma:
      return "fp32 FMA";
    case GemmPath::kAvx512Bf16:
      return "AVX512-BF16";
    case GemmPath::kAmxBf16:
      return "AMX-BF16";
  }
  return "unknown";
}

bool IsSupported(GemmPath path) {
  switch (path) {
    case GemmPath::kFma:
      return true;
    case GemmPath::kAvx512Bf16:
      return HasAvx512Bf16();
    case GemmPath::kAmxBf16:
      return HasAmx();
  }
  return false;
}

GemmPath DefaultGemmPath() {
  static const GemmPath path = [] {
    const char* wish = std::getenv("OSCAR_GEMM");
    const std::string_view name = wish != nullptr ? wish : "";
    if (name == "fma") return GemmPath::kFma;
    if (name != "bf16" && HasAmx()) return GemmPath::kAmxBf16;
    return HasAvx512Bf16() ? GemmPath::kAvx512Bf16 : GemmPath::kFma;
  }();
  return path;
}

PackedMatrix::PackedMatrix(int num_outputs, int num_inputs, GemmPath path)
    : num_outputs_(num_outputs),
      num_inputs_(num_inputs),
      padded_inputs_(path == GemmPath::kFma ? num_inputs : CeilDiv(num_inputs, 32) * 32),
      path_(path),
      data_(static_cast<size_t>(CeilDiv(num_outputs, kPanel)) * kPanel *
            static_cast<size_t>(padded_inputs_)) {
  OSCAR_CHECK(num_outputs > 0 && num_inputs > 0 && IsSupported(path));
  std::memset(data_.data(), 0, data_.size() * sizeof(uint16_t));
}

size_t PackedMatrix::Index(int output, int input) const {
  const auto panel =
      static_cast<size_t>(output / kPanel) * kPanel * static_cast<size_t>(padded_inputs_);
  const auto k = static_cast<size_t>(input);
  const auto column = static_cast<size_t>(output % kPanel);
  if (path_ == GemmPath::kFma) return panel + k * kPanel + column % 16 * 2 + column / 16;
  if (path_ == GemmPath::kAmxBf16) {
    return panel + k / 32 * 32 * kPanel + column / 16 * kAmxTileElements + k % 32 / 2 * 32 +
           column % 16 * 2 + k % 2;
  }
  return panel + k / 2 * 2 * kPanel + column * 2 + k % 2;
}

PackedMatrix PackedMatrix::Fp8(int num_outputs, int num_inputs, int scale_inputs, GemmPath path) {
  OSCAR_CHECK(num_outputs > 0 && num_inputs > 0 && IsSupported(path) &&
              path != GemmPath::kAmxBf16 && scale_inputs > 0 &&
              (scale_inputs % 32 == 0 || scale_inputs >= num_inputs));
  PackedMatrix matrix;
  matrix.num_outputs_ = num_outputs;
  matrix.num_inputs_ = num_inputs;
  matrix.padded_inputs_ = path == GemmPath::kFma ? num_inputs : CeilDiv(num_inputs, 32) * 32;
  matrix.path_ = path;
  matrix.scale_inputs_ = scale_inputs;
  matrix.num_segments_ = CeilDiv(num_inputs, scale_inputs);
  const auto panels = static_cast<size_t>(matrix.num_panels());
  // What expands them reads whole vectors: up to 64 bytes past the end.
  matrix.codes_ = AlignedBuffer<uint8_t>(
      panels * kPanel * static_cast<size_t>(matrix.padded_inputs_) + kFp8Slack);
  matrix.scales_ =
      AlignedBuffer<float>(panels * kPanel * static_cast<size_t>(matrix.num_segments_));
  std::memset(matrix.codes_.data(), 0, matrix.codes_.size());
  std::fill_n(matrix.scales_.data(), matrix.scales_.size(), 0.0f);
  return matrix;
}

void PackedMatrix::PackFp8Rows(ThreadPool& pool, int first_row, int rows,
                               std::span<const uint8_t> codes, std::span<const float> scales) {
  const auto inputs = static_cast<size_t>(num_inputs_),
             segments = static_cast<size_t>(num_segments_);
  OSCAR_CHECK(is_fp8() && first_row >= 0 && rows >= 0 && first_row + rows <= num_outputs_ &&
              codes.size() == static_cast<size_t>(rows) * inputs &&
              scales.size() == static_cast<size_t>(rows) * segments);
  const int first_panel = first_row / kPanel, end_panel = CeilDiv(first_row + rows, kPanel);
  pool.ParallelFor(end_panel - first_panel, [&](int64_t p, int) {
    const int panel = first_panel + static_cast<int>(p);
    const int begin = std::max(first_row, panel * kPanel);
    const int end = std::min(first_row + rows, (panel + 1) * kPanel);
    for (int n = begin; n < end; ++n) {
      const auto row = static_cast<size_t>(n - first_row);
      for (int k = 0; k < num_inputs_; ++k) {
        codes_.data()[Index(n, k)] = codes[row * inputs + static_cast<size_t>(k)];
      }
      for (size_t s = 0; s < segments; ++s) {
        scales_.data()[(static_cast<size_t>(panel) * segments + s) * kPanel +
                       static_cast<size_t>(n % kPanel)] = scales[row * segments + s];
      }
    }
  });
}

PackedMatrix PackedMatrix::Mxfp4(int num_outputs, int num_inputs, GemmPath path) {
  OSCAR_CHECK(num_outputs > 0 && num_inputs > 0 && num_inputs % kMxfp4Block == 0 &&
              IsSupported(path) && path != GemmPath::kAmxBf16);
  PackedMatrix matrix;
  matrix.num_outputs_ = num_outputs;
  matrix.num_inputs_ = matrix.padded_inputs_ = num_inputs;
  matrix.path_ = path;
  const auto elements =
      static_cast<size_t>(matrix.num_panels()) * kPanel * static_cast<size_t>(num_inputs);
  matrix.codes_ = AlignedBuffer<uint8_t>(elements / 2);
  matrix.block_scales_ = AlignedBuffer<uint8_t>(elements / kMxfp4Block);
  std::memset(matrix.codes_.data(), 0, matrix.codes_.size());
  std::memset(matrix.block_scales_.data(), 127, matrix.block_scales_.size());
  return matrix;
}

// A byte holds the codes of words 64 i + j and 64 i + 32 + j of a BF16 panel, j below 32.
void PackedMatrix::PackMxfp4Rows(ThreadPool& pool, int first_row, int rows,
                                 std::span<const uint8_t> codes, std::span<const uint8_t> scales) {
  const auto inputs = static_cast<size_t>(num_inputs_), blocks = inputs / kMxfp4Block;
  OSCAR_CHECK(is_mxfp4() && first_row >= 0 && rows >= 0 && first_row + rows <= num_outputs_ &&
              codes.size() == static_cast<size_t>(rows) * inputs / 2 &&
              scales.size() == static_cast<size_t>(rows) * blocks);
  const int first_panel = first_row / kPanel, end_panel = CeilDiv(first_row + rows, kPanel);
  pool.ParallelFor(end_panel - first_panel, [&](int64_t p, int) {
    const int panel = first_panel + static_cast<int>(p);
    const int begin = std::max(first_row, panel * kPanel);
    const int end = std::min(first_row + rows, (panel + 1) * kPanel);
    for (int n = begin; n < end; ++n) {
      const auto row = static_cast<size_t>(n - first_row);
      for (int k = 0; k < num_inputs_; ++k) {
        const size_t from = row * inputs + static_cast<size_t>(k), at = Index(n, k);
        const auto code = static_cast<uint8_t>(codes[from / 2] >> (from % 2 * 4) & 15);
        uint8_t& to = codes_.data()[at / 64 * 32 + at % 32];
        to = static_cast<uint8_t>(at % 64 < 32 ? (to & 0xf0) | code : (to & 0x0f) | code << 4);
      }
      for (size_t block = 0; block < blocks; ++block) {
        block_scales_.data()[BlockIndex(panel, static_cast<int>(block)) * kPanel +
                             static_cast<size_t>(n % kPanel)] = scales[row * blocks + block];
      }
    }
  });
}

Bf16 PackedMatrix::At(int output, int input) const { return {data_.data()[Index(output, input)]}; }

template <typename T>
void PackedMatrix::Pack(ThreadPool& pool, int first_row, int rows, std::span<const T> source) {
  OSCAR_CHECK(first_row >= 0 && rows >= 0 && first_row + rows <= num_outputs_ &&
              source.size() == static_cast<size_t>(rows) * static_cast<size_t>(num_inputs_));
  // A task owns whole panels, so that no two threads write one cache line.
  const int first_panel = first_row / kPanel, end_panel = CeilDiv(first_row + rows, kPanel);
  pool.ParallelFor(end_panel - first_panel, [&](int64_t p, int) {
    const int panel = first_panel + static_cast<int>(p);
    const int begin = std::max(first_row, panel * kPanel);
    const int end = std::min(first_row + rows, (panel + 1) * kPanel);
    for (int k = 0; k < num_inputs_; ++k) {
      for (int n = begin; n < end; ++n) {
        const size_t at = static_cast<size_t>(n - first_row) * static_cast<size_t>(num_inputs_) +
                          static_cast<size_t>(k);
        data_.data()[Index(n, k)] = AsBf16(source[at]).bits;
      }
    }
  });
}

void PackedMatrix::PackRows(ThreadPool& pool, int first_row, int rows,
                            std::span<const Bf16> source) {
  Pack(pool, first_row, rows, source);
}
void PackedMatrix::PackRows(ThreadPool& pool, int first_row, int rows,
                            std::span<const float> source) {
  Pack(pool, first_row, rows, source);
}
void PackedMatrix::PackRows(ThreadPool& pool, int first_row, int rows,
                            std::span<const Fp16> source) {
  Pack(pool, first_row, rows, source);
}

void Gemm(ThreadPool& pool, GemmWorkspace& workspace, const float* x, int num_rows, size_t x_stride,
          const PackedMatrix& w, const float* bias, float* y, size_t y_stride) {
  if (num_rows <= 0) return;
  OSCAR_CHECK(!w.is_fp8() && !w.is_mxfp4());
  if (w.path() == GemmPath::kFma) {
    GemmFma(pool, workspace, x, num_rows, x_stride, w, bias, y, y_stride);
  } else if (w.path() == GemmPath::kAmxBf16) {
    GemmAmx(pool, workspace, x, num_rows, x_stride, w, bias, y, y_stride);
  } else {
    GemmBf16(pool, workspace, x, num_rows, x_stride, w, bias, y, y_stride);
  }
}

}  // namespace oscar::simd
