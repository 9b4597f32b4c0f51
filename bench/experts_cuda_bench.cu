// GEMMs of a layer's experts, every kernel that takes the rows beside the others, one table:
//   experts_cuda_bench [ROWS,ROWS,...] [MODEL] [FORMAT]
// MODEL and FORMAT: parts of names. Random weights; rows go to experts that are uniformly random,
// others in each run, so that few rows find theirs outside the L2; medians of single launches
// between events. "rms" is against the first kernel of the shape. GB/s are weights of the experts
// that are touched, once each.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "base/fp8.h"
#include "base/mxfp4.h"
#include "cuda/device/cuda_status.h"
#include "cuda/device/device_buffer.h"
#include "cuda/experts/grouped_gemm.h"
#include "cuda/experts/lane_order.h"

namespace oscar::cuda {
namespace {

void Check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "experts_cuda_bench: %s\n", status.ToString().c_str());
  std::exit(1);
}
template <typename T>
T Check(Result<T> result) {
  if (!result.has_value()) Check(result.error());
  return std::move(result).value();
}
void Check(cudaError_t error) { Check(CudaStatus(error, "CUDA")); }

__device__ uint64_t Mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}
__device__ float Uniform(uint64_t i) {  // variance 1
  return (static_cast<float>(Mixed(i) >> 40) * 0x1p-24f - 0.5f) * 3.4641016f;
}
__global__ void FillBf16(__nv_bfloat16* to, size_t count, float scale, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t{256} + threadIdx.x; i < count; i += gridDim.x * size_t{256}) {
    to[i] = __float2bfloat16(scale * Uniform(i + (seed << 40)));
  }
}
__global__ void FillFloats(float* to, size_t count, float value) {
  for (size_t i = blockIdx.x * size_t{256} + threadIdx.x; i < count; i += gridDim.x * size_t{256}) {
    to[i] = value;
  }
}
// Codes below 2: none is NaN.
__global__ void FillFp8(uint32_t* to, size_t words) {
  for (size_t i = blockIdx.x * size_t{256} + threadIdx.x; i < words; i += gridDim.x * size_t{256}) {
    to[i] = PackFp8(static_cast<uint32_t>(Mixed(i)) & 0xbfbfbfbfu);
  }
}
__global__ void FillMxfp4(uint8_t* to, size_t rows, int inputs) {
  const auto row_bytes = static_cast<size_t>(Mxfp4RowBytes(inputs));
  for (size_t i = blockIdx.x * size_t{256} + threadIdx.x; i < rows * row_bytes;
       i += gridDim.x * size_t{256}) {
    const auto at = static_cast<int>(i % row_bytes % kMxfp4RunBytes);
    to[i] = at < 16 ? 119 : static_cast<uint8_t>(Mixed(i));
  }
}
// The same rows with their inputs in lane order.
__global__ void ToLaneOrder(const __nv_bfloat16* from, __nv_bfloat16* to, size_t count) {
  for (size_t i = blockIdx.x * size_t{256} + threadIdx.x; i < count; i += gridDim.x * size_t{256}) {
    to[(i & ~size_t{63}) + static_cast<size_t>(PlaceOfInput(static_cast<int>(i % 64)))] = from[i];
  }
}
template <typename T>
__global__ void Difference(const T* a, const T* b, size_t count, double factor, double* out) {
  double error = 0.0, energy = 0.0;
  for (size_t i = blockIdx.x * size_t{256} + threadIdx.x; i < count; i += gridDim.x * size_t{256}) {
    const double x = double{static_cast<float>(a[i])} * factor;
    const double y = double{static_cast<float>(b[i])} * factor;
    error += (x - y) * (x - y);
    energy += y * y;
  }
  atomicAdd(out, error);
  atomicAdd(out + 1, energy);
}

float MedianUs(int runs, const std::function<void(int)>& launch) {
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
    if (i >= 0) times.push_back(ms * 1e3f);
  }
  Check(cudaEventDestroy(begin));
  Check(cudaEventDestroy(end));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

enum class Format { kBf16, kFp8Rows, kFp8Blocks, kMxfp4 };
constexpr const char* kFormatNames[] = {"bf16", "fp8-rows", "fp8-blocks", "mxfp4"};

struct Model {
  const char* name;
  int hidden, width, experts, choices;
};

// What a matrix owns.
struct Weights {
  DeviceMatrix matrix;
  DeviceBuffer<Bf16> bf16;
  DeviceBuffer<uint32_t> words;
  DeviceBuffer<uint8_t> bytes;
  DeviceBuffer<float> scales, bias;
};
Weights MakeWeights(Format format, int experts, int rows, int inputs) {
  Weights w;
  DeviceMatrix& m = w.matrix;
  const bool fp8 = format == Format::kFp8Rows || format == Format::kFp8Blocks;
  m.outputs = experts * rows;
  m.inputs = PaddedInputs(inputs, fp8);
  const size_t size = static_cast<size_t>(m.outputs) * static_cast<size_t>(m.inputs);
  if (format == Format::kBf16) {
    w.bf16 = Check(DeviceBuffer<Bf16>::Allocate(size));
    FillBf16<<<1024, 256>>>(reinterpret_cast<__nv_bfloat16*>(w.bf16.data()), size, 0.03f, 1);
    m.weights = w.bf16.data();
  } else if (format == Format::kMxfp4) {
    w.bytes = Check(DeviceBuffer<uint8_t>::Allocate(static_cast<size_t>(m.outputs) *
                                                    static_cast<size_t>(Mxfp4RowBytes(m.inputs))));
    FillMxfp4<<<1024, 256>>>(w.bytes.data(), static_cast<size_t>(m.outputs), m.inputs);
    m.mxfp4 = w.bytes.data();
    w.bias = Check(DeviceBuffer<float>::Allocate(static_cast<size_t>(m.outputs)));
    Check(w.bias.Fill(0));
  } else {
    w.words = Check(DeviceBuffer<uint32_t>::Allocate(size / 4));
    FillFp8<<<1024, 256>>>(w.words.data(), size / 4);
    m.codes = w.words.data();
    if (format == Format::kFp8Blocks) {
      m.scale_rows = rows % 128 == 0 ? 128 : 64;
      m.scale_columns = m.inputs / kScaleInputs;
    }
    const size_t scales =
        static_cast<size_t>(m.outputs / m.scale_rows) * static_cast<size_t>(m.scale_columns);
    w.scales = Check(DeviceBuffer<float>::Allocate(scales));
    FillFloats<<<64, 256>>>(w.scales.data(), scales, 0.05f);
    m.scales = w.scales.data();
  }
  return w;
}

// Rows to experts, in tiles.
struct Routed {
  DeviceBuffer<ExpertTile> tiles;
  DeviceBuffer<int32_t> num_tiles, rows;
  int count = 0, touched = 0;
};
Routed Route(const Model& model, int rows, int tile_rows, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::vector<int32_t>> of(static_cast<size_t>(model.experts));
  std::vector<int> all(static_cast<size_t>(model.experts));
  for (size_t e = 0; e < all.size(); ++e) all[e] = static_cast<int>(e);
  for (int r = 0; r < rows; ++r) {
    for (size_t j = 0; j < static_cast<size_t>(model.choices); ++j) {
      std::swap(all[j], all[j + random() % (all.size() - j)]);
      of[static_cast<size_t>(all[j])].push_back(r);
    }
  }
  Routed routed;
  std::vector<ExpertTile> tiles;
  std::vector<int32_t> places;
  for (int e = 0; e < model.experts; ++e) {
    const auto& mine = of[static_cast<size_t>(e)];
    const auto count = static_cast<int>(mine.size());
    if (count > 0) ++routed.touched;
    for (int first = 0; first < count; first += tile_rows) {
      tiles.push_back(
          {e, static_cast<int32_t>(places.size()) + first, std::min(tile_rows, count - first)});
    }
    places.insert(places.end(), mine.begin(), mine.end());
  }
  routed.count = static_cast<int>(tiles.size());
  routed.tiles = Check(DeviceBuffer<ExpertTile>::Copy(tiles));
  routed.num_tiles = Check(DeviceBuffer<int32_t>::Copy(std::vector<int32_t>{routed.count}));
  routed.rows = Check(DeviceBuffer<int32_t>::Copy(places));
  return routed;
}

std::vector<GroupedTiles> KernelsFor(int rows, int mean, Format format) {
  const bool fp8 = format == Format::kFp8Rows || format == Format::kFp8Blocks;
  if (rows <= 8) return {{8}};
  std::vector<GroupedTiles> kernels;
  if (mean <= 64) kernels.push_back({16});
  if (mean >= 8) {
    kernels.push_back({64});
    if (!fp8) kernels.push_back({128});
    if (HasGroupedWgmma()) kernels.push_back({kWgmmaTileRows, true});
  }
  return kernels;
}

constexpr int kRoutings = 5;

void RunGemm(const Model& model, Format format, int rows, bool gate_up) {
  const bool fp8 = format == Format::kFp8Rows || format == Format::kFp8Blocks;
  const int pairs = rows * model.choices;
  const int outputs = gate_up ? 2 * model.width : model.hidden;
  const Weights weights =
      MakeWeights(format, model.experts, outputs, gate_up ? model.hidden : model.width);
  const size_t x_rows = static_cast<size_t>(gate_up ? rows : pairs);
  const size_t x_size = x_rows * static_cast<size_t>(weights.matrix.inputs);
  auto x = Check(DeviceBuffer<Bf16>::Allocate(x_size));
  auto x_lanes = Check(DeviceBuffer<Bf16>::Allocate(x_size));
  auto* const plain = reinterpret_cast<__nv_bfloat16*>(x.data());
  FillBf16<<<1024, 256>>>(plain, x_size, fp8 ? 0x1p60f : 1.0f, 9);
  ToLaneOrder<<<1024, 256>>>(plain, reinterpret_cast<__nv_bfloat16*>(x_lanes.data()), x_size);
  GroupedGemm args;
  args.matrix = weights.matrix;
  args.bias = format == Format::kMxfp4 ? weights.bias.data() : nullptr;
  if (gate_up && format == Format::kMxfp4) args.clamped = ClampedGate{7.0f, 1.702f};
  args.num_experts = model.experts;
  args.output = gate_up ? GemmOutput::kSiluMul : GemmOutput::kFloat;
  args.out_stride = gate_up ? PaddedInputs(model.width, fp8) : model.hidden;
  const size_t out_size = static_cast<size_t>(pairs) * static_cast<size_t>(args.out_stride);
  const size_t out_bytes = out_size * (gate_up ? 2 : 4);
  auto out = Check(DeviceBuffer<std::byte>::Allocate(out_bytes));
  auto first = Check(DeviceBuffer<std::byte>::Allocate(out_bytes));
  auto sums = Check(DeviceBuffer<double>::Allocate(2));
  args.raise = gate_up && fp8;
  bool compared = false;
  for (const GroupedTiles& kernel : KernelsFor(rows, pairs / model.experts, format)) {
    std::vector<Routed> routings;
    double touched = 0.0;
    for (int i = 0; i < kRoutings; ++i) {
      routings.push_back(Route(model, rows, kernel.rows, static_cast<uint64_t>(i)));
      touched += static_cast<double>(routings.back().touched) / kRoutings;
    }
    args.x = kernel.wgmma && format != Format::kBf16 ? x_lanes.data() : x.data();
    const auto launch = [&](int run) {
      const Routed& routed = routings[static_cast<size_t>(run % kRoutings)];
      args.x_rows = gate_up ? routed.rows.data() : nullptr;
      args.tiles = routed.tiles.data();
      args.num_tiles = routed.num_tiles.data();
      args.max_tiles = MaxTiles(pairs, model.experts, kernel.rows);
      Check(LaunchGroupedGemm(args, kernel, nullptr));
    };
    // The first routing's outputs against the first kernel's.
    args.out = compared ? out.data() : first.data();
    launch(0);
    Check(sums.Fill(0));
    if (gate_up) {
      Difference<<<512, 256>>>(static_cast<const __nv_bfloat16*>(args.out),
                               reinterpret_cast<const __nv_bfloat16*>(first.data()), out_size,
                               args.raise ? 0x1p-60 : 1.0, sums.data());
    } else {
      Difference<<<512, 256>>>(static_cast<const float*>(args.out),
                               reinterpret_cast<const float*>(first.data()), out_size, 1.0,
                               sums.data());
    }
    const auto totals = Check(sums.ToHost());
    Check(cudaGetLastError());
    compared = true;
    args.out = out.data();
    const float us = MedianUs(2 * kRoutings + 1, launch);
    const double flops =
        2.0 * pairs * outputs * static_cast<double>(gate_up ? model.hidden : model.width);
    const double bytes = static_cast<double>(weights.matrix.bytes()) / model.experts * touched;
    const std::string name = kernel.wgmma ? "wgmma"
                                          : (kernel.rows <= kSkinnyTileRows ? "few " : "tiles ") +
                                                std::to_string(kernel.rows);
    std::printf("%-16s %-10s %-8s %6d %7.1f  %-9s %9.1f %8.0f %8.0f %9.1e\n", model.name,
                kFormatNames[static_cast<int>(format)], gate_up ? "gate, up" : "down", rows,
                static_cast<double>(pairs) / touched, name.c_str(), us, flops / us * 1e-6,
                bytes / us * 1e-3, std::sqrt(totals[0] / totals[1]));
    std::fflush(stdout);
  }
}

void Run(const std::vector<int>& all_rows, const std::string& model_part,
         const std::string& format_part) {
  std::printf("%-16s %-10s %-8s %6s %7s  %-9s %9s %8s %8s %9s\n", "model", "format", "gemm", "rows",
              "per exp", "kernel", "us", "TFLOP/s", "GB/s", "rms");
  for (const Model& model :
       {Model{"Qwen3-30B-A3B", 2048, 768, 128, 8}, Model{"GLM-4.5-Air", 4096, 1408, 128, 8},
        Model{"gpt-oss-20b", 2880, 2880, 32, 4}}) {
    for (const Format format :
         {Format::kBf16, Format::kFp8Rows, Format::kFp8Blocks, Format::kMxfp4}) {
      const std::string name = kFormatNames[static_cast<int>(format)];
      if (std::string(model.name).find(model_part) == std::string::npos ||
          name.find(format_part) == std::string::npos) {
        continue;
      }
      for (const int rows : all_rows) {
        for (const bool gate_up : {true, false}) RunGemm(model, format, rows, gate_up);
      }
    }
  }
}

}  // namespace
}  // namespace oscar::cuda

int main(int argc, char** argv) {
  std::vector<int> rows;
  std::stringstream list(argc > 1 ? argv[1] : "1,8,32,512,4096,8192");
  for (std::string item; std::getline(list, item, ',');) rows.push_back(std::stoi(item));
  oscar::cuda::Run(rows, argc > 2 ? argv[2] : "", argc > 3 ? argv[3] : "");
  return 0;
}
