#include "cuda/device/cuda_status.h"

namespace oscar::cuda {

Result<DeviceLimits> CurrentDeviceLimits() {
  int device = 0;
  if (Status s = CudaStatus(cudaGetDevice(&device), "finding the CUDA device"); !s.ok()) {
    return Unexpected(std::move(s));
  }
  DeviceLimits limits;
  const struct {
    int* value;
    cudaDeviceAttr attribute;
  } wanted[] = {
      {&limits.multiprocessors, cudaDevAttrMultiProcessorCount},
      {&limits.shared_per_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor},
      {&limits.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin},
      {&limits.shared_reserved, cudaDevAttrReservedSharedMemoryPerBlock},
      {&limits.major, cudaDevAttrComputeCapabilityMajor},
  };
  for (const auto& w : wanted) {
    Status s = CudaStatus(cudaDeviceGetAttribute(w.value, w.attribute, device),
                          "reading the CUDA device's limits");
    if (!s.ok()) return Unexpected(std::move(s));
  }
  return limits;
}

}  // namespace oscar::cuda
