// Sealed pages of BF16: the blocks that they hold, copied from open pages.
//
// Grid       (pieces of a layer, layers, pages); a thread moves 16 bytes, neighbours beside it.
// Bytes      each block read and written once; memory alone bounds it.
#include <algorithm>

#include "cuda/device/cuda_status.h"
#include "cuda/kv/page_seal.h"

namespace oscar::cuda {
namespace {

constexpr int kThreads = 256, kPerThread = 4;

__global__ void __launch_bounds__(kThreads)
    PageCopyKernel(const SealArguments args, int layer_vectors) {
  const int source = args.source_pages[blockIdx.z];
  if (source < 0) return;
  const int64_t layer = blockIdx.y;
  const auto* from = reinterpret_cast<const uint4*>(
      args.window_pool + source * args.window_page_stride + layer * args.window_layer_stride);
  auto* to = reinterpret_cast<uint4*>(args.history_pool +
                                      args.target_pages[blockIdx.z] * args.history_page_stride +
                                      layer * args.history_layer_stride);
  const int first =
      static_cast<int>(blockIdx.x) * (kThreads * kPerThread) + static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int at = first + i * kThreads;
    if (at < layer_vectors) to[at] = from[at];
  }
}

}  // namespace

Status LaunchPageCopy(const SealArguments& args, size_t layer_bytes, Stream stream) {
  // What a launch's third dimension takes.
  constexpr int kMostPages = 65535;
  if (args.jobs < 1) return {};
  if (args.jobs > kMostPages || layer_bytes % sizeof(uint4) != 0) {
    return InvalidArgument("a copy of pages takes up to 65535 of them, in units of 16 bytes");
  }
  const int vectors = static_cast<int>(layer_bytes / sizeof(uint4));
  const dim3 grid(
      static_cast<unsigned>((vectors + kThreads * kPerThread - 1) / (kThreads * kPerThread)),
      static_cast<unsigned>(args.layers), static_cast<unsigned>(args.jobs));
  PageCopyKernel<<<grid, kThreads, 0, stream>>>(args, vectors);
  return CudaStatus(cudaGetLastError(), "launching a copy of cache pages");
}

}  // namespace oscar::cuda
