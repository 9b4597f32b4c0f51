// Which device there is and what it cannot run.
#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include "cuda/attention/decode_attention.h"
#include "cuda/cuda_backend.h"
#include "cuda/device/cuda_status.h"
#include "cuda/experts/routing.h"
#include "cuda/kv/device_pages.h"
#include "cuda/kv/form_seal_params.h"
#include "cuda/linear_attention/linear_attention.h"
#include "cuda/step_kernels.h"

namespace oscar {

using cuda::CudaStatus;

namespace {

// 13000 -> "13.0".
std::string VersionOf(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

}  // namespace

Result<DeviceInfo> FindCudaDevice() {
  DeviceInfo device;
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  cudaGetLastError();  // a failure here is an answer, not an error
  if (error == cudaErrorInsufficientDriver) {
    // What the runtime says where there is no driver at all, too.
    if (cudaDriverGetVersion(&device.driver) != cudaSuccess || device.driver == 0) {
      return Unexpected(NotFound("no CUDA device: no NVIDIA driver is installed"));
    }
    return Unexpected(Unavailable(
        fmt::format("the NVIDIA driver speaks CUDA {}, this program needs {}; update the driver",
                    VersionOf(device.driver), VersionOf(CUDART_VERSION))));
  }
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0)) {
    return Unexpected(NotFound("no CUDA device was found"));
  }
  if (error != cudaSuccess) {
    return Unexpected(
        Unavailable(fmt::format("the CUDA device cannot be used: {}", cudaGetErrorString(error))));
  }
  cudaDeviceProp properties{};
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaGetDeviceProperties(&properties, 0), "the CUDA device"));
  device.name = properties.name;
  device.major = properties.major;
  device.minor = properties.minor;
  OSCAR_RETURN_IF_ERROR(CudaStatus(cudaDriverGetVersion(&device.driver), "the CUDA driver"));
  if (!cuda::KernelsRunHere()) {
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

uint64_t CudaPageBudget(const KvPlan& plan, uint64_t bytes) {
  return cuda::DevicePages::SizesOf(plan.cache()).BudgetOf(bytes);
}

Status CheckCudaPlan(const ModelSpec& spec, const KvPlan& plan) {
  OSCAR_RETURN_IF_ERROR(CheckCudaFeatures(spec));
  const CacheConfig& config = plan.cache();
  if (config.seals() && plan.method().k.form != SideForm::kRows &&
      (spec.attention().has_sinks || config.window > 0)) {
    return Unimplemented(fmt::format(
        "--kv {}: the GPU has no kernels for its pages beside sinks or sliding windows; "
        "use --device cpu",
        plan.method().name));
  }
  const AttentionSpec& attention = spec.attention();
  if (attention.num_kv_heads < 1 || attention.num_heads % attention.num_kv_heads != 0 ||
      attention.queries_per_kv_head() > cuda::kMaxGroupSize) {
    return Unimplemented(fmt::format(
        "{} query heads on {} KV heads: the GPU takes a whole number from 1 to {} of them on each; "
        "use --device cpu",
        attention.num_heads, attention.num_kv_heads, cuda::kMaxGroupSize));
  }
  if (const LinearAttentionSpec* linear = spec.linear_attention()) {
    OSCAR_RETURN_IF_ERROR(cuda::CheckLinearAttention(*linear));
  }
  for (const LayerSpec& layer : spec.layers) {
    int middle = layer.dense() != nullptr ? layer.dense()->intermediate : 0;
    if (const ExpertsSpec* experts = layer.experts()) {
      OSCAR_RETURN_IF_ERROR(cuda::CheckExperts(*experts));
      middle = experts->shared_intermediate;
    }
    if (spec.hidden % 4 == 0 && spec.hidden <= cuda::kMaxNormWidth && middle % 4 == 0) continue;
    return Unimplemented(
        fmt::format("hidden size {}, intermediate size {}: the GPU takes multiples of 4, hidden "
                    "sizes up to {}; use --device cpu",
                    spec.hidden, middle, cuda::kMaxNormWidth));
  }
  if (plan.method().k.norm == TokenNorm::kAllHeads &&
      config.sealed.kv_heads() > cuda::kMaxNormHeads) {
    return Unimplemented(fmt::format(
        "--kv {}: {} KV heads share norms, the GPU takes {}; use --device cpu, or norm=head",
        plan.method().name, config.sealed.kv_heads(), cuda::kMaxNormHeads));
  }
  if (plan.method().k.form == SideForm::kRows && !config.sealed.is_uniform() &&
      config.sealed.kv_heads() > cuda::kMaxMixedHeads) {
    return Unimplemented(
        fmt::format("--kv {}: {} KV heads with different bits, the GPU takes {}; use --device cpu, "
                    "or --bits 2.25, which gives every head two",
                    plan.method().name, config.sealed.kv_heads(), cuda::kMaxMixedHeads));
  }
  // Rows of layers with a sliding window are not rotated.
  const SideTransform* first = nullptr;
  for (int slot = 0; slot < spec.num_kv_layers(); ++slot) {
    if (!config.sealed.Holds(slot)) continue;
    if (first == nullptr) first = &plan.k(slot);
    if (plan.k(slot).kind != first->kind) {
      return Unimplemented(
          "layers with different rotations run on the CPU alone; use --device cpu");
    }
  }
  if (config.open.block(0, 0).order() != CodeOrder::kTensorCore) {
    return InvalidArgument("pages in CPU order cannot be read by the GPU");
  }
  return {};
}

}  // namespace oscar
