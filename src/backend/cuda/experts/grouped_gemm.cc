#include "cuda/experts/grouped_gemm.h"

namespace oscar::cuda {

namespace {

// The mean of rows per expert from which wgmma's tiles of 128 (64 of a tile are half the work), and
// mma.sync's, are the faster ones.
constexpr int kWgmmaMean = 48, kWideMean = 96;

}  // namespace

GroupedTiles TilesFor(const ExpertsSpec& experts, int rows, bool fp8, bool invariant, bool wgmma) {
  // A tile of 8 holds all rows that any expert may have.
  if (rows <= 8) return {8};
  const int mean = rows * experts.experts_per_token / experts.num_experts;
  // Up to 16 rows per expert the weights are read about once; beyond, the skinny kernel reads them
  // once for every 16, out of the L2 as a rule, while tiles of 64 waste at most 3 of 4 MMAs.
  if (invariant || mean <= kSkinnyTileRows) return {kSkinnyTileRows};
  if (wgmma && mean >= kWgmmaMean) return {kWgmmaTileRows, true};
  return {!fp8 && mean >= kWideMean ? 128 : 64};
}

Status LaunchGroupedGemm(const GroupedGemm& args, const GroupedTiles& tiles, Stream stream) {
  if (args.max_tiles <= 0) return {};
  const bool fp8 = args.matrix.is_fp8();
  if (args.num_experts < 1 || args.matrix.outputs % args.num_experts != 0 ||
      args.matrix.inputs != PaddedInputs(args.matrix.inputs, fp8) || args.out_stride % 2 != 0) {
    return InvalidArgument("a GEMM of experts takes matrices of one shape with padded inputs");
  }
  const bool gated = args.output == GemmOutput::kSiluMul;
  if (gated && args.clamped.has_value() != (args.bias != nullptr)) {
    return InvalidArgument("experts have biases and clamped gates, or neither");
  }
  if (args.matrix.is_mxfp4() && args.bias == nullptr) {
    return InvalidArgument("MXFP4 experts have biases");
  }
  if (fp8 && args.matrix.scale_columns > 1 && args.bias != nullptr) {
    return InvalidArgument("FP8 experts with scales of blocks have no biases");
  }
  if (args.combine.stream != nullptr && (gated || tiles.rows > kCombineRows)) {
    return InvalidArgument("only a GEMM of few rows adds its outputs to the stream");
  }
  if (tiles.wgmma) return LaunchGroupedWgmma(args, stream);
  return tiles.rows <= kSkinnyTileRows ? LaunchGroupedSkinny(args, tiles.rows, stream)
                                       : LaunchGroupedTiles(args, tiles.rows, stream);
}

}  // namespace oscar::cuda
