#include "cuda/cuda_model.h"

namespace oscar {
namespace {

Status NoCuda() {
  return Unimplemented(
      "this program was built without CUDA; build it with -DOSCAR_CUDA=ON, or use --device cpu");
}

}  // namespace

Result<CudaDevice> FindCudaDevice() { return Unexpected(NoCuda()); }
Status CheckCudaPlan(const ModelSpec&, const KvPlan&) { return NoCuda(); }
uint64_t CudaPageBudget(const KvPlan&, uint64_t) { return 0; }
Result<std::unique_ptr<CudaModel>> LoadCudaModel(const ModelSpec&, const WeightSource&, KvPlan&,
                                                 ThreadPool&, const CudaModelOptions&) {
  return Unexpected(NoCuda());
}

}  // namespace oscar
