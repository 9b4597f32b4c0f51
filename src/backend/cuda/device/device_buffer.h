// DeviceBuffer<T>: device memory that frees itself, for set-up code, tests and benchmarks. Include
// from .cc and .cu files only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "cuda/device/cuda_status.h"

namespace oscar::cuda {

template <typename T>
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~DeviceBuffer() { cudaFree(data_); }

  // Uninitialised.
  static Result<DeviceBuffer> Allocate(size_t size) {
    DeviceBuffer buffer;
    void* data = nullptr;
    OSCAR_RETURN_IF_ERROR(CudaStatus(cudaMalloc(&data, size * sizeof(T) + 16), "device memory"));
    buffer.data_ = static_cast<T*>(data);
    buffer.size_ = size;
    return buffer;
  }
  static Result<DeviceBuffer> Copy(std::span<const T> host) {
    OSCAR_ASSIGN_OR_RETURN(DeviceBuffer buffer, Allocate(host.size()));
    OSCAR_RETURN_IF_ERROR(
        CudaStatus(cudaMemcpy(buffer.data_, host.data(), host.size_bytes(), cudaMemcpyHostToDevice),
                   "copying to the device"));
    return buffer;
  }

  T* data() const { return data_; }
  size_t size() const { return size_; }
  Status Fill(int byte) {
    return CudaStatus(cudaMemset(data_, byte, size_ * sizeof(T)), "filling device memory");
  }
  Result<std::vector<T>> ToHost() const {
    std::vector<T> host(size_);
    OSCAR_RETURN_IF_ERROR(
        CudaStatus(cudaMemcpy(host.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost),
                   "copying from the device"));
    return host;
  }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace oscar::cuda
