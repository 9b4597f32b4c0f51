// The CUDA runtime's functions that the project calls, on the emulator. What a stream is given runs
// before the call returns, unless the stream is captured.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string_view>

#include "emulator/emulator.h"
#include "emulator/runtime_state.h"
#include "emulator/tensor_map.h"

using namespace oscar::emulator;

namespace {

Runtime& State() { return Runtime::Get(); }

Dim3 Of(const dim3& d) { return {d.x, d.y, d.z}; }

struct CallConfiguration {
  dim3 grid, block;
  size_t shared = 0;
  cudaStream_t stream = nullptr;
};
thread_local std::vector<CallConfiguration> configurations;

struct Event {
  std::chrono::steady_clock::time_point at = std::chrono::steady_clock::now();
};

bool CheckCopy(const void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  std::string what;
  if (to_device) what = CheckDeviceMemory(to, bytes);
  if (what.empty() && from_device) what = CheckDeviceMemory(from, bytes);
  if (what.empty()) return true;
  fmt::print(stderr, "CUDA emulator: a copy of {} bytes: {}\n", bytes, what);
  return false;
}

// Of a launch; 0: what the kernel says.
uint32_t ClusterOf(const cudaLaunchConfig_t& config) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension) {
      const auto& size = config.attrs[i].val.clusterDim;
      return size.x * size.y * size.z;
    }
  }
  return 0;
}

// Two dimensions, boxes of rows of 128 bytes at most.
CUresult EncodeTiled(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* base,
                     const cuuint64_t* sizes, const cuuint64_t* pitches, const cuuint32_t* box,
                     const cuuint32_t* steps, CUtensorMapInterleave interleave,
                     CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                     CUtensorMapFloatOOBfill fill) {
  TensorMap map{};
  map.element_bytes =
      type == CU_TENSOR_MAP_DATA_TYPE_UINT8                                                 ? 1
      : type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 ? 2
                                                                                            : 0;
  const bool swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  if (rank != 2 || map.element_bytes == 0 || steps[0] != 1 || steps[1] != 1 ||
      interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      (!swizzled && swizzle != CU_TENSOR_MAP_SWIZZLE_NONE) ||
      fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  const uint32_t width = box[0] * map.element_bytes;
  if (reinterpret_cast<uint64_t>(base) % 16 != 0 || pitches[0] % 16 != 0 || box[0] == 0 ||
      box[0] > 256 || box[1] == 0 || box[1] > 256 || width % 16 != 0 || (swizzled && width > 128) ||
      sizes[0] == 0 || sizes[1] == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (swizzled && width != 128) return CUDA_ERROR_NOT_SUPPORTED;
  map.magic = TensorMap::kMagic;
  map.base = reinterpret_cast<uint64_t>(base);
  map.size[0] = sizes[0];
  map.size[1] = sizes[1];
  map.pitch = pitches[0];
  map.box[0] = box[0];
  map.box[1] = box[1];
  map.swizzled = swizzled ? 1 : 0;
  std::memcpy(out, &map, sizeof(map));
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

// ---- what nvcc's own code calls ----

void** __cudaRegisterFatBinary(void* fat) {
  struct Wrapper {
    int magic, version;
    const void* data;
    void* file;
  };
  return reinterpret_cast<void**>(State().AddModule(static_cast<Wrapper*>(fat)->data));
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void** module, const char* host, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  State().AddKernel(reinterpret_cast<LoadedModule*>(module), host, name);
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (configurations.empty()) return cudaErrorMissingConfiguration;
  const CallConfiguration c = configurations.back();
  configurations.pop_back();
  *grid = c.grid;
  *block = c.block;
  *shared = c.shared;
  *static_cast<cudaStream_t*>(stream) = c.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* host) {
  Kernel* kernel = State().FindKernel(host);
  *out = reinterpret_cast<cudaKernel_t>(kernel);
  return kernel == nullptr ? cudaErrorInvalidDeviceFunction : cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args,
                               size_t shared, cudaStream_t stream) {
  return State().LaunchKernel(kernel, Of(grid), Of(block), args, shared, stream);
}

// ---- launches ----

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** args,
                             size_t shared, cudaStream_t stream) {
  return State().LaunchKernel(function, Of(grid), Of(block), args, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** args) {
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    // Kernels that may overlap run one after another here.
    if (config->attrs[i].id != cudaLaunchAttributeProgrammaticStreamSerialization &&
        config->attrs[i].id != cudaLaunchAttributeClusterDimension) {
      fmt::print(stderr, "CUDA emulator: launch attribute {} is not implemented\n",
                 static_cast<int>(config->attrs[i].id));
      return State().Return(cudaErrorNotSupported);
    }
  }
  return State().LaunchKernel(function, Of(config->gridDim), Of(config->blockDim), args,
                              config->dynamicSmemBytes, config->stream, ClusterOf(*config));
}
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  Kernel* kernel = State().FindKernel(function);
  if (kernel == nullptr) return State().Return(cudaErrorInvalidDeviceFunction);
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) {
    return State().Return(cudaErrorNotSupported);
  }
  if (const cudaError_t error = State().Load(kernel); error != cudaSuccess) {
    return State().Return(error);
  }
  const int most =
      State().device().shared_per_block - static_cast<int>(kernel->program->static_shared);
  if (value < 0 || value > most) return State().Return(cudaErrorInvalidValue);
  kernel->max_dynamic_shared = value;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned int,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool known =
      std::string_view(name) == "cuTensorMapEncodeTiled" && State().device().major >= 9;
  *function = known ? reinterpret_cast<void*>(&EncodeTiled) : nullptr;
  if (result != nullptr) {
    *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}
// As if one block fitted a multiprocessor, and any of them made a cluster.
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* function,
                                           const cudaLaunchConfig_t* config) {
  Kernel* kernel = State().FindKernel(function);
  if (kernel == nullptr) return State().Return(cudaErrorInvalidDeviceFunction);
  if (const cudaError_t error = State().Load(kernel); error != cudaSuccess) {
    return State().Return(error);
  }
  const uint32_t said = ClusterOf(*config);
  const uint32_t size = said != 0 ? said : std::max(1u, kernel->program->cluster);
  *clusters =
      State().device().major >= 9 ? State().device().multiprocessors / static_cast<int>(size) : 0;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void* function) {
  Kernel* kernel = State().FindKernel(function);
  if (kernel == nullptr) return State().Return(cudaErrorInvalidDeviceFunction);
  if (const cudaError_t error = State().Load(kernel); error != cudaSuccess) {
    return State().Return(error);
  }
  *out = {};
  out->sharedSizeBytes = kernel->program->static_shared;
  out->localSizeBytes = kernel->program->local_bytes;
  out->maxThreadsPerBlock = kernel->program->max_threads;
  out->maxDynamicSharedSizeBytes = kernel->max_dynamic_shared;
  out->binaryVersion = out->ptxVersion = State().device().major * 10 + State().device().minor;
  out->numRegs = 64;  // nobody knows: registers are virtual here
  return cudaSuccess;
}

// ---- devices ----

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : State().Return(cudaErrorInvalidDevice);
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
  if (device != 0) return State().Return(cudaErrorInvalidDevice);
  const DeviceModel& d = State().device();
  *out = {};
  std::strncpy(out->name, d.name, sizeof(out->name) - 1);
  out->major = d.major;
  out->minor = d.minor;
  out->totalGlobalMem = d.memory_bytes;
  out->multiProcessorCount = d.multiprocessors;
  out->warpSize = 32;
  out->maxThreadsPerBlock = 1024;
  out->maxThreadsPerMultiProcessor = 2048;
  out->sharedMemPerBlock = 48 << 10;
  out->sharedMemPerBlockOptin = static_cast<size_t>(d.shared_per_block);
  out->sharedMemPerMultiprocessor = static_cast<size_t>(d.shared_per_multiprocessor);
  out->reservedSharedMemPerBlock = 1 << 10;
  out->regsPerBlock = out->regsPerMultiprocessor = 65536;
  out->l2CacheSize = 50 << 20;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const DeviceModel& d = State().device();
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = d.multiprocessors;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = d.shared_per_multiprocessor;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = d.shared_per_block;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = 48 << 10;
      return cudaSuccess;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      *value = 1 << 10;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = d.major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = d.minor;
      return cudaSuccess;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      return cudaSuccess;
    case cudaDevAttrWarpSize:
      *value = 32;
      return cudaSuccess;
    default:
      break;
  }
  fmt::print(stderr, "CUDA emulator: device attribute {} is not implemented\n",
             static_cast<int>(attribute));
  return State().Return(cudaErrorInvalidValue);
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = State().device().memory_bytes;
  const size_t used = State().memory().used();
  *free = *total > used ? *total - used : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return State().TakeFault(); }

// ---- errors ----

cudaError_t cudaGetLastError() { return State().TakeLast(); }
cudaError_t cudaPeekAtLastError() { return State().last(); }
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaSuccess ? "cudaSuccess" : "an error of the CUDA emulator";
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidDeviceFunction:
      return "invalid device function";
    case cudaErrorLaunchOutOfResources:
      return "too many resources requested for launch";
    case cudaErrorNotSupported:
      return "operation not supported by the emulator";
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorLaunchFailure:
    case cudaErrorNoKernelImageForDevice:
      return State().fault_text();
    default:
      return "an error of the CUDA emulator";
  }
}

// ---- memory ----

cudaError_t cudaMalloc(void** out, size_t bytes) {
  *out = nullptr;
  if (bytes == 0) return cudaSuccess;
  const size_t used = State().memory().used();
  if (bytes >
      State().device().memory_bytes - std::min<size_t>(used, State().device().memory_bytes)) {
    return State().Return(cudaErrorMemoryAllocation);
  }
  *out = State().memory().Allocate(bytes, true);
  return *out != nullptr ? cudaSuccess : State().Return(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void* at) {
  if (at == nullptr || State().memory().Free(at, true)) return cudaSuccess;
  return State().Return(cudaErrorInvalidValue);
}
cudaError_t cudaMallocHost(void** out, size_t bytes) {
  *out = State().memory().Allocate(bytes, false);
  return *out != nullptr ? cudaSuccess : State().Return(cudaErrorMemoryAllocation);
}
cudaError_t cudaFreeHost(void* at) {
  if (at == nullptr || State().memory().Free(at, false)) return cudaSuccess;
  return State().Return(cudaErrorInvalidValue);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  if (!CheckCopy(to, from, bytes, kind)) return State().Return(cudaErrorInvalidValue);
  State().Enqueue(stream, [=] { std::memmove(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const cudaError_t copied = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  const cudaError_t fault = State().TakeFault();
  return fault != cudaSuccess ? fault : copied;
}
cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  if (!CheckCopy(at, at, bytes, cudaMemcpyHostToDevice))
    return State().Return(cudaErrorInvalidValue);
  State().Enqueue(stream, [=] { std::memset(at, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* at, int value, size_t bytes) {
  return cudaMemsetAsync(at, value, bytes, nullptr);
}

// ---- streams, events, graphs ----

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned) {
  *out = reinterpret_cast<cudaStream_t>(new Stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithFlags(out, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete reinterpret_cast<Stream*>(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return State().TakeFault(); }
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  auto* s = reinterpret_cast<Stream*>(stream);
  if (s == nullptr || s->capture != nullptr) return State().Return(cudaErrorIllegalState);
  s->capture = std::make_unique<Graph>();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* out) {
  auto* s = reinterpret_cast<Stream*>(stream);
  if (s == nullptr || s->capture == nullptr) return State().Return(cudaErrorIllegalState);
  *out = reinterpret_cast<cudaGraph_t>(s->capture.release());
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
  *out = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  for (const auto& work : reinterpret_cast<Graph*>(exec)->work) State().Enqueue(stream, work);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete reinterpret_cast<Graph*>(exec);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) {
  *out = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  State().Enqueue(
      stream, [event] { reinterpret_cast<Event*>(event)->at = std::chrono::steady_clock::now(); });
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return State().TakeFault(); }
cudaError_t cudaEventElapsedTime(float* out, cudaEvent_t begin, cudaEvent_t end) {
  const auto time = reinterpret_cast<Event*>(end)->at - reinterpret_cast<Event*>(begin)->at;
  *out = std::chrono::duration<float, std::milli>(time).count();
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

}  // extern "C"
