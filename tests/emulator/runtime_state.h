// The state behind the CUDA runtime's functions: modules, kernels, streams, the last error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "emulator/machine.h"
#include "emulator/memory.h"
#include "emulator/ptx_parser.h"

namespace oscar::emulator {

// A device of which only what programs ask for is known.
struct DeviceModel {
  const char* name;
  int major, minor, multiprocessors;
  int shared_per_multiprocessor, shared_per_block;
  uint64_t memory_bytes;
};

struct LoadedModule {
  const void* container = nullptr;
  std::unique_ptr<Module> module;  // once a kernel of it is needed
  std::string error;
};

// A kernel as the host knows it.
struct Kernel {
  LoadedModule* module = nullptr;
  std::string name;
  std::unique_ptr<Program> program;  // once it is launched or asked about
  std::string error;
  int max_dynamic_shared = 48 << 10;
};

struct Graph {
  std::vector<std::function<void()>> work;
};

struct Stream {
  std::unique_ptr<Graph> capture;
};

class Runtime {
 public:
  static Runtime& Get();

  const DeviceModel& device() const { return device_; }
  Memory& memory() { return memory_; }

  LoadedModule* AddModule(const void* container);
  void AddKernel(LoadedModule* module, const void* host, const char* name);
  // Of a host function or of a handle that __cudaGetKernel gave; null where there is none.
  Kernel* FindKernel(const void* function);
  // Reads the kernel's PTX at first.
  cudaError_t Load(Kernel* kernel);
  cudaError_t LaunchKernel(const void* function, Dim3 grid, Dim3 block, void** args, size_t shared,
                           cudaStream_t stream, uint32_t cluster = 0);
  void Enqueue(cudaStream_t stream, std::function<void()> work);

  cudaError_t Return(cudaError_t error);
  // What a launch left behind: reported once.
  cudaError_t TakeFault();
  cudaError_t TakeLast();
  cudaError_t last() const { return last_; }
  const char* fault_text() const { return fault_text_.c_str(); }

 private:
  Runtime();
  void Run(const Launch& launch);

  std::recursive_mutex mutex_;
  DeviceModel device_;
  int threads_ = 1;
  bool trace_ = false, late_copies_ = false;
  Memory memory_;
  std::vector<std::unique_ptr<LoadedModule>> modules_;
  std::map<const void*, std::unique_ptr<Kernel>> kernels_;
  std::map<const void*, Kernel*> handles_;
  cudaError_t last_ = cudaSuccess, fault_ = cudaSuccess;
  std::string fault_text_;
};

}  // namespace oscar::emulator
