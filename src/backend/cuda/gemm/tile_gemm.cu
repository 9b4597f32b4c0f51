// out[n, m] = sum_k x[n, k] w[m, k] for many rows n by wgmma (sm_90a).
//
// Grid       as many clusters of two blocks as the device has room for; items are 256 rows x 256
//            weight rows (kSiluMul: 128 gates and their 128 ups), 128 rows a block. Items that run
//            together are about as many rows as columns, so that both stay in the L2.
// Pipeline   64 inputs a stage, 48 KiB, by the tensor copy engine into 4 stages: a block's own rows
//            of x, and half of the weights, which it sends to both blocks of its cluster.
// Operands   one producer warp; two consumer warpgroups of 64 x 256 sums each, 128 registers a
//            thread. The next item's stages are filled while an item is written.
// Output     straight from registers: fp32 pairs; the residual stream by reductions in the L2 (each
//            number gets one a launch, so the order of launches is the order of sums); activations
//            in BF16 after an exchange in fours of lanes, 16 bytes a lane.
// Order      k ascending in steps of 16: fixed.
// Bound      tensor cores. H200: docs/benchmarks.md.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda/attention/wgmma.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/cuda_status.h"
#include "cuda/device/launch.h"
#include "cuda/device/ptx.cuh"
#include "cuda/device/tensor_map.h"
#include "cuda/gemm/gemm_kernels.cuh"
#include "cuda/gemm/tile_gemm.h"

namespace oscar::cuda {
namespace {

constexpr int kTileRows = 128, kTileColumns = 256, kDepth = 64, kStages = 4;
// Blocks of a cluster: those of a row share x, those of a column the weights.
constexpr int kClusterRows = 2, kClusterColumns = 1;
constexpr int kCluster = kClusterRows * kClusterColumns;
constexpr int kPeers = kClusterRows + kClusterColumns - 1;  // that a block shares with, and itself
// What a block copies of each, in boxes; kSiluMul's gates and ups are two at least.
constexpr int kXShare = kTileRows / kClusterColumns, kWShare = kTileColumns / kClusterRows;
constexpr int kPairColumns = kTileColumns / 2;
constexpr int kWBox = kWShare < kPairColumns ? kWShare : kPairColumns;
constexpr int kRowBytes = kDepth * 2;
static_assert(kDepth == kSwizzledInputs);
constexpr int kXBytes = kTileRows * kRowBytes, kStageBytes = (kTileRows + kTileColumns) * kRowBytes;
constexpr int kConsumers = 2, kThreads = (1 + kConsumers) * 128;
constexpr int kSharedBytes = kStages * kStageBytes + 2 * kStages * 8 + 1024;  // to align by 1024
constexpr int kGroup = 8;  // items along the rows that run side by side

struct TileParams {
  void* out;
  const float* bias;
  int rows, outputs, out_stride;  // outputs that are written
  int steps;                      // of k
  int up_row;                     // kSiluMul: where the matrix's ups begin
  int row_items, column_items;
};

struct Item {
  int row, column;
};
__device__ __forceinline__ Item ItemAt(const TileParams& p, int index) {
  const int whole = kGroup * p.column_items, first = index / whole * kGroup;
  const int size = min(kGroup, p.row_items - first), place = index % whole;
  return {first + place % size, place / size};
}

__device__ __forceinline__ void AddPair(float* to, float a, float b) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(a), "f"(b)
               : "memory");
}

template <GemmOutput kOut>
__device__ __forceinline__ void Write(const TileParams& p, const float (&sums)[128], int row,
                                      int first, int quad) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int n = row + h * 8;
    if (kOut != GemmOutput::kSiluMul && n >= p.rows) return;
    const int64_t at = int64_t{n} * p.out_stride;
    if constexpr (kOut == GemmOutput::kSiluMul) {
      auto* const out = static_cast<uint16_t*>(p.out) + at;
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = (b * 4 + i) * 4 + h * 2;
          pairs[i] =
              PackBf16(SiluMul(sums[j], sums[64 + j]), SiluMul(sums[j + 1], sums[64 + j + 1]));
        }
        TransposeQuad(pairs, quad);  // all lanes, also of rows that are not there
        const int m = first + (b * 4 + quad) * 8;
        if (n < p.rows && m < p.outputs) {
          *reinterpret_cast<uint4*>(out + m) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
      }
    } else {
      float* const out = static_cast<float*>(p.out) + at;
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        const int m = first + j * 8 + quad * 2;
        if (m >= p.outputs) continue;
        float a = sums[j * 4 + h * 2], b = sums[j * 4 + h * 2 + 1];
        if (p.bias != nullptr) {
          a += __ldg(p.bias + m);
          b += __ldg(p.bias + m + 1);
        }
        if constexpr (kOut == GemmOutput::kAdd) {
          AddPair(out + m, a, b);
        } else {
          *reinterpret_cast<float2*>(out + m) = make_float2(a, b);
        }
      }
    }
  }
}

// Compilers refuse the attribute where there are no clusters, and no code (below).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define OSCAR_CLUSTER
#else
#define OSCAR_CLUSTER __cluster_dims__(kCluster, 1, 1)
#endif
template <GemmOutput kOut>
__global__ void OSCAR_CLUSTER __launch_bounds__(kThreads, 1)
    TileGemmKernel(const __grid_constant__ CUtensorMap x_map,
                   const __grid_constant__ CUtensorMap w_map, const TileParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr bool kPair = kOut == GemmOutput::kSiluMul;
  extern __shared__ uint8_t unaligned[];
  // The same place in both blocks of a cluster.
  const uint32_t base = (SharedAddress(unaligned) + 1023u) & ~1023u;
  const auto full = [&](int s) { return base + kStages * kStageBytes + s * 8; };
  const auto empty = [&](int s) { return full(kStages + s); };
  const auto rank = static_cast<int>(ClusterRank());
  const int cluster_row = rank % kClusterRows, cluster_column = rank / kClusterRows;
  // Known to be the same for a warp, so that what follows from it is computed once a warp.
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      BarrierInit(full(s), 1);
      BarrierInit(empty(s), kConsumers * kPeers);
    }
    BarrierInitFence();
  }
  ClusterSync();
  WaitForPredecessor();
  LetSuccessorStart();
  const int items = p.row_items * p.column_items;
  const int first_item = static_cast<int>(blockIdx.x) / kCluster;
  const int stride = static_cast<int>(gridDim.x) / kCluster;
  int stage = 0;
  uint32_t phase = 0;
  const auto next = [&] {
    if (++stage == kStages) stage = 0, phase ^= 1;
  };
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      // The blocks of this one's row, and of its column.
      uint32_t x_blocks = 0;
      for (int c = 0; c < kClusterColumns; ++c) x_blocks |= 1u << (c * kClusterRows + cluster_row);
      const uint32_t w_blocks = ((1u << kClusterRows) - 1) << (cluster_column * kClusterRows);
      for (int index = first_item; index < items; index += stride) {
        const Item item = ItemAt(p, index);
        const int x_row = (item.row * kClusterRows + cluster_row) * kTileRows;
        const int column = item.column * kClusterColumns + cluster_column;
        for (int step = 0; step < p.steps; ++step, next()) {
          BarrierWait(empty(stage), phase ^ 1);
          ExpectBytes(full(stage), kStageBytes);
          const uint32_t at = base + stage * kStageBytes;
          const int x_first = cluster_column * kXShare;
          CopyBox<(kClusterColumns > 1)>(at + x_first * kRowBytes, &x_map, step * kDepth,
                                         x_row + x_first, full(stage), x_blocks);
#pragma unroll
          for (int i = 0; i < kWShare / kWBox; ++i) {
            const int first = cluster_row * kWShare + i * kWBox;
            const int w_row = !kPair ? column * kTileColumns + first
                                     : column * kPairColumns + first % kPairColumns +
                                           (first < kPairColumns ? 0 : p.up_row);
            CopyBox<(kClusterRows > 1)>(at + kXBytes + first * kRowBytes, &w_map, step * kDepth,
                                        w_row, full(stage), w_blocks);
          }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int consumer = group - 1, thread = static_cast<int>(threadIdx.x) % 128;
    const int lane = thread % 32, quad = lane % 4;
    const uint64_t x_tile = SwizzledTile(base + consumer * (kXBytes / kConsumers), 16, 1024);
    const uint64_t w_tile = SwizzledTile(base + kXBytes, 16, 1024);
    // Threads 0 to kPeers - 1 tell one peer each: those of the column, then the others of the row.
    const int other = thread - kClusterRows;
    const int peer = thread < kClusterRows
                         ? cluster_column * kClusterRows + thread
                         : (other + (other >= cluster_column ? 1 : 0)) * kClusterRows + cluster_row;
    const auto release = [&](int s) {
      if (thread < kPeers) ArriveAt(empty(s), static_cast<uint32_t>(peer));
    };
    float sums[128];
    for (int index = first_item; index < items; index += stride) {
      const Item item = ItemAt(p, index);
#pragma unroll
      for (float& sum : sums) sum = 0.0f;
      int last = -1;  // the stage whose products may still run
      for (int step = 0; step < p.steps; ++step, next()) {
        BarrierWait(full(stage), phase);
        WgmmaFence();
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k) {
          Wgmma<256, true>::Shared(sums, Advance(x_tile, stage * kStageBytes + k * 32),
                                   Advance(w_tile, stage * kStageBytes + k * 32));
        }
        WgmmaCommit();
        WgmmaWait<1>();
        if (last >= 0) release(last);
        last = stage;
      }
      WgmmaWait<0>();
      if (last >= 0) release(last);
      const int row = (item.row * kClusterRows + cluster_row) * kTileRows + consumer * 64 +
                      thread / 32 * 16 + lane / 4;
      const int column = item.column * kClusterColumns + cluster_column;
      Write<kOut>(p, sums, row, column * (kPair ? kPairColumns : kTileColumns), quad);
    }
  }
  // Nobody leaves while copies or arrivals of the other block are on their way.
  ClusterSync();
#endif
}

const void* KernelFor(GemmOutput output) {
  switch (output) {
    case GemmOutput::kFloat:
      return reinterpret_cast<const void*>(&TileGemmKernel<GemmOutput::kFloat>);
    case GemmOutput::kAdd:
      return reinterpret_cast<const void*>(&TileGemmKernel<GemmOutput::kAdd>);
    case GemmOutput::kSiluMul:
      return reinterpret_cast<const void*>(&TileGemmKernel<GemmOutput::kSiluMul>);
  }
  return nullptr;
}

struct Device {
  bool has = false;
  int clusters = 0;
};

Device FindDevice() {
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess ||
      major != 9 || minor != 0 || !HasTensorMaps()) {
    return {};
  }
  Device found;
  for (const auto output : {GemmOutput::kFloat, GemmOutput::kAdd, GemmOutput::kSiluMul}) {
    cudaFuncAttributes attributes{};
    if (cudaFuncGetAttributes(&attributes, KernelFor(output)) != cudaSuccess ||
        attributes.binaryVersion != 90 ||
        !AllowSharedMemory(KernelFor(output), kSharedBytes, "tiles").ok()) {
      return {};
    }
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kCluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  if (cudaOccupancyMaxActiveClusters(&found.clusters, KernelFor(GemmOutput::kFloat), &config) !=
      cudaSuccess) {
    return {};
  }
  found.has = found.clusters > 0;
  return found;
}
const Device& TheDevice() {
  static const Device device = FindDevice();
  return device;
}

}  // namespace

bool HasTileGemm() { return TheDevice().has; }

Status LaunchTileGemm(const GemmArguments& args, Stream stream) {
  if (!HasTileGemm() || args.matrix.weights == nullptr || args.x == nullptr ||
      !FitsTileGemm(args.matrix.outputs, args.matrix.inputs, args.out_stride)) {
    return InvalidArgument("a GEMM in tiles takes BF16 weights in multiples of 16 rows, on Hopper");
  }
  const bool pair = args.output == GemmOutput::kSiluMul;
  OSCAR_ASSIGN_OR_RETURN(CUtensorMap x_map,
                         SwizzledMap(args.x, args.rows, args.matrix.inputs, kXShare));
  OSCAR_ASSIGN_OR_RETURN(CUtensorMap w_map, SwizzledMap(args.matrix.weights, args.matrix.outputs,
                                                        args.matrix.inputs, kWBox));
  TileParams params{};
  params.out = args.out;
  params.bias = args.bias;
  params.rows = args.rows;
  params.outputs = args.outputs();
  params.out_stride = args.out_stride;
  params.steps = (args.matrix.inputs + kDepth - 1) / kDepth;
  params.up_row = args.outputs();
  const auto items = [](int size, int of) { return (size + of - 1) / of; };
  params.row_items = items(args.rows, kClusterRows * kTileRows);
  params.column_items =
      items(params.outputs, kClusterColumns * (pair ? kPairColumns : kTileColumns));
  const int clusters = std::min(TheDevice().clusters, params.row_items * params.column_items);
  void* kernel_args[] = {&x_map, &w_map, &params};
  return LaunchOverlapping(KernelFor(args.output), {clusters * kCluster, kThreads, kSharedBytes},
                           kernel_args, stream, "launching a GEMM in tiles");
}

}  // namespace oscar::cuda
