// A stand-in for cuBLASLt: the project's GEMMs in fp32 on the CPU. Its own library, because the
// program loads cuBLASLt by name.
#include <cublasLt.h>
#include <fmt/core.h>

#include <cstring>
#include <vector>

#include "emulator/emulator.h"

using oscar::emulator::CheckDeviceMemory;

namespace {

struct Matmul {
  cublasOperation_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
};
struct Layout {
  cudaDataType type;
  uint64_t rows, columns;
  int64_t stride;
};
int context;

float Number(const void* at, cudaDataType type, size_t i) {
  if (type == CUDA_R_32F) return static_cast<const float*>(at)[i];
  const uint32_t bits = uint32_t{static_cast<const uint16_t*>(at)[i]} << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// [columns of op(matrix)'s other side][k], so that dot products run along both.
std::vector<float> Unfold(const void* at, const Layout& layout, bool k_along_columns, size_t k,
                          size_t other) {
  std::vector<float> out(k * other);
  for (size_t o = 0; o < other; ++o) {
    for (size_t i = 0; i < k; ++i) {
      const size_t row = k_along_columns ? o : i, column = k_along_columns ? i : o;
      out[o * k + i] = Number(at, layout.type, row + column * static_cast<size_t>(layout.stride));
    }
  }
  return out;
}

bool Reachable(const void* at, const Layout& layout, const char* what) {
  const size_t element = layout.type == CUDA_R_32F ? 4 : 2;
  const size_t numbers = (layout.columns - 1) * static_cast<size_t>(layout.stride) + layout.rows;
  const std::string error = CheckDeviceMemory(at, numbers * element);
  if (!error.empty()) fmt::print(stderr, "CUDA emulator: a GEMM's {}: {}\n", what, error);
  return error.empty();
}

}  // namespace

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* out) {
  *out = reinterpret_cast<cublasLtHandle_t>(&context);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t) { return CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* out, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  *out = reinterpret_cast<cublasLtMatmulDesc_t>(new Matmul);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  delete reinterpret_cast<Matmul*>(desc);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t which,
                                              const void* value, size_t bytes) {
  auto* matmul = reinterpret_cast<Matmul*>(desc);
  if (bytes != sizeof(cublasOperation_t)) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (which == CUBLASLT_MATMUL_DESC_TRANSA) {
    std::memcpy(&matmul->transpose_a, value, bytes);
  } else if (which == CUBLASLT_MATMUL_DESC_TRANSB) {
    std::memcpy(&matmul->transpose_b, value, bytes);
  } else {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* out, cudaDataType type,
                                          uint64_t rows, uint64_t columns, int64_t stride) {
  if (type != CUDA_R_32F && type != CUDA_R_16BF) return CUBLAS_STATUS_NOT_SUPPORTED;
  *out = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{type, rows, columns, stride});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete reinterpret_cast<Layout*>(layout);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* out) {
  *out = reinterpret_cast<cublasLtMatmulPreference_t>(new int);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete reinterpret_cast<int*>(preference);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                    cublasLtMatmulPreferenceAttributes_t,
                                                    const void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int wanted,
                                              cublasLtMatmulHeuristicResult_t* out, int* count) {
  if (wanted < 1) return CUBLAS_STATUS_INVALID_VALUE;
  *out = {};
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t, void* d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t*, void* workspace, size_t workspace_bytes,
                              cudaStream_t stream) {
  const Matmul matmul = *reinterpret_cast<Matmul*>(desc);
  const Layout la = *reinterpret_cast<Layout*>(a_layout), lb = *reinterpret_cast<Layout*>(b_layout),
               ld = *reinterpret_cast<Layout*>(d_layout);
  const bool ta = matmul.transpose_a == CUBLAS_OP_T, tb = matmul.transpose_b == CUBLAS_OP_T;
  const uint64_t m = ta ? la.columns : la.rows, k = ta ? la.rows : la.columns;
  const uint64_t n = tb ? lb.rows : lb.columns;
  if ((tb ? lb.columns : lb.rows) != k || ld.rows != m || ld.columns != n ||
      ld.type != CUDA_R_32F || c != d) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (!Reachable(a, la, "first matrix") || !Reachable(b, lb, "second matrix") ||
      !Reachable(d, ld, "result") || !CheckDeviceMemory(workspace, workspace_bytes).empty()) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  float scale, keep;
  std::memcpy(&scale, alpha, 4);
  std::memcpy(&keep, beta, 4);
  oscar::emulator::Enqueue(stream, [=] {
    const std::vector<float> left = Unfold(a, la, !ta, k, m), right = Unfold(b, lb, tb, k, n);
    auto* out = static_cast<float*>(d);
    for (size_t j = 0; j < n; ++j) {
      for (size_t i = 0; i < m; ++i) {
        const float *x = &left[i * k], *y = &right[j * k];
        // Sixteen sums at once, so that the compiler may use vectors.
        float sums[16] = {};
        size_t p = 0;
        for (; p + 16 <= k; p += 16) {
          for (size_t q = 0; q < 16; ++q) sums[q] = __builtin_fmaf(x[p + q], y[p + q], sums[q]);
        }
        float sum = 0.0f;
        for (const float s : sums) sum += s;
        for (; p < k; ++p) sum = __builtin_fmaf(x[p], y[p], sum);
        float& at = out[i + j * static_cast<size_t>(ld.stride)];
        at = scale * sum + (keep != 0.0f ? keep * at : 0.0f);
      }
    }
  });
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
