// GEMMs of a prompt's pass: our tiles against cuBLASLt, one table:
//   gemm_cuda_bench [ROWS,ROWS,...]
// Shapes are those of Qwen3-8B and Qwen3-4B. Random operands, weights of several copies so that
// none is warm in the L2; medians of single launches between events. The library's column is the
// best of the algorithms it proposes, each timed; "first" is the one it puts first. Errors are
// against the library's sums.
#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "cuda/device/device_buffer.h"
#include "cuda/gemm/tile_gemm.h"
#include "cuda/step_kernels.h"

namespace oscar::cuda {
namespace {

void Check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "gemm_cuda_bench: %s\n", status.ToString().c_str());
  std::exit(1);
}
template <typename T>
T Check(Result<T> result) {
  if (!result.has_value()) Check(result.error());
  return std::move(result).value();
}
void Check(cudaError_t error) { Check(CudaStatus(error, "CUDA")); }
void Check(cublasStatus_t status) {
  if (status != CUBLAS_STATUS_SUCCESS) Check(Internal("cuBLASLt"));
}

__device__ float Gaussian(uint64_t i) {
  float sum = 0.0f;
  for (int k = 0; k < 4; ++k) {
    uint64_t x = i * 4 + static_cast<uint64_t>(k) + 0x9e3779b97f4a7c15ull;
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ull;
    sum += static_cast<float>(x >> 40) * 0x1p-24f - 0.5f;
  }
  return sum * 1.7320508f;
}
__global__ void Fill(__nv_bfloat16* to, size_t count, float scale, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t{256} + threadIdx.x; i < count; i += gridDim.x * size_t{256}) {
    to[i] = __float2bfloat16(scale * Gaussian(i + (seed << 40)));
  }
}
__global__ void Difference(const float* a, const float* b, size_t count, double* out) {
  double error = 0.0, energy = 0.0;
  for (size_t i = blockIdx.x * size_t{256} + threadIdx.x; i < count; i += gridDim.x * size_t{256}) {
    error += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    energy += double{b[i]} * b[i];
  }
  atomicAdd(out, error);
  atomicAdd(out + 1, energy);
}
__global__ void Widen(const __nv_bfloat16* from, float* to, size_t count) {
  for (size_t i = blockIdx.x * size_t{256} + threadIdx.x; i < count; i += gridDim.x * size_t{256}) {
    to[i] = __bfloat162float(from[i]);
  }
}

float MedianMs(int runs, const std::function<void(int)>& launch) {
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin));
  Check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = -2; i < runs; ++i) {
    Check(cudaEventRecord(begin));
    launch(i + 2);
    Check(cudaEventRecord(end));
    Check(cudaEventSynchronize(end));
    float ms = 0.0f;
    Check(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 0) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

struct Library {
  cublasLtHandle_t handle = nullptr;
  void* workspace = nullptr;
  static constexpr size_t kWorkspace = size_t{64} << 20;
};

// Best and first time of the library's algorithms.
struct LibraryTimes {
  float best = 0.0f, first = 0.0f;
  int best_index = 0;
};
LibraryTimes TimeLibrary(const Library& library, const std::vector<const Bf16*>& weights,
                         const Bf16* x, void* out, int outputs, int inputs, int rows,
                         cudaDataType_t type, float beta) {
  cublasLtMatmulDesc_t desc;
  Check(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const cublasOperation_t transpose = CUBLAS_OP_T;
  Check(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &transpose,
                                       sizeof(transpose)));
  cublasLtMatrixLayout_t w_layout, x_layout, out_layout;
  const auto m = static_cast<uint64_t>(outputs), k = static_cast<uint64_t>(inputs),
             n = static_cast<uint64_t>(rows);
  Check(cublasLtMatrixLayoutCreate(&w_layout, CUDA_R_16BF, k, m, inputs));
  Check(cublasLtMatrixLayoutCreate(&x_layout, CUDA_R_16BF, k, n, inputs));
  Check(cublasLtMatrixLayoutCreate(&out_layout, type, m, n, outputs));
  cublasLtMatmulPreference_t preference;
  Check(cublasLtMatmulPreferenceCreate(&preference));
  const size_t limit = Library::kWorkspace;
  Check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                             &limit, sizeof(limit)));
  cublasLtMatmulHeuristicResult_t found[8];
  int count = 0;
  Check(cublasLtMatmulAlgoGetHeuristic(library.handle, desc, w_layout, x_layout, out_layout,
                                       out_layout, preference, 8, found, &count));
  LibraryTimes times;
  const float one = 1.0f;
  for (int i = 0; i < count; ++i) {
    const float ms = MedianMs(7, [&](int run) {
      Check(cublasLtMatmul(library.handle, desc, &one,
                           weights[static_cast<size_t>(run) % weights.size()], w_layout, x,
                           x_layout, &beta, out, out_layout, out, out_layout, &found[i].algo,
                           library.workspace, Library::kWorkspace, nullptr));
    });
    if (i == 0) times.first = ms;
    if (i == 0 || ms < times.best) times.best = ms, times.best_index = i;
  }
  return times;
}

struct Shape {
  const char* name;
  int outputs, inputs;
  GemmOutput output;
};

void Run(const std::vector<int>& all_rows) {
  Library library;
  Check(cublasLtCreate(&library.handle));
  auto workspace = Check(DeviceBuffer<std::byte>::Allocate(Library::kWorkspace));
  library.workspace = workspace.data();
  std::printf("tiles: %s\n", HasTileGemm() ? "yes" : "no");
  std::printf("%-22s %6s %9s %9s %9s | %9s %9s %9s %s\n", "shape", "rows", "tiles us", "TFLOP/s",
              "rms", "best us", "first us", "TFLOP/s", "(library: fp32; bf16 out best)");
  for (const int rows : all_rows) {
    for (const Shape& shape : {Shape{"8B qkv", 6144, 4096, GemmOutput::kFloat},
                               Shape{"8B o", 4096, 4096, GemmOutput::kAdd},
                               Shape{"8B gate, up", 24576, 4096, GemmOutput::kSiluMul},
                               Shape{"8B down", 4096, 12288, GemmOutput::kAdd},
                               Shape{"4B down", 2560, 9728, GemmOutput::kAdd}}) {
      const auto w_size = static_cast<size_t>(shape.outputs) * static_cast<size_t>(shape.inputs);
      const auto x_size = static_cast<size_t>(rows) * static_cast<size_t>(shape.inputs);
      const auto out_size = static_cast<size_t>(rows) * static_cast<size_t>(shape.outputs);
      auto copies = Check(DeviceBuffer<Bf16>::Allocate(2 * w_size));
      Fill<<<1024, 256>>>(reinterpret_cast<__nv_bfloat16*>(copies.data()), 2 * w_size, 0.03f, 1);
      const std::vector<const Bf16*> weights = {copies.data(), copies.data() + w_size};
      auto x = Check(DeviceBuffer<Bf16>::Allocate(x_size));
      Fill<<<1024, 256>>>(reinterpret_cast<__nv_bfloat16*>(x.data()), x_size, 1.0f, 9);
      auto theirs = Check(DeviceBuffer<float>::Allocate(out_size));
      auto ours = Check(DeviceBuffer<float>::Allocate(out_size));
      auto sums = Check(DeviceBuffer<double>::Allocate(2));
      const float beta = shape.output == GemmOutput::kAdd ? 1.0f : 0.0f;
      const auto fp32 = TimeLibrary(library, weights, x.data(), theirs.data(), shape.outputs,
                                    shape.inputs, rows, CUDA_R_32F, beta);
      const auto bf16 = TimeLibrary(library, weights, x.data(), ours.data(), shape.outputs,
                                    shape.inputs, rows, CUDA_R_16BF, 0.0f);
      GemmArguments args;
      args.x = x.data();
      args.out = ours.data();
      args.rows = rows;
      args.output = shape.output;
      args.matrix.outputs = shape.outputs;
      args.matrix.inputs = shape.inputs;
      args.out_stride = args.outputs();
      float ms = 0.0f;
      double rms = -1.0;
      if (HasTileGemm()) {
        // Once from nothing, against the library.
        Check(ours.Fill(0));
        Check(theirs.Fill(0));
        Check(sums.Fill(0));
        args.matrix.weights = copies.data();
        Check(LaunchTileGemm(args, nullptr));
        TimeLibrary(library, {weights[0]}, x.data(), theirs.data(), shape.outputs, shape.inputs,
                    rows, CUDA_R_32F, 0.0f);
        size_t count = out_size;
        if (shape.output == GemmOutput::kSiluMul) {
          auto gated = Check(DeviceBuffer<Bf16>::Allocate(out_size / 2));
          auto widened = Check(DeviceBuffer<float>::Allocate(out_size / 2));
          Check(LaunchSiluMul(theirs.data(), gated.data(), rows, args.outputs(), nullptr));
          count = out_size / 2;
          Widen<<<1024, 256>>>(reinterpret_cast<const __nv_bfloat16*>(gated.data()), theirs.data(),
                               count);
          Widen<<<1024, 256>>>(reinterpret_cast<const __nv_bfloat16*>(ours.data()), widened.data(),
                               count);
          Difference<<<512, 256>>>(widened.data(), theirs.data(), count, sums.data());
          Check(cudaDeviceSynchronize());
        } else {
          Difference<<<512, 256>>>(ours.data(), theirs.data(), count, sums.data());
          Check(cudaDeviceSynchronize());
        }
        const auto totals = Check(sums.ToHost());
        rms = std::sqrt(totals[0] / totals[1]);
        ms = MedianMs(11, [&](int run) {
          args.matrix.weights = copies.data() + (run % 2 == 0 ? 0 : w_size);
          Check(LaunchTileGemm(args, nullptr));
        });
      }
      const double flops = 2.0 * rows * shape.outputs * static_cast<double>(shape.inputs);
      const auto rate = [&](float time) { return flops / time * 1e-9; };
      std::printf("%-22s %6d %9.1f %9.0f %9.1e | %9.1f %9.1f %9.0f  %d; %9.1f (%.0f) %d\n",
                  shape.name, rows, ms * 1e3f, rate(ms), rms, fp32.best * 1e3f, fp32.first * 1e3f,
                  rate(fp32.best), fp32.best_index, bf16.best * 1e3f, rate(bf16.best),
                  bf16.best_index);
      std::fflush(stdout);
    }
  }
}

}  // namespace
}  // namespace oscar::cuda

int main(int argc, char** argv) {
  std::vector<int> rows;
  std::stringstream list(argc > 1 ? argv[1] : "8192,2048,512,256,128,64");
  for (std::string item; std::getline(list, item, ',');) rows.push_back(std::stoi(item));
  oscar::cuda::Run(rows);
  return 0;
}
