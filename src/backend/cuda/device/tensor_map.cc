#include "cuda/device/tensor_map.h"

#include <cuda_runtime_api.h>

#include <string>

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

struct Boxes {
  CUtensorMapDataType type;
  CUtensorMapSwizzle swizzle;
  int rows, columns;
};
Result<CUtensorMap> MapOf(const void* matrix, int64_t rows, int64_t columns, int64_t pitch_bytes,
                          const Boxes& boxes) {
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t pitch[1] = {static_cast<cuuint64_t>(pitch_bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(boxes.columns),
                             static_cast<cuuint32_t>(boxes.rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      TheEncodeTiled()(&map, boxes.type, 2, const_cast<void*>(matrix), sizes, pitch, box, steps,
                       CU_TENSOR_MAP_INTERLEAVE_NONE, boxes.swizzle,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return Unexpected(Internal("describing a matrix of " + std::to_string(rows) + " x " +
                               std::to_string(columns) + " to the copy engine: error " +
                               std::to_string(static_cast<int>(result))));
  }
  return map;
}

}  // namespace

bool HasTensorMaps() { return TheEncodeTiled() != nullptr; }

Result<CUtensorMap> SwizzledMap(const Bf16* matrix, int64_t rows, int inputs, int box_rows) {
  return MapOf(
      matrix, rows, inputs, int64_t{inputs} * 2,
      {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_128B, box_rows, kSwizzledInputs});
}

Result<CUtensorMap> SwizzledByteMap(const void* matrix, int64_t rows, int64_t row_bytes,
                                    int box_rows) {
  return MapOf(
      matrix, rows, row_bytes, row_bytes,
      {CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B, box_rows, kSwizzledInputs * 2});
}

Result<CUtensorMap> ByteMap(const void* matrix, int64_t rows, int64_t row_bytes, int box_rows,
                            int box_bytes) {
  return MapOf(matrix, rows, row_bytes, row_bytes,
               {CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_NONE, box_rows, box_bytes});
}

}  // namespace oscar::cuda
