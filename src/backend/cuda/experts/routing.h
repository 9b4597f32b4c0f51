// Which experts the rows of a pass go to, on the device: choice, weights, and the (row, choice)
// pairs sorted by expert and cut into tiles, with no word to the host. Counts stay on the device
// and grids are those of the most there may be, so all of it may be captured. Every launch is
// asynchronous.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arch/spec.h"
#include "base/half.h"
#include "cuda/attention/cache_view.h"
#include "oscar/status.h"

namespace oscar::cuda {

// What the choice takes: a warp has the scores of a row in registers, a lane each group and choice.
inline constexpr int kMaxDeviceExperts = 512, kMaxDeviceGroups = 32, kMaxDeviceChoices = 32;
// kUnimplemented, with the number, where experts are beyond that.
Status CheckExperts(const ExpertsSpec& experts);

// Places [first, first + rows) of the sorted pairs, all of one expert.
struct ExpertTile {
  int32_t expert, first, rows;
};

// Pair i is choice i % experts_per_token (0: the best) of row i / experts_per_token; its place is
// where it comes when pairs are sorted by expert. In device memory.
struct Routing {
  int32_t* experts = nullptr;    // [pairs]; -1: of a padded row
  float* weights = nullptr;      // [pairs]
  int32_t* places = nullptr;     // [pairs]; -1: of a padded row
  int32_t* rows = nullptr;       // [places]
  ExpertTile* tiles = nullptr;   // [MaxTiles]
  int32_t* num_tiles = nullptr;  // [1]
};
// Tiles of at most `tile_rows` places that so many pairs can make.
constexpr int MaxTiles(int pairs, int num_experts, int tile_rows) {
  const int touched = pairs < num_experts ? pairs : num_experts;
  return touched + (pairs - touched) / tile_rows;
}

// How often a layer ran with rows to route, and how many experts it touched; on the device.
struct ExpertCounts {
  uint64_t runs, touched;
};

struct RouterArguments {
  const float* x = nullptr;       // [rows, hidden], the residual stream
  const float* norm = nullptr;    // [hidden]
  const float* router = nullptr;  // [experts, hidden], times `norm`
  const float* bias = nullptr;    // [experts], added to the logits, or null
  float* logits = nullptr;        // [rows, experts]
  // RMSNorm of x in BF16, [rows, normed_stride], zeros beyond hidden; times 2^60 where `raise`
  // (gemm_kernels.cuh: for FP8 weights).
  Bf16* normed = nullptr;
  int normed_stride = 0;
  bool raise = false;
  bool lane_order = false;  // inputs of normed rows as lane_order.h has them
  float epsilon = 0.0f;
  int rows = 0, hidden = 0, num_experts = 0;
};
// Logits and normed rows. A row's bits do not depend on the others.
Status LaunchRouter(const RouterArguments& args, Stream stream);

struct RoutingArguments {
  const float* logits = nullptr;       // [rows, experts]
  bool are_scores = false;             // they are what RouteToken makes of logits
  const float* bias = nullptr;         // [experts], added for the choice, or null
  const int32_t* positions = nullptr;  // [rows]; negative: a padded row, which goes nowhere
  int rows = 0, tile_rows = 0;
};
// All of `routing`, and `counts` where it is not null: RouteToken's rule, equals to the lower
// number.
Status LaunchChoiceAndSort(const ExpertsSpec& experts, const RoutingArguments& args,
                           const Routing& routing, ExpertCounts* counts, Stream stream);

// Rows up to which the down GEMM adds its outputs to the stream itself (GroupedGemm::combine).
inline constexpr int kCombineRows = 8;
constexpr int ArrivalCounters(int outputs) { return kCombineRows * ((outputs + 15) / 16); }
// stream[r] += the outputs [places, hidden] of row r's choices times their weights, fused, the best
// first.
Status LaunchCombine(const Routing& routing, const float* outputs, float* stream_rows, int rows,
                     int hidden, int experts_per_token, Stream stream);

}  // namespace oscar::cuda
