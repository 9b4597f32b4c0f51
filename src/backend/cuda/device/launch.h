// Launching kernels that begin while the one before them ends (programmatic dependent launch): such
// a kernel calls WaitForPredecessor before it touches what the one before it reads or writes.
// Include from .cc and .cu files only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "cuda/attention/cache_view.h"
#include "cuda/device/cuda_status.h"
#include "oscar/status.h"

namespace oscar::cuda {

struct LaunchShape {
  int blocks = 0, threads = 0;
  int shared_bytes = 0;  // dynamic
  bool overlap = true;   // false: an ordinary launch
  int cluster = 0;       // blocks of a cluster; 0: what the kernel says
};

// Lets `kernel` be launched with that much dynamic shared memory. The limit is the kernel's, and
// several caches of a process may share one: it is raised, never lowered.
inline Status AllowSharedMemory(const void* kernel, int bytes, const char* what) {
  cudaFuncAttributes attributes{};
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaFuncGetAttributes(&attributes, kernel), what));
  if (attributes.maxDynamicSharedSizeBytes >= bytes) return {};
  return CudaStatus(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), what);
}

// `args` point to the kernel's arguments, `what` says "launching ...".
inline Status LaunchOverlapping(const void* kernel, const LaunchShape& shape, void** args,
                                Stream stream, const char* what) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (shape.overlap) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 0) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned>(shape.cluster);
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return CudaStatus(cudaLaunchKernelExC(&config, kernel, args), what);
}

}  // namespace oscar::cuda
