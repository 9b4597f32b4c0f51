// Stages of experts' weights and rows of x in shared memory, and who fills them. Device only.
#pragma once

#include "cuda/attention/wgmma.cuh"
#include "cuda/device/cluster.cuh"
#include "cuda/device/tensor_map.h"
#include "cuda/experts/grouped_gemm.cuh"

namespace oscar::cuda {

constexpr int kTileRows = kWgmmaTileRows, kDepth = kSwizzledInputs, kSteps = kDepth / 16;
constexpr int kConsumers = 2, kThreads = (1 + kConsumers) * 128;
constexpr int kXRowBytes = kDepth * 2, kXBytes = kTileRows * kXRowBytes;
constexpr int kRunSteps = kMxfp4Run / kDepth;  // of MXFP4
// Stages whose rows may be on their way while the producer fills the next.
constexpr int kInFlight = 2;

template <WeightFormat kFormat>
struct Layout {
  static constexpr bool kBf16 = kFormat == WeightFormat::kBf16;
  static constexpr bool kMxfp4 = kFormat == WeightFormat::kMxfp4;
  static constexpr bool kScaledBlocks = kFormat == WeightFormat::kFp8Blocks;
  static constexpr int kBlocks = kScaledBlocks ? 1 : 2;  // of 64 weight rows, per consumer
  static constexpr int kRows = kConsumers * kBlocks * 64;
  static constexpr int kRowBytes = kBf16 ? kDepth * 2 : kMxfp4 ? kDepth / 2 : kDepth;
  static constexpr int kStageBytes = kXBytes + kRows * kRowBytes;
  static constexpr int kStages = kBf16 ? 4 : kFormat == WeightFormat::kFp8Rows ? 6 : 8;
  // Registers of a thread: of the 504 that a launch of three warpgroups has. Two blocks of unpacked
  // codes want more.
  static constexpr bool kWide = !kBf16 && kBlocks == 2;
  static constexpr int kProducerRegisters = kWide ? 40 : 56;
  static constexpr int kConsumerRegisters = kWide ? 232 : 224;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 504);
  // Of a run of 512 inputs, twice, behind the stages.
  static constexpr int kScaleBytes = kMxfp4 ? kRows * 16 : 0;
  static constexpr int kBarriers = kStages * kStageBytes + 2 * kScaleBytes;
  static constexpr int kSharedBytes = kBarriers + (2 * kStages + 2) * 8 + 1024;  // to align by 1024
};

// The ring, and who has told whom: a stage is full when the weights and all rows of x have landed,
// empty when every consumer warp is done with it.
template <WeightFormat kFormat>
struct Ring {
  using L = Layout<kFormat>;
  uint32_t base;
  int stage = 0;
  uint32_t phase = 0;
  int run = 0;  // of MXFP4 scales

  __device__ __forceinline__ explicit Ring(uint32_t at) : base(at) {}
  __device__ __forceinline__ uint32_t full(int s) const { return base + L::kBarriers + s * 8; }
  __device__ __forceinline__ uint32_t empty(int s) const { return full(L::kStages + s); }
  __device__ __forceinline__ uint32_t scales_empty(int r) const { return full(2 * L::kStages + r); }
  __device__ __forceinline__ uint32_t scales(int r) const {
    return base + L::kStages * L::kStageBytes + r * L::kScaleBytes;
  }
  __device__ __forceinline__ void Init() const {
    for (int s = 0; s < L::kStages; ++s) {
      BarrierInit(full(s), 4 + 1);
      BarrierInit(empty(s), kConsumers * 4);
    }
    for (int r = 0; r < 2; ++r) BarrierInit(scales_empty(r), kConsumers * 4);
    BarrierInitFence();
  }
  __device__ __forceinline__ void Next() {
    if (++stage == L::kStages) stage = 0, phase ^= 1;
  }
};

template <WeightFormat kFormat, GemmOutput kOut>
__device__ __forceinline__ void Produce(const GroupedParams& p, const CUtensorMap* w_map,
                                        const CUtensorMap* scale_map, Ring<kFormat> ring,
                                        int across, int items) {
  using L = Layout<kFormat>;
  constexpr bool kPair = kOut == GemmOutput::kSiluMul;
  constexpr int kOutputs = kPair ? L::kRows / 2 : L::kRows;
  constexpr int kCopies = kTileRows / 16;  // 16 rows are eight chunks each for 128 threads
  const auto thread = static_cast<int>(threadIdx.x);
  const int chunk = thread % 8, row = thread / 8, steps = p.inputs / kDepth;
  const uint32_t to = static_cast<uint32_t>(row * kXRowBytes + ((chunk ^ (row % 8)) * 16));
  int pending = 0;  // stages whose rows nobody was told of
  const auto publish = [&](int back) {
    ProxyFence();  // wgmma reads them
    __syncwarp();
    const int s = ring.stage - back;
    if (thread % 32 == 0) BarrierArrive(ring.full(s < 0 ? s + L::kStages : s));
    --pending;
  };
  const auto publish_all = [&] {
    if (pending == 0) return;
    WaitForCopies<0>();
    while (pending > 0) publish(pending);
  };
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const ExpertTile tile = p.tiles[item / across];
    const int first = item % across * kOutputs;
    const int w_row = tile.expert * p.matrix_rows + first;
    uint32_t from[kCopies];  // in units of 16 bytes; rows beyond the tile's are its last one
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int place = tile.first + min(i * 16 + row, tile.rows - 1);
      const int source = p.x_rows == nullptr ? place : __ldg(p.x_rows + place);
      from[i] = static_cast<uint32_t>(source) * static_cast<uint32_t>(p.inputs / 8) +
                static_cast<uint32_t>(chunk);
    }
    for (int step = 0; step < steps; ++step, ring.Next()) {
      // Before waiting, what has been copied is handed over.
      if (!__all_sync(~0u, BarrierTest(ring.empty(ring.stage), ring.phase ^ 1))) {
        publish_all();
        BarrierWait(ring.empty(ring.stage), ring.phase ^ 1);
      }
      const uint32_t at = ring.base + ring.stage * L::kStageBytes;
      if (thread == 0) {
        const uint32_t bar = ring.full(ring.stage);
        const bool scales = L::kMxfp4 && step % kRunSteps == 0;
        if (scales) BarrierWait(ring.scales_empty(ring.run % 2), (ring.run / 2 % 2) ^ 1);
        ExpectBytes(bar, L::kRows * L::kRowBytes + (scales ? L::kScaleBytes : 0));
        const int run_at = step / kRunSteps * kMxfp4RunBytes;
        const int k = L::kMxfp4 ? run_at + 16 + step % kRunSteps * L::kRowBytes : step * kDepth;
#pragma unroll
        for (int half = 0; half < (kPair ? 2 : 1); ++half) {
          CopyBox<false>(at + kXBytes + half * (L::kRows / 2) * L::kRowBytes, w_map, k,
                         w_row + half * p.outputs, bar, 0);
          if (scales) {
            CopyBox<false>(ring.scales(ring.run % 2) + half * (L::kScaleBytes / 2), scale_map,
                           run_at, w_row + half * p.outputs, bar, 0);
          }
        }
        if (scales) ++ring.run;
      }
      const auto* x = reinterpret_cast<const uint4*>(p.x) + step * (kXRowBytes / 16);
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        if (i * 16 < tile.rows) CopyAsync(at + to + i * (16 * kXRowBytes), x + from[i]);
      }
      CommitCopies();
      if (++pending > kInFlight) {
        WaitForCopies<kInFlight>();
        publish(kInFlight);
      }
    }
  }
  publish_all();
}

template <WeightFormat kFormat>
__device__ __forceinline__ void Release(const Ring<kFormat>& ring, int stage) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) BarrierArrive(ring.empty(stage));
}

}  // namespace oscar::cuda
