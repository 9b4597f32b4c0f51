// What every consumer warp of the decode kernel does: walk the items, read its ring of stages.
// Device only; decode_attention.cuh describes the whole.
#pragma once

#include "cuda/kernels/decode_traits.cuh"

namespace oscar::cuda {

template <typename T>
class DecodeRing {
 protected:
  __device__ DecodeRing(const DecodeKernelParams& p, uint8_t* shared, const DecodeShared<T>& at,
                        int warp, int lane)
      : p_(p),
        shared_(shared),
        at_(at),
        warp_(warp),
        lane_(lane),
        row_(lane >> 2),
        quad_(lane & 3),
        base_(SharedAddress(shared)) {}

  // Calls consume(item, q, rank) for every item: q, the item's query rows in shared memory; rank,
  // this warp's place among those that its pages are dealt to. `consume` ends by writing the state
  // of that rank, after WaitForState().
  template <typename Consume>
  __device__ __forceinline__ void ForEachItem(Consume consume) {
    int slot = 0;
    uint32_t parity = 0;
    const int q_bytes = min(p_.group_size, T::kHeads) * T::kDim * 2;
    while (true) {
      BarrierWait(at_.Bar(base_, p_.stages, at_.kItemFull + slot), parity);
      const DecodeItem& item = *reinterpret_cast<const DecodeItem*>(shared_ + at_.item + slot * 64);
      if (item.kind == kItemEnd) break;
      consume(item, shared_ + at_.q + slot * q_bytes, T::Rank(warp_, item.first_warp));
      BarrierArrive(at_.Bar(base_, p_.stages, at_.kStateFull));
      BarrierArrive(at_.Bar(base_, p_.stages, at_.kItemEmpty + slot));
      if (++slot == 2) slot = 0, parity ^= 1;
    }
  }
  // Until the merger has read the states of the item before.
  __device__ __forceinline__ void WaitForState() {
    state_parity_ ^= 1;
    BarrierWait(at_.Bar(base_, p_.stages, at_.kStateEmpty), state_parity_);
  }

  __device__ __forceinline__ uint32_t StageBar(int empty) const {
    return base_ + at_.bars + ((warp_ * p_.stages + stage_) * 2 + empty) * 8;
  }
  __device__ __forceinline__ int StageOffset() const {
    return at_.ring + (warp_ * p_.stages + stage_) * T::kStageBytes;
  }
  __device__ __forceinline__ void WaitStage() const { BarrierWait(StageBar(0), parity_); }
  __device__ __forceinline__ void ReleaseStage() {
#ifdef OSCAR_RACECHECK
    BarrierArrive(StageBar(1));
#else
    __syncwarp();
    if (lane_ == 0) BarrierArrive(StageBar(1));
#endif
    if (++stage_ == p_.stages) stage_ = 0, parity_ ^= 1;
  }

  // Shared-memory address of this lane's row of ldmatrix.x4: 16 rows of dims [16 step, + 16).
  __device__ __forceinline__ uint32_t KeyRow(int step) const {
    return BrickRow(lane_ & 15, step, lane_ >> 4);
  }
  __device__ __forceinline__ uint32_t ValueRow(int step) const {
    return BrickRow((lane_ & 7) + (lane_ >> 4) * 8, step, (lane_ >> 3) & 1);
  }
  __device__ static int ValidRows(const DecodeItem& item, int unit) {
    const int left = unit < item.sink_units
                         ? item.sink_tokens - unit * kUnitTokens
                         : item.recent_tokens - (unit - item.sink_units) * kUnitTokens;
    return min(left, kUnitTokens);
  }
  // Rows beyond the sequence's end may hold anything, and 0 * NaN is NaN.
  __device__ void ClearRows(int valid) {
    uint8_t* rows = shared_ + StageOffset();
    for (int i = lane_; i < T::kDim / 64 * (kUnitTokens - valid) * 8; i += 32) {
      const int plane = i / ((kUnitTokens - valid) * 8), at = i % ((kUnitTokens - valid) * 8);
      *reinterpret_cast<uint4*>(rows + plane * (kUnitTokens * 128) + valid * 128 + at * 16) =
          uint4{0, 0, 0, 0};
    }
    ProxyFence();
    __syncwarp();
  }

  __device__ static float Power2(int exponent) {
    return __uint_as_float(static_cast<uint32_t>(min(max(exponent + 127, 1), 254)) << 23);
  }
  __device__ static int ExponentOf(float positive) {
    return static_cast<int>(__float_as_uint(positive) >> 23) - 127;
  }
  // Over the lanes of one column pair, that is over a fragment's eight token rows.
  __device__ static __forceinline__ float TokenMax(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
  }
  __device__ static __forceinline__ float TokenSum(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
  }

  const DecodeKernelParams& p_;
  uint8_t* shared_;
  const DecodeShared<T>& at_;
  const int warp_, lane_, row_, quad_;  // row_: token or dim row of a fragment; quad_: its columns
  const uint32_t base_;

 private:
  // 64-dim planes of 128-byte rows, 16-byte chunks swizzled by the row.
  __device__ __forceinline__ uint32_t BrickRow(int row, int step, int half) const {
    const int chunk = step % 4 * 2 + half;
    return base_ + StageOffset() + step / 4 * (kUnitTokens * 128) + row * 128 +
           ((chunk ^ (row & 7)) << 4);
  }

  int stage_ = 0;
  uint32_t parity_ = 0, state_parity_ = 0;
};

}  // namespace oscar::cuda
