// GroupedGemm of simd/gemm.h: packing, partition and the slices of FP8 and MXFP4 weights.
#include <algorithm>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/mxfp4.h"
#include "simd/gemm.h"
#include "simd/gemm_kernels.h"
#include "simd/vec_ops.h"

namespace oscar::simd {
namespace {

constexpr int kPanel = PackedMatrix::kPanel;
constexpr int kRowsPerChunk = 48;  // whose sums stay in L1; a multiple of every block of rows
// Inputs of a slice of FP8 weights. As BF16 it stays in L1 beside the rows that meet it.
constexpr int kSliceInputs = 128;

constexpr int CeilDiv(int a, int b) { return (a + b - 1) / b; }

// Rows of one group, packed: [blocks of up to tile_rows rows][K][rows of the block] in fp32, or
// [rows][padded K] in BF16.
struct Packed {
  const float* fp32 = nullptr;
  const uint16_t* bf16 = nullptr;
};

struct Task {
  size_t group;
  int first_panel, end_panel;
};

class Multiplier {
 public:
  Multiplier(const GemmGroup& group, const Packed& x, int tile_rows, uint16_t* slice)
      : w_(*group.w), x_(x), tile_rows_(tile_rows), slice_(slice) {}

  // sums [rows, 32] of a panel.
  void Panel(int panel, int first_row, int rows, float* sums) const {
    if (w_.is_mxfp4()) {
      // The whole panel, so that sums run as they do over BF16: 180 KiB of L2 for 2880 inputs.
      const bool in_pairs = w_.path() == GemmPath::kAvx512Bf16;
      for (int block = 0; block * kMxfp4Block < w_.num_inputs(); ++block) {
        ActiveMxfp4Expander()(w_.Mxfp4Codes(panel, block), w_.Mxfp4Scales(panel, block), in_pairs,
                              slice_ + static_cast<ptrdiff_t>(block) * kMxfp4Block * kPanel);
      }
      Slice(slice_, 0, w_.num_inputs(), first_row, rows, sums);
      return;
    }
    if (!w_.is_fp8()) {
      Slice(w_.Panel(panel), 0, w_.padded_inputs(), first_row, rows, sums);
      return;
    }
    const Fp8Kernels& kernels = ActiveFp8Kernels();
    alignas(64) float parts[kRowsPerChunk * kPanel];
    bool first = true;
    const int scale_inputs = w_.scale_inputs();
    for (int begin = 0; begin < w_.num_inputs();) {
      const int segment = begin / scale_inputs;
      const int64_t last = (int64_t{segment} + 1) * scale_inputs;
      int end = static_cast<int>(std::min<int64_t>({begin + kSliceInputs, last, w_.num_inputs()}));
      if (end == w_.num_inputs()) end = w_.padded_inputs();  // zeros
      const auto at = static_cast<size_t>(begin) * kPanel;
      kernels.expand(w_.CodePanel(panel) + at, slice_, static_cast<size_t>(end - begin) * kPanel);
      Slice(slice_, begin, end - begin, first_row, rows, parts);
      kernels.add_scaled(parts, w_.Scales(panel, segment), rows, sums, first);
      first = false;
      begin = end;
    }
  }

 private:
  // Sums over inputs [begin, begin + count), which `weights` start at.
  void Slice(const uint16_t* weights, int begin, int count, int first_row, int rows,
             float* sums) const {
    const auto row = static_cast<size_t>(first_row);
    if (w_.path() == GemmPath::kAvx512Bf16) {
      Avx512Bf16Panel(x_.bf16 + row * static_cast<size_t>(w_.padded_inputs()) + begin, rows,
                      w_.padded_inputs(), count, weights, sums, kPanel);
      return;
    }
    const FmaKernels& kernels = ActiveFmaKernels();
    for (int r = 0; r < rows; r += tile_rows_) {
      const int block = std::min(tile_rows_, rows - r);
      const float* x = x_.fp32 +
                       (row + static_cast<size_t>(r)) * static_cast<size_t>(w_.num_inputs()) +
                       static_cast<ptrdiff_t>(begin) * block;
      kernels.tile(x, block, block, weights, count, sums + static_cast<ptrdiff_t>(r) * kPanel,
                   kPanel, /*first=*/true);
    }
  }

  const PackedMatrix& w_;
  const Packed x_;
  const int tile_rows_;
  uint16_t* const slice_;
};

}  // namespace

GemmPath GroupedGemmPath(GemmPath path) {
  if (path != GemmPath::kAmxBf16) return path;
  return IsSupported(GemmPath::kAvx512Bf16) ? GemmPath::kAvx512Bf16 : GemmPath::kFma;
}

void GroupedGemm(ThreadPool& pool, GroupedGemmWorkspace& workspace, const float* x, size_t x_stride,
                 std::span<const GemmGroup> groups) {
  if (groups.empty()) return;
  const PackedMatrix& shape = *groups.front().w;
  const bool is_bf16 = shape.path() == GemmPath::kAvx512Bf16;
  const int tile_rows = ActiveFmaKernels().tile_rows;
  OSCAR_CHECK(kRowsPerChunk % tile_rows == 0 && shape.path() != GemmPath::kAmxBf16);
  const auto inputs = static_cast<size_t>(shape.num_inputs());
  const auto padded = static_cast<size_t>(shape.padded_inputs());
  // Where each group's rows begin among all.
  std::vector<size_t> first(groups.size() + 1, 0);
  for (size_t g = 0; g < groups.size(); ++g) {
    const PackedMatrix& w = *groups[g].w;
    OSCAR_CHECK(w.num_outputs() == shape.num_outputs() && w.num_inputs() == shape.num_inputs() &&
                w.path() == shape.path() && w.is_mxfp4() == shape.is_mxfp4());
    first[g + 1] = first[g] + groups[g].rows.size();
  }
  struct Block {
    size_t group;
    int first_row, rows;
  };
  std::vector<Block> blocks;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto rows = static_cast<int>(groups[g].rows.size());
    for (int r = 0; r < rows; r += tile_rows) {
      blocks.push_back({g, r, std::min(tile_rows, rows - r)});
    }
  }
  if (is_bf16) {
    workspace.x_bf16.Grow(first.back() * padded);
  } else {
    workspace.x.Grow(first.back() * inputs);
  }
  pool.ParallelFor(static_cast<int64_t>(blocks.size()), [&](int64_t i, int) {
    const Block& block = blocks[static_cast<size_t>(i)];
    const size_t at = first[block.group] + static_cast<size_t>(block.first_row);
    for (int r = 0; r < block.rows; ++r) {
      const int32_t row = groups[block.group].rows[static_cast<size_t>(block.first_row + r)];
      const float* from = x + static_cast<size_t>(row) * x_stride;
      if (is_bf16) {
        uint16_t* to = workspace.x_bf16.data() + (at + static_cast<size_t>(r)) * padded;
        std::fill(to + inputs, to + padded, uint16_t{0});
        ToBf16Row({from, inputs}, {reinterpret_cast<Bf16*>(to), inputs});
      } else {
        float* to = workspace.x.data() + at * inputs + r;
        for (size_t k = 0; k < inputs; ++k) to[k * static_cast<size_t>(block.rows)] = from[k];
      }
    }
  });

  // Tasks of a few panels: enough for the threads to end together, few enough to stream.
  const int panels = shape.num_panels();
  const int total = panels * static_cast<int>(groups.size());
  const int per_task = std::clamp(CeilDiv(total, pool.num_threads() * 8), 1, 8);
  std::vector<Task> tasks;
  for (size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].rows.empty()) continue;
    for (int p = 0; p < panels; p += per_task) {
      tasks.push_back({g, p, std::min(panels, p + per_task)});
    }
  }
  const size_t slice_inputs = shape.is_mxfp4() ? inputs : static_cast<size_t>(kSliceInputs + 32);
  const size_t slice_size = slice_inputs * kPanel + kFp8Slack;
  workspace.slices.Grow(slice_size * static_cast<size_t>(pool.num_threads()));
  pool.ParallelFor(static_cast<int64_t>(tasks.size()), [&](int64_t i, int thread) {
    const Task& task = tasks[static_cast<size_t>(i)];
    const GemmGroup& group = groups[task.group];
    const auto num_rows = static_cast<int>(group.rows.size());
    const auto outputs = static_cast<size_t>(shape.num_outputs());
    const Packed packed{workspace.x.data() + first[task.group] * inputs,
                        workspace.x_bf16.data() + first[task.group] * padded};
    const Multiplier multiplier(group, packed, tile_rows,
                                workspace.slices.data() + slice_size * static_cast<size_t>(thread));
    for (int p = task.first_panel; p < task.end_panel; ++p) {
      const int column = p * kPanel;
      const auto columns = static_cast<size_t>(std::min(kPanel, shape.num_outputs() - column));
      for (int row = 0; row < num_rows; row += kRowsPerChunk) {
        const int rows = std::min(kRowsPerChunk, num_rows - row);
        alignas(64) float sums[kRowsPerChunk * kPanel];
        multiplier.Panel(p, row, rows, sums);
        for (int r = 0; r < rows; ++r) {
          std::memcpy(group.y + static_cast<size_t>(row + r) * outputs + column, sums + r * kPanel,
                      columns * sizeof(float));
        }
      }
    }
  });
}

}  // namespace oscar::simd
