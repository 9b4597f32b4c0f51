// GEMMs of a layer's experts, each with the rows that go to it: one launch for all of them, whose
// work is read from the device (Routing). A row's result depends on the row, its expert and the
// kernel alone.
#pragma once

#include <cstdint>
#include <optional>

#include "cuda/experts/routing.h"
#include "cuda/gemm/gemm_arguments.h"
#include "oscar/status.h"

namespace oscar::cuda {

// Inputs of an expert's matrix are padded with zeros to a multiple of this: whole steps of kernels.
constexpr int PaddedInputs(int inputs, bool fp8) {
  const int unit = fp8 ? kScaleInputs : 64;
  return (inputs + unit - 1) / unit * unit;
}

// What LaunchCombine does, in the GEMM: the block that brings the last of a row's outputs adds
// them, bit for bit alike. At most kCombineRows rows, by LaunchGroupedSkinny.
struct CombineInto {
  float* stream = nullptr;  // [rows, outputs]; null: outputs are only written
  const int32_t* places = nullptr;
  const int32_t* rows = nullptr;
  const float* weights = nullptr;
  int32_t* arrived = nullptr;  // [ArrivalCounters], zero before and after
  int choices = 0;
};

struct GroupedGemm {
  // Rows of all experts, one expert after another. kSiluMul: an expert's gates, then its ups.
  DeviceMatrix matrix;
  // [matrix.outputs], added to the sums, or null. MXFP4 and kSiluMul with `clamped` have it, FP8
  // with scales of blocks has not.
  const float* bias = nullptr;
  std::optional<ClampedGate> clamped = {};  // kSiluMul: in place of SiLU
  int num_experts = 0;
  const Bf16* x = nullptr;          // [*, matrix.inputs]; FP8 matrices: times 2^60
  const int32_t* x_rows = nullptr;  // of x, by place; null: the place itself
  const ExpertTile* tiles = nullptr;
  const int32_t* num_tiles = nullptr;
  int max_tiles = 0;  // no more than that
  void* out =
      nullptr;  // [places, out_stride]: kFloat, or kSiluMul in BF16, zeros beyond the outputs
  int out_stride = 0;
  bool raise = false;  // kSiluMul: times 2^60
  // kSiluMul by wgmma: each 64 outputs as lane_order.h has them. FP8 and MXFP4 matrices take such
  // rows of x there.
  bool lane_order = false;
  GemmOutput output = GemmOutput::kFloat;
  CombineInto combine = {};  // kFloat

  int outputs() const {
    const int rows = matrix.outputs / num_experts;
    return output == GemmOutput::kSiluMul ? rows / 2 : rows;
  }
};

// Rows of a tile that suit so many pairs: at most kSkinnyTileRows for LaunchGroupedSkinny, else for
// LaunchGroupedWgmma or LaunchGroupedTiles. `invariant`: one order of sums for any number of rows.
// `wgmma`: the device and both matrices have it.
inline constexpr int kSkinnyTileRows = 16, kWgmmaTileRows = 128;
struct GroupedTiles {
  int rows = 0;
  bool wgmma = false;
  bool operator==(const GroupedTiles&) const = default;
};
GroupedTiles TilesFor(const ExpertsSpec& experts, int rows, bool fp8, bool invariant, bool wgmma);

// By the kernel that `tiles` says. Asynchronous; may be captured.
Status LaunchGroupedGemm(const GroupedGemm& args, const GroupedTiles& tiles, Stream stream);

// Few rows per expert, at the speed of reading the weights of those that are touched.
Status LaunchGroupedSkinny(const GroupedGemm& args, int tile_rows, Stream stream);
// Tiles of 64 rows, or 128 of BF16 weights, on tensor cores.
Status LaunchGroupedTiles(const GroupedGemm& args, int tile_rows, Stream stream);
// Tiles of kWgmmaTileRows rows by wgmma.
bool HasGroupedWgmma();
Status LaunchGroupedWgmma(const GroupedGemm& args, Stream stream);

}  // namespace oscar::cuda
