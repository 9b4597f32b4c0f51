#include "cuda/gemm/tensor_map.h"

#include <cuda_runtime_api.h>
#include <fmt/core.h>

namespace oscar::cuda {
namespace {

using EncodeTiled = CUresult(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                             const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                             const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

EncodeTiled* FindEncodeTiled() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                              12000, cudaEnableDefault, &result);
#else
  const cudaError_t status =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
  if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<EncodeTiled*>(found);
}
EncodeTiled* TheEncodeTiled() {
  static EncodeTiled* const encode = FindEncodeTiled();
  return encode;
}

}  // namespace

bool HasTensorMaps() { return TheEncodeTiled() != nullptr; }

Result<CUtensorMap> TensorMapOf(const void* matrix, const MatrixShape& shape) {
  if (!HasTensorMaps()) return Unexpected(Unavailable("the driver has no tensor maps"));
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(shape.columns),
                               static_cast<cuuint64_t>(shape.rows)};
  const cuuint64_t pitch[1] = {sizes[0] * static_cast<cuuint64_t>(shape.element_bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(128 / shape.element_bytes),
                             static_cast<cuuint32_t>(shape.box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      TheEncodeTiled()(&map, shape.type, 2, const_cast<void*>(matrix), sizes, pitch, box, steps,
                       CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return Unexpected(
        Internal(fmt::format("describing a matrix of {} x {} to the copy engine: "
                             "error {}",
                             shape.rows, shape.columns, static_cast<int>(result))));
  }
  return map;
}

}  // namespace oscar::cuda
