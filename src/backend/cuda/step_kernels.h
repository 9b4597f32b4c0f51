// The small kernels of a pass: embedding, norms, activations, page-table updates, and what
// calibration and random weights need. Each is one asynchronous launch that may be captured.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/half.h"
#include "cuda/attention/cache_view.h"
#include "oscar/status.h"

namespace oscar::cuda {

// Whether the current device can run what this program was built for.
bool KernelsRunHere();

// x[r] = table[tokens[r]], where -1 - i stands for sampled[i] [num_sampled]; ids outside [0, vocab)
// read row 0.
Status LaunchEmbed(const int32_t* tokens, const int32_t* sampled, int num_sampled,
                   const Bf16* table, float* x, int rows, int hidden, int vocab, Stream stream);

// Numbers of a row that LaunchNorm takes, at most, and in multiples of 4.
inline constexpr int kMaxNormWidth = 16384;
// out[r] = weight * x[source(r)] / rms, BF16. `sources` null: row r itself.
Status LaunchNorm(const float* x, const float* weight, float epsilon, const int32_t* sources,
                  Bf16* out, int rows, int hidden, Stream stream);

// out[r][i] = silu(gate_up[r][i]) * gate_up[r][width + i], rounded once.
Status LaunchSiluMul(const float* gate_up, Bf16* out, int rows, int width, Stream stream);

// out[r][i] += bias[i] for i < width; rows are `stride` apart.
Status LaunchAddBias(float* out, const float* bias, int rows, int width, int stride, Stream stream);

struct TableUpdate {
  int32_t index, value;
};
// table[index] = value; no index twice.
Status LaunchScatter(const TableUpdate* updates, int count, int32_t* table, Stream stream);

// The numbers of MakeRandomWeights for (seed, stream_id), from element `first` on.
Status LaunchRandomWeights(uint64_t seed, uint64_t stream_id, Bf16* out, int64_t count,
                           Stream stream);

// The same of MakeRandomWeights' MXFP4 matrices, as rows of base/mxfp4.h `row_bytes` apart; what
// inputs do not fill is zero. `alternates`: rows are gates and ups in turn and become gates, then
// ups.
Status LaunchRandomMxfp4(uint64_t seed, uint64_t stream_id, uint8_t scale, uint8_t* out, int rows,
                         int inputs, int64_t row_bytes, bool alternates, Stream stream);

// Reads all of `data` once; what it finds goes to *sink only if it never is.
Status LaunchRead(const std::byte* data, int64_t bytes, uint32_t* sink, Stream stream);

}  // namespace oscar::cuda
