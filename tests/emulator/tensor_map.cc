#include "emulator/tensor_map.h"

#include <cuda.h>

#include <cstring>

namespace oscar::emulator {

namespace {

// With the driver's conditions on matrices.
CUresult Encode(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* address,
                const cuuint64_t* sizes, const cuuint64_t* pitches, const cuuint32_t* box,
                const cuuint32_t* steps, CUtensorMapInterleave interleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  TensorMap map;
  map.element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8      ? 1
                      : type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ? 2
                                                                 : 0;
  const bool swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  if (map.element_bytes == 0 || rank != 2 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      (!swizzled && swizzle != CU_TENSOR_MAP_SWIZZLE_NONE) ||
      fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE || steps[0] != 1 || steps[1] != 1) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  map.magic = TensorMap::kMagic;
  map.address = reinterpret_cast<uint64_t>(address);
  map.row_bytes = sizes[0] * map.element_bytes;
  map.rows = sizes[1];
  map.pitch = pitches[0];
  map.box_bytes = box[0] * map.element_bytes;
  map.box_rows = box[1];
  map.swizzled = swizzled ? 1 : 0;
  constexpr uint64_t kMost = uint64_t{1} << 32;
  const bool fits = map.address % 16 == 0 && map.pitch % 16 == 0 && map.pitch < kMost << 8 &&
                    sizes[0] > 0 && sizes[0] <= kMost && sizes[1] > 0 && sizes[1] <= kMost &&
                    box[0] > 0 && box[0] <= 256 && box[1] > 0 && box[1] <= 256 &&
                    map.box_bytes % 16 == 0 && (!swizzled || map.box_bytes <= 128);
  if (!fits) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(static_cast<void*>(out), &map, sizeof(map));
  return CUDA_SUCCESS;
}

}  // namespace

void* TensorMapEncoder(const char* name) {
  return std::strcmp(name, "cuTensorMapEncodeTiled") == 0 ? reinterpret_cast<void*>(&Encode)
                                                          : nullptr;
}

}  // namespace oscar::emulator
