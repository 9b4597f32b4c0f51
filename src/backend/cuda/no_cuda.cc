#include "cuda/cuda_backend.h"

namespace oscar {
namespace {

Status NoCuda() {
  return Unimplemented(
      "this program was built without CUDA; build it with -DOSCAR_CUDA=ON, or use --device cpu");
}

}  // namespace

Result<DeviceInfo> FindCudaDevice() { return Unexpected(NoCuda()); }
Status CheckCudaPlan(const ModelSpec&, const KvPlan&) { return NoCuda(); }
uint64_t CudaPageBudget(const KvPlan&, uint64_t) { return 0; }
Result<std::unique_ptr<Backend>> MakeCudaBackend(const ModelSpec&, const WeightSource&,
                                                 const KvPlan&, ThreadPool&,
                                                 const BackendOptions&) {
  return Unexpected(NoCuda());
}

}  // namespace oscar
