// Linear attention (LinearAttentionSpec) on the device: convolution, gates, the delta rule and the
// gated norm of what it gives, in one launch per layer. A block per (sequence, value head) holds
// the head's matrix in registers, so that a step reads and writes each state once. Asynchronous;
// may be captured.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "arch/spec.h"
#include "base/half.h"
#include "cuda/attention/cache_view.h"
#include "cuda/attention/prefill_params.h"
#include "cuda/device_weights.h"
#include "oscar/status.h"

namespace oscar::cuda {

// Key dims and value dims of a head (multiples of 4) and taps of the convolution that the kernels
// take, at most.
inline constexpr int kMaxStateKeyDim = 128, kMaxStateValueDim = 128, kMaxConvTaps = 4;
// kUnimplemented with the numbers, where they are others.
Status CheckLinearAttention(const LinearAttentionSpec& spec);

struct StateArguments {
  LinearAttentionSpec spec;
  DeviceStateLayer weights;
  float norm_epsilon = 0.0f;
  const float* inputs = nullptr;  // [rows, input_width], device
  // States of a sequence lie at arena + its place * place_bytes + layer_offset.
  std::byte* arena = nullptr;
  int64_t place_bytes = 0, layer_offset = 0;
  const int32_t* states = nullptr;  // [batch], device: places; -1: nothing is done
  // [batch], device; null: a token per sequence, at row = its index.
  const PrefillChunk* chunks = nullptr;
  int batch = 0;
};

// The recurrent form. `out` [rows, value_width], rounded once. `arrivals` [batch, key heads], zero,
// and left zero. One order of sums, token by token: neither where a prompt is cut nor what else is
// in the pass shows.
Status LaunchStates(const StateArguments& args, uint32_t* arrivals, Bf16* out, Stream stream);

// At most kStateTileTokens rows of one sequence, on the grid of positions.
struct StateTile {
  int32_t row = 0, tokens = 0;
  int32_t item = 0;  // of StateArguments::chunks
};
inline constexpr int kStateTileTokens = 64;
// The tiles of an item.
struct TileRange {
  int32_t first = 0, count = 0;
};

// The chunked form on tensor cores, of chunks alone: for the one shape that models are published
// with (key and value dims, taps; rows of inputs a multiple of 4 long).
inline constexpr int kChunkDim = 128, kChunkTaps = 4;
bool HasStateChunks(const LinearAttentionSpec& spec);
// Tiles that the workspace holds, which is what stays in the L2.
inline constexpr int kStateTilesAtOnce = 16;
size_t StateChunkWorkspace(const LinearAttentionSpec& spec, int max_rows);
// Tiles of all items in order of rows, on the host and on the device, and those of each. Where a
// prompt is cut shows in the last bits, unless it is at a multiple of kStateTileTokens.
Status LaunchStateChunks(const StateArguments& args, std::span<const StateTile> host_tiles,
                         const StateTile* tiles, const TileRange* ranges, void* workspace,
                         Bf16* out, Stream stream);

}  // namespace oscar::cuda
