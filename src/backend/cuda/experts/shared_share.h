// How much of a layer's shared expert is added (ExpertsSpec::has_shared_share). Asynchronous; may
// be captured.
#pragma once

#include "base/half.h"
#include "cuda/attention/cache_view.h"
#include "oscar/status.h"

namespace oscar::cuda {

// gated[r] *= sigmoid(share . x[r] / rms): `x` [rows, hidden] is the residual stream, `share`
// [hidden] has the norm's weights in it, `gated` [rows, width] is rounded once more.
Status LaunchSharedShare(const float* x, const float* share, float epsilon, Bf16* gated, int rows,
                         int hidden, int width, Stream stream);

}  // namespace oscar::cuda
