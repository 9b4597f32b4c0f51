// Samples tokens from logits where the logits are, so that only ids come back: the most likely one,
// or top-k, top-p and min-p in the order of engine/sampler.h, or from all of them.
#pragma once

#include <cstdint>

#include "backend/sample_params.h"
#include "cuda/attention/cache_view.h"
#include "oscar/status.h"

namespace oscar::cuda {

// [rows]: ids[r] from logits[sources[r]], or SampleParams's kNotFinite or kUndecided. `sampling`,
// the masks it points to and `sources` in device memory.
Status LaunchSample(const float* logits, const int32_t* sources, const SampleParams* sampling,
                    int32_t* ids, int rows, int vocab, Stream stream);

}  // namespace oscar::cuda
