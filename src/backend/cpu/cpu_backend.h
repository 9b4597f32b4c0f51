// The operations on the host's processor: packed BF16 weights, fp32 activations, attention straight
// from the cache's pages.
#pragma once

#include <memory>

#include "backend/backend.h"
#include "oscar/status.h"
#include "weights/source.h"

namespace oscar {

// Features that the kernels lack.
Status CheckCpuFeatures(const ModelSpec& spec);
// What the processor or the kernels would refuse.
Status CheckCpuPlan(const ModelSpec& spec, const KvPlan& plan);

// Packs the weights for this processor, a few rows at a time: the most it holds besides the packed
// weights is BackendOptions::staging_bytes (at least a panel for each thread, and an FP8 expert's
// codes) and the source's own.
// `threads` and `plan` must outlive the backend.
Result<std::unique_ptr<Backend>> MakeCpuBackend(const ModelSpec& spec, const WeightSource& source,
                                                const KvPlan& plan, ThreadPool& threads,
                                                const BackendOptions& options);

}  // namespace oscar
