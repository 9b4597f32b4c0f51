// out[n, m] = sum_k w[m, k] x[n, k] of FP8 weights for up to 64 rows n by wgmma (sm_90a), at the
// speed of reading w.
//
// Grid       clusters of 1 to 8 blocks, one block an SM. A cluster has tiles of 64 to 256 weight
//            rows (kSiluMul: as many gates as ups), its blocks equal parts of their k. The host
//            chooses both so that all SMs have the same work and x is read few times.
// Pipeline   128 k a stage: weights by the tensor copy engine, x by the four warps of a producer
//            warpgroup, which read 1 to 4 stages ahead into registers. The first stages of weights
//            are on their way before the kernel that writes x has ended (programmatic dependent
//            launch).
// Operands   m64nNk16, N the rows of x rounded up to 16. A is the weights, from registers: a lane
//            loads 16 codes of a row at once, which serve as its operands of four steps. x lies in
//            shared memory in the order of k that this asks for: k = 32 q + 16 l + 4 s + 2 h + e of
//            a stage is number e of the quad's lane q in half h of step s of the plane l, of two
//            planes of 64 k with 128-byte swizzle. Chunks 2 q + l of the swizzled rows of codes
//            make these loads free of conflicts. Codes are unpacked as in gemm_kernels.cuh.
// Scales     those of rows multiply the result, those of blocks the sum over each stage, which has
//            accumulators to itself.
// Order      of a block's k: ascending. Blocks of a cluster send the sums of eight rows n to the
//            one that writes these rows, which adds them by rank. So a row's bits depend on the
//            matrix, the device and N, not on the other rows.
// Bound      memory: a byte of weights for each output and k.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <optional>

#include "cuda/device/cluster.cuh"
#include "cuda/device/cuda_status.h"
#include "cuda/device/launch.h"
#include "cuda/device/tensor_map.h"
#include "cuda/gemm/batch_gemm.h"
#include "cuda/gemm/gemm_kernels.cuh"
#include "cuda/gemm/narrow_wgmma.cuh"

namespace oscar::cuda {
namespace {

constexpr int kDepth = kScaleInputs;  // k of a stage, and bytes of a row of codes
constexpr int kGroupRows = 64;        // weight rows of a consumer warpgroup
constexpr int kMaxGroups = 4, kMaxCluster = 8, kMaxStages = 8;
[[maybe_unused]] constexpr int kProducerWarps = 4;
constexpr int kMaxThreads = (kMaxGroups + 1) * 128;
constexpr int kSharedBytes = 227 * 1024;  // an SM's, less what the system keeps
constexpr int kBarrierBytes = (2 * kMaxStages + 2) * 8;

constexpr int StageBytes(int n, int groups) { return (groups * kGroupRows + 2 * n) * kDepth; }
// What a block gets: eight columns of a tile are `kSumBytes` a weight row, from each block.
constexpr int kSumBytes = 8 * 4;
constexpr int SumBytes(int n, int groups, int cluster) {
  return (n / 8 + cluster - 1) / cluster * cluster * groups * kGroupRows * kSumBytes;
}
constexpr int StagesFor(int n, int groups, int cluster) {
  const int room = kSharedBytes - 1024 - kBarrierBytes - SumBytes(n, groups, cluster);
  return std::min(kMaxStages, room / StageBytes(n, groups));
}
constexpr int SharedFor(int n, int groups, int cluster) {  // 1024: to align
  return 1024 + StagesFor(n, groups, cluster) * StageBytes(n, groups) +
         SumBytes(n, groups, cluster) + kBarrierBytes;
}
static_assert(StagesFor(kBatchGemmRows, kMaxGroups, kMaxCluster) >= 3);

struct BatchParams {
  const float* scales;
  const uint16_t* x;
  void* out;
  const float* bias;
  int scale_rows, scale_columns;
  int outputs, inputs, rows, out_stride;
  int groups, stages, tiles;
  int cluster_shift;  // log2 of the blocks of a cluster
};

// Sixteen vectors of 8 k in each of kN rows of x, kN / 8 for each thread: lanes of a warp have 8
// vectors of 4 rows, all of the same plane.
template <int kN>
struct XLoader {
  static constexpr int kVectors = kN / 8;
  // Stages ahead: a stage of few rows takes less time than a load.
  static constexpr int kAhead = kN == 16 ? 4 : kN == 32 ? 2 : 1;
  uint4 vectors[kAhead][kVectors];
  const uint8_t* x;
  uint32_t first;       // this thread's vector of the first k
  int rows_left;        // from this thread's first row on
  uint32_t row_stride;  // between its rows
  uint32_t to;          // in the stage: plane, row, place in a chunk
  uint32_t chunk;       // the first of four, swizzled

  __device__ __forceinline__ XLoader(const BatchParams& p, int thread) {
    const int warp = thread / 32, lane = thread % 32;
    const int plane = warp % 2, quad = lane % 8 / 2, half = lane % 2, row = warp / 2 * 4 + lane / 8;
    rows_left = p.rows - row;
    row_stride = static_cast<uint32_t>(16 * p.inputs);
    x = reinterpret_cast<const uint8_t*>(p.x);
    first = 2 * static_cast<uint32_t>(row * p.inputs + quad * 32 + plane * 16 + half * 8);
    to = static_cast<uint32_t>(plane * kN * 128 + row * 128 + quad * 4);
    chunk = static_cast<uint32_t>((half * 4) ^ (row % 8)) << 4;
  }
  // Stores what was loaded, if it was, and loads the stage of step `next` in its place.
  template <bool kStore>
  __device__ __forceinline__ void Turn(uint4 (&loaded)[kVectors], uint32_t stage, int next) {
    uint32_t from = first + static_cast<uint32_t>(next * kDepth * 2);
    uint32_t at = stage + to;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if constexpr (kStore) {
        const uint4 raised = RaiseForFp8(loaded[j]);
        const uint32_t pairs[4] = {raised.x, raised.y, raised.z, raised.w};
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + (chunk ^ (i << 4))), "r"(pairs[i])
                       : "memory");
        }
        at += 8 * 128;
      }
      loaded[j] = make_uint4(0, 0, 0, 0);
      if (j * 8 < rows_left) loaded[j] = *reinterpret_cast<const uint4*>(x + from);
      from += row_stride;
    }
  }
};

__device__ __forceinline__ uint4 LoadShared(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at)
               : "memory");
  return v;
}
[[maybe_unused]] __device__ __forceinline__ void AddGlobal(float* to, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}
// Adds eight numbers.
[[maybe_unused]] __device__ __forceinline__ void AddShared(float (&sums)[8], uint32_t at) {
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint4 v = LoadShared(at + half * 16);
    const uint32_t numbers[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) sums[half * 4 + i] += __uint_as_float(numbers[i]);
  }
}

template <int kN, GemmOutput kOut, WeightFormat kFormat>
__global__ void __launch_bounds__(kMaxThreads, 1)
    BatchGemmKernel(const __grid_constant__ CUtensorMap w_map, const BatchParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr bool kPair = kOut == GemmOutput::kSiluMul;
  constexpr bool kBlocks = kFormat == WeightFormat::kFp8Blocks;
  extern __shared__ uint8_t unaligned[];
  const int cluster = 1 << p.cluster_shift;
  // The same place in all blocks of a cluster.
  const uint32_t base = (SharedAddress(unaligned) + 1023u) & ~1023u;
  const int tile_rows = p.groups * kGroupRows;                 // of weights
  const int tile_outputs = kPair ? tile_rows / 2 : tile_rows;  // of the output
  const uint32_t w_bytes = static_cast<uint32_t>(tile_rows * kDepth);
  const uint32_t stage_bytes = w_bytes + 2 * kN * kDepth;
  const uint32_t part_bytes = static_cast<uint32_t>(tile_rows * kSumBytes);
  const uint32_t part = base + static_cast<uint32_t>(p.stages) * stage_bytes;
  const int own_parts = (kN / 8 + cluster - 1) >> p.cluster_shift;  // each from all blocks
  const uint32_t barriers = part + static_cast<uint32_t>(own_parts << p.cluster_shift) * part_bytes;
  const auto full = [&](int s) { return barriers + static_cast<uint32_t>(s * 8); };
  const auto empty = [&](int s) { return barriers + static_cast<uint32_t>((kMaxStages + s) * 8); };
  const uint32_t sent = barriers + 2 * kMaxStages * 8, taken = sent + 8;  // sums
  const auto rank = static_cast<int>(ClusterRank());
  // Known to be the same for a warp, so that what follows from it is computed once a warp.
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  const int all_steps = p.inputs / kDepth;
  const int first_step = rank * all_steps >> p.cluster_shift;
  const int steps = ((rank + 1) * all_steps >> p.cluster_shift) - first_step;
  const int first_tile = static_cast<int>(blockIdx.x) >> p.cluster_shift;
  const int tile_stride = static_cast<int>(gridDim.x) >> p.cluster_shift;
  // Number `step` of this block's k in a tile; by thread 0.
  const auto copy_weights = [&](int tile, int step, int slot) {
    const uint32_t to = base + static_cast<uint32_t>(slot) * stage_bytes;
    const int k = (first_step + step) * kDepth, row = tile * tile_outputs;
    ExpectBytes(full(slot), w_bytes);
    CopyBoxOnce(to, &w_map, k, row, full(slot));
    if constexpr (kPair) CopyBoxOnce(to + w_bytes / 2, &w_map, k, p.outputs + row, full(slot));
  };
  if (threadIdx.x == 0) {
    for (int s = 0; s < p.stages; ++s) {
      BarrierInit(full(s), 1 + kProducerWarps);
      BarrierInit(empty(s), static_cast<uint32_t>(p.groups * 4));
    }
    BarrierInit(sent, static_cast<uint32_t>(cluster * p.groups * 4));
    BarrierInit(taken, static_cast<uint32_t>(cluster * p.groups * 4));
    BarrierInitFence();
    // What fits the ring waits for nobody.
    int slot = 0;
#pragma unroll 1
    for (int tile = first_tile; tile < p.tiles && slot < p.stages; tile += tile_stride) {
#pragma unroll 1
      for (int step = 0; step < steps && slot < p.stages; ++step) copy_weights(tile, step, slot++);
    }
  }
  __syncwarp();
  ClusterSync();
  LetSuccessorStart();

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
    const int thread = static_cast<int>(threadIdx.x);
    WaitForPredecessor();
    if (steps == 0) return;
    XLoader<kN> x(p, thread);
    // Turns of this block's steps; the last ones load what nobody stores.
    int to_load = 0;
    const auto after = [&](int step) { return step + 1 == steps ? 0 : step + 1; };
#pragma unroll
    for (auto& loaded : x.vectors) {
      x.template Turn<false>(loaded, 0, first_step + to_load);
      to_load = after(to_load);
    }
    int slot = 0, round = 0;
    const auto turn = [&](auto& loaded, int tile, int step) {
      if (round > 0) {
        BarrierWait(empty(slot), static_cast<uint32_t>(round - 1) & 1);
        if (thread == 0) copy_weights(tile, step, slot);
        __syncwarp();
      }
      if constexpr (XLoader<kN>::kAhead == 1) to_load = after(step);
      const uint32_t stage = base + static_cast<uint32_t>(slot) * stage_bytes + w_bytes;
      x.template Turn<true>(loaded, stage, first_step + to_load);
      to_load = after(to_load);
      ProxyFence();
      __syncwarp();
      if (thread % 32 == 0) BarrierArrive(full(slot));
      if (++slot == p.stages) slot = 0, ++round;
    };
    if constexpr (XLoader<kN>::kAhead == 1) {
      for (int tile = first_tile; tile < p.tiles; tile += tile_stride) {
        for (int step = 0; step < steps; ++step) turn(x.vectors[0], tile, step);
      }
    } else {
      int tile = first_tile, step = 0;
      while (tile < p.tiles) {
#pragma unroll
        for (auto& loaded : x.vectors) {
          if (tile >= p.tiles) break;
          turn(loaded, tile, step);
          step = after(step);
          if (step == 0) tile += tile_stride;
        }
      }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
  WaitForPredecessor();
  const int thread = static_cast<int>(threadIdx.x) - 128, lane = thread % 32, quad = lane % 4;
  const int row = thread / 32 * 16 + lane / 4;  // of the tile, and the one 8 further on
  const int total_rows = kPair ? 2 * p.outputs : p.outputs;
  // Which row of the matrix row `r` of a tile is.
  const auto matrix_row = [&](int tile, int r) {
    const int m =
        tile * tile_outputs + (kPair && r >= tile_outputs ? p.outputs + r - tile_outputs : r);
    return min(m, total_rows - 1);
  };
  const auto warp_tells_all = [&](uint32_t bar) {
    __syncwarp();
    if (lane < cluster) ReleaseAt(bar, static_cast<uint32_t>(lane));
  };
  // Codes: the plane's chunk of a lane is the other's with its lowest bit flipped.
  const uint32_t codes =
      base + static_cast<uint32_t>(row * kDepth + ((2 * quad) ^ (lane / 4)) * 16);
  const uint64_t x_planes = SwizzledTile(base + w_bytes, 16, 1024);
  int slot = 0;
  uint32_t phase = 0, tile_phase = 0;
  for (int tile = first_tile; tile < p.tiles; tile += tile_stride, tile_phase ^= 1) {
    float sums[kN / 2];
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    int scales[2] = {};  // of this thread's rows
    if constexpr (kBlocks) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        scales[h] = matrix_row(tile, row + h * 8) / p.scale_rows * p.scale_columns + first_step;
      }
    }
    int last = -1;  // the slot whose operands may still be in use
    for (int step = 0; step < steps; ++step) {
      float scale[2];
      if constexpr (kBlocks) {
#pragma unroll
        for (int h = 0; h < 2; ++h) scale[h] = __ldg(p.scales + scales[h] + step);
      }
      float block_sums[kBlocks ? kN / 2 : 1];
      BarrierWait(full(slot), phase);
      const uint32_t at = codes + static_cast<uint32_t>(slot) * stage_bytes;
      const uint64_t x_at = x_planes + ((static_cast<uint32_t>(slot) * stage_bytes) >> 4);
      // Operands of kAtOnce steps, in turn: more would not fit beside the sums of blocks.
      constexpr int kAtOnce = kBlocks && kN == 64 ? 1 : 2;
      uint32_t a[2][kAtOnce][4];
#pragma unroll
      for (int plane = 0; plane < 2; ++plane) {
        const uint4 lo = LoadShared(at ^ static_cast<uint32_t>(plane * 16));
        const uint4 hi = LoadShared((at + 8 * kDepth) ^ static_cast<uint32_t>(plane * 16));
        const uint32_t lo_words[4] = {lo.x, lo.y, lo.z, lo.w};
        const uint32_t hi_words[4] = {hi.x, hi.y, hi.z, hi.w};
#pragma unroll
        for (int first = 0; first < 4; first += kAtOnce) {
          const int set = first / kAtOnce % 2;
          // Those before the last no longer read their operands.
          if (plane + first > 0) WgmmaWait<1>();
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            a[set][i][0] = FirstPair(lo_words[first + i]);
            a[set][i][1] = FirstPair(hi_words[first + i]);
            a[set][i][2] = SecondPair(lo_words[first + i]);
            a[set][i][3] = SecondPair(hi_words[first + i]);
          }
          WgmmaFence();
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            const uint64_t b = Advance(x_at, plane * kN * 128 + (first + i) * 32);
            if constexpr (kBlocks) {
              if (plane + first + i == 0) {
                NarrowWgmma<kN>::First(block_sums, a[set][i], b);
              } else {
                NarrowWgmma<kN>::Add(block_sums, a[set][i], b);
              }
            } else {
              NarrowWgmma<kN>::Add(sums, a[set][i], b);
            }
          }
          WgmmaCommit();
        }
      }
      if constexpr (kBlocks) {
        WgmmaWait<0>();
        if (lane == 0) BarrierArrive(empty(slot));
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) sums[i] += scale[i / 2 % 2] * block_sums[i];
      } else {
        WgmmaWait<1>();
        if (last >= 0 && lane == 0) BarrierArrive(empty(last));
        last = slot;
      }
      if (++slot == p.stages) slot = 0, phase ^= 1;
    }
    WgmmaWait<0>();
    if (last >= 0 && lane == 0) BarrierArrive(empty(last));

    // Rows n of part j, which are 8 j to 8 j + 7, belong to block j % cluster.
    if (tile != first_tile) AcquireAt(taken, tile_phase ^ 1);
    // What follows from this takes no registers in the loop over k.
    int place = thread;
    asm volatile("" : "+r"(place));
    {
      const int row_here = place / 32 * 16 + place % 32 / 4;
      const uint32_t from_here = part + static_cast<uint32_t>(rank) * part_bytes +
                                 static_cast<uint32_t>(row_here * kSumBytes + place % 4 * 8);
#pragma unroll
      for (int j = 0; j < kN / 8; ++j) {
        const uint32_t own = static_cast<uint32_t>(j >> p.cluster_shift << p.cluster_shift);
        const uint32_t to =
            AddressIn(static_cast<uint32_t>(j & (cluster - 1)), from_here + own * part_bytes);
        StoreIn(to, sums[j * 4], sums[j * 4 + 1]);
        StoreIn(to + 8 * kSumBytes, sums[j * 4 + 2], sums[j * 4 + 3]);
      }
    }
    warp_tells_all(sent);
    AcquireAt(sent, tile_phase);
    const int items = own_parts * tile_outputs;
    for (int item = place; item < items; item += p.groups * 128) {
      const int own = item / tile_outputs, r = item % tile_outputs, m = tile * tile_outputs + r;
      const int first_n = ((own << p.cluster_shift) + rank) * 8;
      if (first_n >= p.rows || m >= p.outputs) continue;
      uint32_t at = part + static_cast<uint32_t>(own << p.cluster_shift) * part_bytes +
                    static_cast<uint32_t>(r * kSumBytes);
      float values[8] = {}, ups[8] = {};
      for (int from = 0; from < cluster; ++from, at += part_bytes) {
        AddShared(values, at);
        if constexpr (kPair) AddShared(ups, at + part_bytes / 2);
      }
      float factor = kHalfOfFp8, up_factor = kHalfOfFp8, bias = 0.0f;
      if constexpr (kFormat == WeightFormat::kFp8Rows) {
        factor *= __ldg(p.scales + m);
        if constexpr (kPair) up_factor *= __ldg(p.scales + p.outputs + m);
      }
      if (!kPair && p.bias != nullptr) bias = __ldg(p.bias + m);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (first_n + i >= p.rows) break;
        const int64_t to = int64_t{first_n + i} * p.out_stride + m;
        const float value = values[i] * factor;
        if constexpr (kPair) {
          static_cast<__nv_bfloat16*>(p.out)[to] =
              __float2bfloat16_rn(SiluMul(value, ups[i] * up_factor));
        } else if constexpr (kOut == GemmOutput::kAdd) {
          // Each number gets one a launch, so the order of launches is the order of sums.
          AddGlobal(static_cast<float*>(p.out) + to, value + bias);
        } else {
          static_cast<float*>(p.out)[to] = value + bias;
        }
      }
    }
    if (tile + tile_stride < p.tiles) warp_tells_all(taken);
  }
#endif
}

// ---- which kernel ----

template <GemmOutput kOut, WeightFormat kFormat>
const void* KernelFor(int n) {
  switch (n) {
    case 16:
      return reinterpret_cast<const void*>(&BatchGemmKernel<16, kOut, kFormat>);
    case 32:
      return reinterpret_cast<const void*>(&BatchGemmKernel<32, kOut, kFormat>);
    case 48:
      return reinterpret_cast<const void*>(&BatchGemmKernel<48, kOut, kFormat>);
    default:
      return reinterpret_cast<const void*>(&BatchGemmKernel<64, kOut, kFormat>);
  }
}
template <WeightFormat kFormat>
const void* KernelFor(GemmOutput output, int n) {
  switch (output) {
    case GemmOutput::kFloat:
      return KernelFor<GemmOutput::kFloat, kFormat>(n);
    case GemmOutput::kAdd:
      return KernelFor<GemmOutput::kAdd, kFormat>(n);
    case GemmOutput::kSiluMul:
      return KernelFor<GemmOutput::kSiluMul, kFormat>(n);
  }
  return nullptr;
}
const void* KernelFor(bool blocks, GemmOutput output, int n) {
  return blocks ? KernelFor<WeightFormat::kFp8Blocks>(output, n)
                : KernelFor<WeightFormat::kFp8Rows>(output, n);
}
int Columns(int rows) { return (rows + 15) / 16 * 16; }

cudaLaunchAttribute ClusterOf(int blocks) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(blocks);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  return cluster;
}

// Clusters of 1, 2, 4 and 8 blocks that run at once; none without the kernels.
using Clusters = std::array<int, 4>;
std::optional<Clusters> FindClusters() {
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess ||
      major != 9 || minor != 0 || !HasTensorMaps()) {
    return std::nullopt;
  }
  for (const bool blocks : {false, true}) {
    for (const auto output : {GemmOutput::kFloat, GemmOutput::kAdd, GemmOutput::kSiluMul}) {
      for (int n = 16; n <= kBatchGemmRows; n += 16) {
        const void* kernel = KernelFor(blocks, output, n);
        cudaFuncAttributes attributes{};
        if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess ||
            attributes.binaryVersion != 90 ||
            !AllowSharedMemory(kernel, kSharedBytes, "GEMMs of batches").ok()) {
          return std::nullopt;
        }
      }
    }
  }
  Clusters found{};
  for (int shift = 0; shift < 4; ++shift) {
    cudaLaunchAttribute cluster = ClusterOf(1 << shift);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(1u << shift);
    config.blockDim = dim3(kMaxThreads);
    config.dynamicSmemBytes = kSharedBytes;
    config.attrs = &cluster;
    config.numAttrs = 1;
    int& count = found[static_cast<size_t>(shift)];
    if (cudaOccupancyMaxActiveClusters(&count, KernelFor(false, GemmOutput::kFloat, 64), &config) !=
            cudaSuccess ||
        count < 1) {
      return std::nullopt;
    }
  }
  return found;
}
const std::optional<Clusters>& TheClusters() {
  static const std::optional<Clusters> clusters = FindClusters();
  return clusters;
}

// What a block does in turn, as bytes from memory. x comes from the L2, which is faster, but all
// blocks want it; sums go to other blocks when there is nothing else to do.
constexpr double kL2Cost = 0.7, kSumCost = 1.0, kTileCost = 16384.0;
// By groups: a block with one or two has too few loads under way for its share of the bandwidth,
// and where fewer blocks than multiprocessors work, each gets more than a share. An H200
// (2026-11-19) gave blocks 19, 29 and 38 bytes a nanosecond; 34 are a share.
constexpr double kWeightCost[] = {1.9, 1.17, 0.9, 0.9};
double CostOf(const BatchGemmPlan& plan, int shift, int outputs, int inputs, int n, bool pair) {
  const int tile = plan.groups * kGroupRows, width = pair ? tile / 2 : tile;
  const int tiles = (outputs + width - 1) / width;
  const int clusters = (*TheClusters())[static_cast<size_t>(shift)];
  const int turns = (tiles + clusters - 1) / clusters;
  const int steps = (inputs / kDepth + plan.cluster - 1) / plan.cluster;
  const double weights = double{1} * tile * steps * kDepth, x = 2.0 * n * steps * kDepth;
  const double sums = plan.cluster == 1 ? 0.0 : 4.0 * n * tile;
  const double read = kWeightCost[plan.groups - 1] * weights;
  return turns * (std::max(read, kL2Cost * (weights + x)) + kSumCost * sums + kTileCost);
}

}  // namespace

bool HasBatchGemm() { return TheClusters().has_value(); }

BatchGemmPlan PlanBatchGemm(const DeviceMatrix& matrix, GemmOutput output, int rows) {
  const bool pair = output == GemmOutput::kSiluMul;
  const int outputs = pair ? matrix.outputs / 2 : matrix.outputs;
  BatchGemmPlan best;
  if (!HasBatchGemm()) return best;
  double least = 0.0;
  for (int shift = 0; shift < 4; ++shift) {
    for (int groups = kMaxGroups; groups >= 1; --groups) {
      const BatchGemmPlan plan{.groups = groups, .cluster = 1 << shift};
      const double cost = CostOf(plan, shift, outputs, matrix.inputs, Columns(rows), pair);
      if (least > 0.0 && cost >= least) continue;
      least = cost;
      best = plan;
    }
  }
  return best;
}

Status LaunchBatchGemm(const GemmArguments& args, Stream stream) {
  return LaunchBatchGemm(args, PlanBatchGemm(args.matrix, args.output, args.rows), stream);
}

Status LaunchBatchGemm(const GemmArguments& args, const BatchGemmPlan& plan, Stream stream) {
  const DeviceMatrix& matrix = args.matrix;
  int shift = 0;
  while (1 << shift < plan.cluster) ++shift;
  if (!HasBatchGemm() || !FitsBatchGemm(matrix, args.rows) || args.outputs() < 1 ||
      args.x == nullptr || plan.groups < 1 || plan.groups > kMaxGroups ||
      1 << shift != plan.cluster || plan.cluster > kMaxCluster) {
    return InvalidArgument("a GEMM of a batch takes FP8 weights and 1 to 64 rows, on Hopper");
  }
  const bool pair = args.output == GemmOutput::kSiluMul;
  const int n = Columns(args.rows), tile = plan.groups * kGroupRows;
  const int width = pair ? tile / 2 : tile;
  OSCAR_ASSIGN_OR_RETURN(CUtensorMap w_map,
                         SwizzledByteMap(matrix.codes, matrix.outputs, matrix.inputs, width));
  BatchParams params{};
  params.scales = matrix.scales;
  params.x = reinterpret_cast<const uint16_t*>(args.x);
  params.out = args.out;
  params.bias = args.bias;
  params.scale_rows = matrix.scale_rows;
  params.scale_columns = matrix.scale_columns;
  params.outputs = args.outputs();
  params.inputs = matrix.inputs;
  params.rows = args.rows;
  params.out_stride = args.out_stride;
  params.groups = plan.groups;
  params.stages = StagesFor(n, plan.groups, plan.cluster);
  params.tiles = (params.outputs + width - 1) / width;
  params.cluster_shift = shift;
  const int clusters = std::min((*TheClusters())[static_cast<size_t>(shift)], params.tiles);
  const bool blocks = FormatOf(matrix) == WeightFormat::kFp8Blocks;
  void* kernel_args[] = {&w_map, &params};
  return LaunchOverlapping(KernelFor(blocks, args.output, n),
                           {.blocks = clusters * plan.cluster,
                            .threads = (plan.groups + 1) * 128,
                            .shared_bytes = SharedFor(n, plan.groups, plan.cluster),
                            .cluster = plan.cluster},
                           kernel_args, stream, "launching a GEMM of a batch");
}

}  // namespace oscar::cuda
