// Which device there is and what it cannot run.
#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include "cuda/cuda_status.h"
#include "gpu/cuda_model.h"
#include "gpu/step_kernels.h"

namespace oscar {

using cuda::CudaStatus;

Result<CudaDevice> FindCudaDevice() {
  CudaDevice device;
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess || count == 0) {
    return Unexpected(Unavailable(fmt::format(
        "no CUDA device: {}", error != cudaSuccess ? cudaGetErrorString(error) : "none is there")));
  }
  cudaDeviceProp properties{};
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaGetDeviceProperties(&properties, 0), "the CUDA device"));
  device.name = properties.name;
  device.major = properties.major;
  device.minor = properties.minor;
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaDriverGetVersion(&device.driver), "the CUDA driver"));
  if (!gpu::KernelsRunHere()) {
    return Unexpected(Unavailable(
        fmt::format("{} has compute capability {}.{}, which this program was not built for; add it "
                    "to OSCAR_CUDA_ARCHITECTURES",
                    device.name, device.major, device.minor)));
  }
  size_t free = 0, total = 0;
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaMemGetInfo(&free, &total), "the CUDA device's memory"));
  device.free_bytes = free;
  device.total_bytes = total;
  return device;
}

Status CheckCudaPlan(const ModelSpec& spec, const KvPlan& plan) {
  const CacheConfig& config = plan.cache();
  if (plan.method().is_simulated() ||
      (config.sealer != nullptr && (plan.rules().empty() || config.sealer->pages_together() > 1))) {
    return Unimplemented(fmt::format(
        "--kv {}: simulated methods run on the CPU alone; use --device cpu", plan.method().name));
  }
  const PageLayout& first = config.sealed.layout(0);
  for (int i = 0; i < spec.num_layers; ++i) {
    if (!(config.sealed.layout(i) == first)) {
      return Unimplemented(
          fmt::format("--kv {}: layers with different pages run on the CPU alone; use --device cpu",
                      plan.method().name));
    }
    if (plan.k(i).kind != plan.k(0).kind) return Unimplemented("layers with different rotations");
  }
  if (config.open.layout(0).order() != CodeOrder::kTensorCore) {
    return InvalidArgument("pages in CPU order cannot be read by the GPU");
  }
  return {};
}

}  // namespace oscar
