// From CUDA error codes to Status. Include from .cc and .cu files only.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "oscar/status.h"

namespace oscar::cuda {

inline Status CudaStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  const StatusCode code = error == cudaErrorMemoryAllocation ? StatusCode::kResourceExhausted
                          : error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver
                              ? StatusCode::kUnavailable
                              : StatusCode::kInternal;
  return {code, std::string(what) + ": " + cudaGetErrorString(error)};
}

struct DeviceLimits {
  int multiprocessors = 0;
  int shared_per_multiprocessor = 0;
  int shared_per_block = 0;  // after opting in
  int shared_reserved = 0;   // per block
  int major = 0;
};
Result<DeviceLimits> CurrentDeviceLimits();

}  // namespace oscar::cuda
