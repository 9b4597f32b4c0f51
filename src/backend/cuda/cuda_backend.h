// The operations on one CUDA device. Weights, pages, tables and workspaces are taken from the
// device once, at load; afterwards nothing is allocated there. Where the build has no CUDA,
// FindCudaDevice and MakeCudaBackend fail with kUnimplemented.
#pragma once

#include <cstdint>
#include <memory>

#include "backend/backend.h"
#include "backend/device_info.h"
#include "cuda/attention/cache_view.h"
#include "oscar/status.h"
#include "weights/source.h"

namespace oscar {

// kNotFound where there is none, kUnavailable with the reason where there is one that these kernels
// do not run on.
Result<DeviceInfo> FindCudaDevice();

// Features that the kernels lack. The same with and without CUDA in the build.
inline Status CheckCudaFeatures(const ModelSpec& spec) {
  OSCAR_RETURN_IF_ERROR(
      CheckFeatures(spec,
                    {Feature::kPartialRope, Feature::kQkNormAllHeads, Feature::kOutputGate,
                     Feature::kExperts, Feature::kClampedExperts, Feature::kSharedShare,
                     Feature::kLinearAttention, Feature::kSlidingWindow, Feature::kSinks},
                    "a GPU"));
  for (const LayerSpec& layer : spec.layers) {
    const AttentionSpec* attention = layer.attention();
    if (attention == nullptr || (attention->sliding_window == 0 && !attention->has_sinks)) continue;
    if (!attention->has_sinks || attention->head_dim != cuda::kSinkHeadDim) {
      return Unimplemented(
          spec.architecture +
          ": attention with sinks or a sliding window is not computed on a GPU but "
          "with sinks and head dim 64 alone; use --device cpu");
    }
    if (attention->sliding_window != 0 && attention->sliding_window != spec.max_window()) {
      return Unimplemented(
          "sliding windows of different lengths run on the CPU alone; use --device cpu");
    }
  }
  return {};
}
// What the kernels would refuse: methods without real pages, shapes they do not take. Needs no
// device.
Status CheckCudaPlan(const ModelSpec& spec, const KvPlan& plan);
// What BackendOptions::kv_bytes may be where so many bytes of the device are for pages: less than
// all of them, by what does not fit between pages of two sizes. Needs no device.
uint64_t CudaPageBudget(const KvPlan& plan, uint64_t bytes);

// `plan` and `threads` must outlive the backend.
Result<std::unique_ptr<Backend>> MakeCudaBackend(const ModelSpec& spec, const WeightSource& source,
                                                 const KvPlan& plan, ThreadPool& threads,
                                                 const BackendOptions& options);

}  // namespace oscar
