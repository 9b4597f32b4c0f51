// GEMMs of a pass against cuBLASLt, one table each. Shapes are those of Qwen3-8B and Qwen3-4B.
// Random operands, weights of several copies so that none is warm in the L2. The library's time is
// the best of the algorithms it proposes, each timed; "first" is the one it puts first. Errors are
// against the library's sums.
//   gemm_cuda_bench [ROWS,ROWS,...]            prompts, BF16: our tiles. Medians of single launches
//                                              between events.
//   gemm_cuda_bench --batches [ROWS,ROWS,...]  decode steps, FP8 against BF16: medians of recorded
//                                              runs of 24 launches. "old" is the skinny kernel,
//                                              "new" the one for batches with the plan it chose
//                                              (blocks of a cluster x groups of 64 rows), "best"
//                                              the fastest plan of all.
#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "base/fp8.h"
#include "cuda/device/device_buffer.h"
#include "cuda/gemm/batch_gemm.h"
#include "cuda/gemm/fp8_kernels.h"
#include "cuda/gemm/skinny_gemm.h"
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

// A product of the library's, out [rows, outputs] in `type`, and the algorithms it proposes.
class LibraryGemm {
 public:
  LibraryGemm(const Library& library, int outputs, int inputs, int rows, cudaDataType_t type)
      : library_(library) {
    Check(cublasLtMatmulDescCreate(&desc_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t transpose = CUBLAS_OP_T;
    Check(cublasLtMatmulDescSetAttribute(desc_, CUBLASLT_MATMUL_DESC_TRANSA, &transpose,
                                         sizeof(transpose)));
    const auto m = static_cast<uint64_t>(outputs), k = static_cast<uint64_t>(inputs),
               n = static_cast<uint64_t>(rows);
    Check(cublasLtMatrixLayoutCreate(&w_, CUDA_R_16BF, k, m, inputs));
    Check(cublasLtMatrixLayoutCreate(&x_, CUDA_R_16BF, k, n, inputs));
    Check(cublasLtMatrixLayoutCreate(&out_, type, m, n, outputs));
    cublasLtMatmulPreference_t preference;
    Check(cublasLtMatmulPreferenceCreate(&preference));
    const size_t limit = Library::kWorkspace;
    Check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                               &limit, sizeof(limit)));
    Check(cublasLtMatmulAlgoGetHeuristic(library.handle, desc_, w_, x_, out_, out_, preference, 8,
                                         found_, &count_));
  }
  int count() const { return count_; }
  void Run(int algorithm, const Bf16* w, const Bf16* x, void* out, float beta,
           cudaStream_t stream = nullptr) const {
    const float one = 1.0f;
    Check(cublasLtMatmul(library_.handle, desc_, &one, w, w_, x, x_, &beta, out, out_, out, out_,
                         &found_[algorithm].algo, library_.workspace, Library::kWorkspace, stream));
  }

 private:
  const Library& library_;
  cublasLtMatmulDesc_t desc_;
  cublasLtMatrixLayout_t w_, x_, out_;
  cublasLtMatmulHeuristicResult_t found_[8];
  int count_ = 0;
};

// Best and first time of the library's algorithms.
struct LibraryTimes {
  float best = 0.0f, first = 0.0f;
  int best_index = 0;
};
LibraryTimes TimeLibrary(const Library& library, const std::vector<const Bf16*>& weights,
                         const Bf16* x, void* out, int outputs, int inputs, int rows,
                         cudaDataType_t type, float beta) {
  const LibraryGemm gemm(library, outputs, inputs, rows, type);
  LibraryTimes times;
  for (int i = 0; i < gemm.count(); ++i) {
    const float ms = MedianMs(7, [&](int run) {
      gemm.Run(i, weights[static_cast<size_t>(run) % weights.size()], x, out, beta);
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

// ---- decode steps ----

// Codes near a normal distribution, in words of base/fp8.h.
__global__ void FillCodes(uint32_t* to, size_t count, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t{256} + threadIdx.x; i < count; i += gridDim.x * size_t{256}) {
    uint32_t codes = 0;
    for (int k = 0; k < 4; ++k) {
      codes |= uint32_t{ToF8E4M3(16.0f * Gaussian(i * 4 + static_cast<uint64_t>(k) + seed))}
               << (8 * k);
    }
    to[i] = PackFp8(codes);
  }
}
// Powers of two, so that weights multiplied out are exact.
__global__ void FillScales(float* to, int count) {
  for (int i = static_cast<int>(blockIdx.x * 256 + threadIdx.x); i < count;
       i += static_cast<int>(gridDim.x) * 256) {
    to[i] = i % 3 == 0 ? 0x1p-9f : 0x1p-10f;
  }
}

constexpr int kRecorded = 24;  // launches
// Microseconds a launch, of recorded runs.
float RecordedUs(cudaStream_t stream, const std::function<void(int)>& launch) {
  cudaGraph_t graph;
  cudaGraphExec_t runs;
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kRecorded; ++i) launch(i);
  Check(cudaStreamEndCapture(stream, &graph));
  Check(cudaGraphInstantiate(&runs, graph, 0));
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin));
  Check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = -1; i < 7; ++i) {
    Check(cudaEventRecord(begin, stream));
    Check(cudaGraphLaunch(runs, stream));
    Check(cudaEventRecord(end, stream));
    Check(cudaEventSynchronize(end));
    float ms = 0.0f;
    Check(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 0) times.push_back(ms);
  }
  Check(cudaEventDestroy(begin));
  Check(cudaEventDestroy(end));
  Check(cudaGraphExecDestroy(runs));
  Check(cudaGraphDestroy(graph));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] * 1e3f / kRecorded;
}

double Rms(const float* a, const float* b, size_t count) {
  auto sums = Check(DeviceBuffer<double>::Allocate(2));
  Check(sums.Fill(0));
  Difference<<<512, 256>>>(a, b, count, sums.data());
  Check(cudaDeviceSynchronize());
  const auto totals = Check(sums.ToHost());
  return std::sqrt(totals[0] / totals[1]);
}

// The rows of a launch by the skinny kernel, as many launches as they take.
void Skinny(GemmArguments args, cudaStream_t stream) {
  const int rows = args.rows;
  const auto element = static_cast<size_t>(args.output == GemmOutput::kSiluMul ? 2 : 4);
  for (int first = 0; first < rows; first += kFp8SkinnyRows) {
    args.rows = std::min(kFp8SkinnyRows, rows - first);
    Check(LaunchSkinny(args, false, stream));
    args.x += int64_t{args.rows} * args.matrix.inputs;
    args.out = static_cast<std::byte*>(args.out) +
               static_cast<size_t>(args.rows) * static_cast<size_t>(args.out_stride) * element;
  }
}

void RunBatches(const std::vector<int>& all_rows) {
  Library library;
  Check(cublasLtCreate(&library.handle));
  auto workspace = Check(DeviceBuffer<std::byte>::Allocate(Library::kWorkspace));
  library.workspace = workspace.data();
  cudaStream_t stream;
  Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  std::printf("GEMMs of batches: %s; times in us, GB/s of weights\n",
              HasBatchGemm() ? "yes" : "no");
  std::printf("%-12s %4s | %13s | %6s %8s | %7s %13s %8s %5s %12s | %7s %13s %8s %5s %12s\n",
              "shape", "rows", "bf16 library", "out us", "GB/s", "rows:old", "new", "rms", "plan",
              "best", "blocks:old", "new", "rms", "plan", "best");
  for (const Shape& shape : {Shape{"8B qkv", 6144, 4096, GemmOutput::kFloat},
                             Shape{"8B o", 4096, 4096, GemmOutput::kAdd},
                             Shape{"8B gate, up", 24576, 4096, GemmOutput::kSiluMul},
                             Shape{"8B down", 4096, 12288, GemmOutput::kAdd}}) {
    const bool pair = shape.output == GemmOutput::kSiluMul;
    const auto outputs = static_cast<size_t>(shape.outputs),
               inputs = static_cast<size_t>(shape.inputs), size = outputs * inputs;
    // Together more than the L2 holds several times.
    const size_t copies = std::max<size_t>(2, (size_t{256} << 20) / size);
    auto codes = Check(DeviceBuffer<uint32_t>::Allocate(copies * size / 4));
    FillCodes<<<2048, 256>>>(codes.data(), copies * size / 4, 3);
    auto bf16 = Check(DeviceBuffer<Bf16>::Allocate(copies * size));
    auto scales = Check(DeviceBuffer<float>::Allocate(outputs));
    FillScales<<<64, 256>>>(scales.data(), shape.outputs);
    const auto matrix = [&](bool blocks, size_t copy) {
      DeviceMatrix m;
      m.codes = codes.data() + copy % copies * (size / 4);
      m.scales = scales.data();
      m.outputs = shape.outputs;
      m.inputs = shape.inputs;
      if (blocks) m.scale_rows = 128, m.scale_columns = shape.inputs / kScaleInputs;
      return m;
    };
    const float out_us = RecordedUs(stream, [&](int i) {
      const auto copy = static_cast<size_t>(i) % copies;
      Check(LaunchMultiplyOut(matrix(false, copy), bf16.data() + copy * size, stream));
    });
    const double out_rate = 3e-3 * static_cast<double>(size) / out_us;
    for (const int rows : all_rows) {
      const auto n = static_cast<size_t>(rows);
      auto x = Check(DeviceBuffer<Bf16>::Allocate(n * inputs));
      Fill<<<1024, 256>>>(reinterpret_cast<__nv_bfloat16*>(x.data()), n * inputs, 1.0f, 9);
      auto sums = Check(DeviceBuffer<float>::Allocate(n * outputs));
      auto theirs = Check(DeviceBuffer<float>::Allocate(n * outputs));
      auto ours = Check(DeviceBuffer<float>::Allocate(n * outputs));
      auto widened = Check(DeviceBuffer<float>::Allocate(n * outputs));
      const LibraryGemm gemm(library, shape.outputs, shape.inputs, rows, CUDA_R_32F);
      const float beta = shape.output == GemmOutput::kAdd ? 1.0f : 0.0f;
      Check(sums.Fill(0));
      float library_us = 0.0f;
      for (int algorithm = 0; algorithm < gemm.count(); ++algorithm) {
        const float us = RecordedUs(stream, [&](int i) {
          gemm.Run(algorithm, bf16.data() + static_cast<size_t>(i) % copies * size, x.data(),
                   sums.data(), beta, stream);
          if (pair) {
            Check(LaunchSiluMul(sums.data(), reinterpret_cast<Bf16*>(theirs.data()), rows,
                                shape.outputs / 2, stream));
          }
        });
        library_us = algorithm == 0 ? us : std::min(us, library_us);
      }
      std::printf("%-12s %4d | %7.1f %5.0f | %6.1f %8.0f |", shape.name, rows, library_us,
                  2e-3 * static_cast<double>(size) / library_us, out_us, out_rate);
      for (const bool blocks : {false, true}) {
        GemmArguments args;
        args.matrix = matrix(blocks, 0);
        args.x = x.data();
        args.out = ours.data();
        args.rows = rows;
        args.output = shape.output;
        args.out_stride = args.outputs();
        Check(ours.Fill(0));
        const float old_us = RecordedUs(stream, [&](int i) {
          args.matrix = matrix(blocks, static_cast<size_t>(i));
          Skinny(args, stream);
        });
        std::printf(" %8.1f", old_us);
        if (!HasBatchGemm()) continue;
        const auto time = [&](const BatchGemmPlan& plan) {
          return RecordedUs(stream, [&](int i) {
            args.matrix = matrix(blocks, static_cast<size_t>(i));
            Check(LaunchBatchGemm(args, plan, stream));
          });
        };
        const BatchGemmPlan plan = PlanBatchGemm(args.matrix, shape.output, rows);
        const float new_us = time(plan);
        BatchGemmPlan best;
        float best_us = 0.0f;
        for (const int cluster : {1, 2, 4, 8}) {
          for (int groups = 1; groups <= 4; ++groups) {
            const BatchGemmPlan other{.groups = groups, .cluster = cluster};
            const float us = time(other);
            if (best_us == 0.0f || us < best_us) best_us = us, best = other;
          }
        }
        // Once from nothing, against the library.
        args.matrix = matrix(blocks, 0);
        Check(LaunchMultiplyOut(args.matrix, bf16.data(), nullptr));
        gemm.Run(0, bf16.data(), x.data(), theirs.data(), 0.0f);
        Check(ours.Fill(0));
        Check(LaunchBatchGemm(args, plan, nullptr));
        double rms = 0.0;
        if (pair) {
          const size_t count = n * outputs / 2;
          Check(LaunchSiluMul(theirs.data(), reinterpret_cast<Bf16*>(sums.data()), rows,
                              shape.outputs / 2, nullptr));
          Widen<<<1024, 256>>>(reinterpret_cast<const __nv_bfloat16*>(sums.data()), theirs.data(),
                               count);
          Widen<<<1024, 256>>>(reinterpret_cast<const __nv_bfloat16*>(ours.data()), widened.data(),
                               count);
          rms = Rms(widened.data(), theirs.data(), count);
        } else {
          rms = Rms(ours.data(), theirs.data(), n * outputs);
        }
        std::printf(" %7.1f %5.0f %8.1e  %dx%d  %dx%d %7.1f |", new_us,
                    1e-3 * static_cast<double>(size) / new_us, rms, plan.cluster, plan.groups,
                    best.cluster, best.groups, best_us);
        // Back to what the library's times are for.
        Check(LaunchMultiplyOut(matrix(false, 0), bf16.data(), nullptr));
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
}

std::vector<int> RowsOf(const char* text) {
  std::vector<int> rows;
  std::stringstream list(text);
  for (std::string item; std::getline(list, item, ',');) rows.push_back(std::stoi(item));
  return rows;
}

}  // namespace
}  // namespace oscar::cuda

int main(int argc, char** argv) {
  using oscar::cuda::RowsOf;
  if (argc > 1 && std::string_view(argv[1]) == "--batches") {
    oscar::cuda::RunBatches(RowsOf(argc > 2 ? argv[2] : "8,16,32,48,64"));
  } else {
    oscar::cuda::Run(RowsOf(argc > 1 ? argv[1] : "8192,2048,512,256,128,64"));
  }
  return 0;
}
