#include "cuda/gemm/blas.h"

#include <fmt/core.h>

#ifdef OSCAR_HAVE_CUBLASLT
#include <cublasLt.h>
#include <dlfcn.h>

#include <cstdlib>
#include <string>
#include <vector>
#endif

namespace oscar::cuda {

#ifdef OSCAR_HAVE_CUBLASLT

namespace {

Status BlasStatus(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return {};
  return {
      status == CUBLAS_STATUS_ALLOC_FAILED ? StatusCode::kResourceExhausted : StatusCode::kInternal,
      fmt::format("{}: cuBLASLt status {}", what, static_cast<int>(status))};
}

}  // namespace

// The entry points used, found by name.
struct Blas::Library {
  void* handle = nullptr;
  cublasLtHandle_t context = nullptr;
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtDestroy) destroy = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulDescCreate) desc_create = nullptr;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;

  ~Library() {
    if (context != nullptr) destroy(context);
    // The library stays loaded: unloading it under live CUDA state is not safe.
  }
  template <typename F>
  bool Get(const char* name, F* function) {
    *function = reinterpret_cast<F>(::dlsym(handle, name));
    return *function != nullptr;
  }
};

struct Blas::Plan {
  Library* library = nullptr;
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, out = nullptr;
  cublasLtMatmulAlgo_t algorithm{};

  ~Plan() {
    if (desc != nullptr) library->desc_destroy(desc);
    for (cublasLtMatrixLayout_t layout : {w, x, out}) {
      if (layout != nullptr) library->layout_destroy(layout);
    }
  }
};

Blas::Blas(void* workspace) : workspace_(workspace), library_(std::make_unique<Library>()) {}
Blas::~Blas() { plans_.clear(); }

Result<std::unique_ptr<Blas>> Blas::Load(void* workspace) {
  std::unique_ptr<Blas> blas(new Blas(workspace));
  Library& library = *blas->library_;
  const std::string name = fmt::format("libcublasLt.so.{}", CUBLAS_VER_MAJOR);
  std::vector<std::string> places = {name};
  if (const char* home = std::getenv("CUDA_HOME"))
    places.push_back(fmt::format("{}/lib64/{}", home, name));
  places.push_back(fmt::format("/usr/local/cuda/lib64/{}", name));
  for (const std::string& place : places) {
    if (library.handle == nullptr) library.handle = ::dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  if (library.handle == nullptr) {
    return Unexpected(
        Unavailable(fmt::format("{} was not found (add its folder to LD_LIBRARY_PATH)", name)));
  }
  const bool complete =
      library.Get("cublasLtCreate", &library.create) &&
      library.Get("cublasLtDestroy", &library.destroy) &&
      library.Get("cublasLtMatmul", &library.matmul) &&
      library.Get("cublasLtMatmulDescCreate", &library.desc_create) &&
      library.Get("cublasLtMatmulDescDestroy", &library.desc_destroy) &&
      library.Get("cublasLtMatmulDescSetAttribute", &library.desc_set) &&
      library.Get("cublasLtMatrixLayoutCreate", &library.layout_create) &&
      library.Get("cublasLtMatrixLayoutDestroy", &library.layout_destroy) &&
      library.Get("cublasLtMatmulPreferenceCreate", &library.preference_create) &&
      library.Get("cublasLtMatmulPreferenceDestroy", &library.preference_destroy) &&
      library.Get("cublasLtMatmulPreferenceSetAttribute", &library.preference_set) &&
      library.Get("cublasLtMatmulAlgoGetHeuristic", &library.heuristic);
  if (!complete)
    return Unexpected(Unavailable(fmt::format("{}: not the library it should be", name)));
  OSCAR_RETURN_IF_ERROR(BlasStatus(library.create(&library.context), "starting cuBLASLt"));
  return blas;
}

Result<Blas::Plan*> Blas::Find(int out_stride, int outputs, int inputs, int rows,
                               GemmOutput output) {
  auto& slot = plans_[{out_stride, outputs, inputs, rows, output}];
  if (slot != nullptr) return slot.get();
  Library& lib = *library_;
  auto plan = std::make_unique<Plan>();
  plan->library = &lib;
  // Column-major: out [outputs, rows] = op_T(w [inputs, outputs]) * x [inputs, rows].
  OSCAR_RETURN_IF_ERROR(BlasStatus(lib.desc_create(&plan->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F),
                                   "describing a product"));
  const cublasOperation_t transpose = CUBLAS_OP_T;
  OSCAR_RETURN_IF_ERROR(BlasStatus(
      lib.desc_set(plan->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof(transpose)),
      "describing a product"));
  const auto m = static_cast<uint64_t>(outputs), k = static_cast<uint64_t>(inputs),
             n = static_cast<uint64_t>(rows);
  OSCAR_RETURN_IF_ERROR(
      BlasStatus(lib.layout_create(&plan->w, CUDA_R_16BF, k, m, inputs), "describing weights"));
  OSCAR_RETURN_IF_ERROR(
      BlasStatus(lib.layout_create(&plan->x, CUDA_R_16BF, k, n, inputs), "describing inputs"));
  OSCAR_RETURN_IF_ERROR(BlasStatus(lib.layout_create(&plan->out, CUDA_R_32F, m, n, out_stride),
                                   "describing outputs"));
  cublasLtMatmulPreference_t preference = nullptr;
  OSCAR_RETURN_IF_ERROR(BlasStatus(lib.preference_create(&preference), "choosing a product"));
  const size_t limit = kWorkspaceBytes;
  Status status =
      BlasStatus(lib.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &limit,
                                    sizeof(limit)),
                 "choosing a product");
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  if (status.ok()) {
    status = BlasStatus(lib.heuristic(lib.context, plan->desc, plan->w, plan->x, plan->out,
                                      plan->out, preference, 1, &found, &count),
                        "choosing a product");
  }
  lib.preference_destroy(preference);
  OSCAR_RETURN_IF_ERROR(status);
  if (count == 0) {
    return Unexpected(Unimplemented(
        fmt::format("cuBLASLt has no GEMM of {} x {} with {} rows", outputs, inputs, rows)));
  }
  plan->algorithm = found.algo;
  slot = std::move(plan);
  return slot.get();
}

Status Blas::Gemm(const Bf16* weights, const Bf16* x, void* out, int out_stride, int outputs,
                  int inputs, int rows, GemmOutput output, Stream stream) {
  OSCAR_ASSIGN_OR_RETURN(Plan * plan, Find(out_stride, outputs, inputs, rows, output));
  const float one = 1.0f, beta = output == GemmOutput::kAdd ? 1.0f : 0.0f;
  return BlasStatus(library_->matmul(library_->context, plan->desc, &one, weights, plan->w, x,
                                     plan->x, &beta, out, plan->out, out, plan->out,
                                     &plan->algorithm, workspace_, kWorkspaceBytes, stream),
                    "a product");
}

#else

struct Blas::Library {};
struct Blas::Plan {};
Blas::Blas(void* workspace) : workspace_(workspace) {}
Blas::~Blas() = default;
Result<std::unique_ptr<Blas>> Blas::Load(void*) {
  return Unexpected(Unavailable("built without cuBLASLt"));
}
Status Blas::Gemm(const Bf16*, const Bf16*, void*, int, int, int, int, GemmOutput, Stream) {
  return Unimplemented("built without cuBLASLt");
}

#endif

}  // namespace oscar::cuda
