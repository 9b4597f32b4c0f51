#include "devices/devices.h"

#include "cpu/cpu_backend.h"
#include "cuda/cuda_backend.h"

namespace oscar {

Result<DeviceInfo> FindDevice(Device device) {
  if (device == Device::kCuda) return FindCudaDevice();
  DeviceInfo cpu;
  cpu.name = "cpu";
  return cpu;
}

Status CheckDeviceFeatures(Device device, const ModelSpec& spec) {
  return device == Device::kCuda ? CheckCudaFeatures(spec) : CheckCpuFeatures(spec);
}

Status CheckPlan(Device device, const ModelSpec& spec, const KvPlan& plan) {
  return device == Device::kCuda ? CheckCudaPlan(spec, plan) : CheckCpuPlan(spec, plan);
}

CodeOrder OrderOf(Device device) {
  return device == Device::kCuda ? CodeOrder::kTensorCore : CodeOrder::kCpu;
}

uint64_t PageBudget(Device device, const KvPlan& plan, uint64_t bytes) {
  return device == Device::kCuda ? CudaPageBudget(plan, bytes) : bytes;
}

Result<std::unique_ptr<Backend>> MakeBackend(Device device, const ModelSpec& spec,
                                             const WeightSource& source, const KvPlan& plan,
                                             ThreadPool& threads, const BackendOptions& options) {
  return device == Device::kCuda ? MakeCudaBackend(spec, source, plan, threads, options)
                                 : MakeCpuBackend(spec, source, plan, threads, options);
}

}  // namespace oscar
