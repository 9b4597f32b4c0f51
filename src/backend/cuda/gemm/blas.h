// Large GEMMs by cuBLASLt, loaded at run time: a machine without it (or without a GPU) still
// starts the program. Algorithms are the library's first choice for a shape, never timed, so that
// the same shape gives the same bits in every process. One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>

#include "base/half.h"
#include "cuda/attention/cache_view.h"
#include "cuda/gemm/gemm_arguments.h"
#include "oscar/status.h"

namespace oscar::cuda {

class Blas {
 public:
  static constexpr size_t kWorkspaceBytes = size_t{32} << 20;

  // kUnavailable, naming what was tried, where the library is not there. `workspace` is device
  // memory of kWorkspaceBytes.
  static Result<std::unique_ptr<Blas>> Load(void* workspace);
  ~Blas();

  // out [rows, out_stride] = x [rows, inputs] * weights [outputs, inputs]^T; kFloat or kAdd,
  // without bias. Asynchronous; may be captured once the shape has been seen.
  Status Gemm(const Bf16* weights, const Bf16* x, void* out, int out_stride, int outputs,
              int inputs, int rows, GemmOutput output, Stream stream);

 private:
  struct Library;
  struct Plan;
  explicit Blas(void* workspace);
  Result<Plan*> Find(int out_stride, int outputs, int inputs, int rows, GemmOutput output);

  void* workspace_;
  std::unique_ptr<Library> library_;
  std::map<std::tuple<int, int, int, int, GemmOutput>, std::unique_ptr<Plan>> plans_;
};

}  // namespace oscar::cuda
