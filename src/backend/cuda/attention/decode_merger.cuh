// The decode kernel's merger warp. Device only; decode_attention.cuh describes the whole.
#pragma once

#include "cuda/attention/decode_traits.cuh"
#include "cuda/attention/sink_params.h"

namespace oscar::cuda {

// Merges the consumers' states of an item while they work on the next one. Writes the output, or a
// partial state that the last block to finish this (sequence, head) merges in slot order: windows
// first, then history by position.
template <typename T>
class DecodeMerger {
 public:
  __device__ DecodeMerger(const typename T::Params& p, uint8_t* shared, const DecodeShared<T>& at,
                          int lane)
      : p_(p), shared_(shared), at_(at), lane_(lane), base_(SharedAddress(shared)) {}

  __device__ void Run() {
    int slot = 0;
    uint32_t parity = 0, state_parity = 0;
    int64_t last_slot = -1;
    BarrierWait(at_.Bar(base_, p_.stages, at_.kItemFull), 0);
    while (true) {
      const DecodeItem item = Item(slot);
      if (item.kind == kItemEnd) break;
      BarrierWait(at_.Bar(base_, p_.stages, at_.kStateFull), state_parity);
      state_parity ^= 1;
      Combine(item);
      BarrierArrive(at_.Bar(base_, p_.stages, at_.kStateEmpty));
      BarrierArrive(at_.Bar(base_, p_.stages, at_.kItemEmpty + slot));
      __syncwarp();  // before one lane releases the warp's partial state
      if (++slot == 2) slot = 0, parity ^= 1;
      const int64_t head = HeadIndex(p_, item);
      uint32_t is_last = 0;
      if (item.slots > 1 && lane_ == 0) is_last = Arrive(head, item.slots);
      is_last = __shfl_sync(~0u, is_last, 0);
      BarrierWait(at_.Bar(base_, p_.stages, at_.kItemFull + slot), parity);
      if (is_last == 0) continue;
      if (Item(slot).kind == kItemEnd) {
        last_slot = slot ^ 1;  // nothing else to do: the whole block merges
      } else {
        Merge<4>(p_, item, lane_, 32);
      }
    }
    if (lane_ == 0) {
      *at_.LastSlot(shared_, p_.stages) = last_slot;
      BarrierArrive(at_.Bar(base_, p_.stages, at_.kEnd));
    }
  }

  // Merges the partial states of one (sequence, head) with `threads` threads, each of which has
  // kSums sums of four dims in flight. The result depends on neither: every state is weighed
  // against the largest reference of all and added in slot order.
  template <int kSums>
  __device__ static __forceinline__ void Merge(const typename T::Params& p, const DecodeItem& item,
                                               int thread, int threads) {
    constexpr int kBatch = 16 / kSums;  // slots loaded before any is used
    const int64_t first = HeadIndex(p, item) * p.slots * T::kHeads;
    const int sums = item.heads * kColumns;
    for (int i = thread; i < sums; i += threads * kSums) {
      float reference[kSums], l[kSums] = {};
      float4 sum[kSums] = {};
#pragma unroll
      for (int j = 0; j < kSums; ++j) reference[j] = kEmptyReference;
#pragma unroll 4
      for (int k = 0; k < item.slots; ++k) {
#pragma unroll
        for (int j = 0; j < kSums; ++j) {
          const int head = min(i + j * threads, sums - 1) / kColumns;
          reference[j] =
              fmaxf(reference[j], __ldcg(p.partial_ml + first + int64_t{k} * T::kHeads + head).x);
        }
      }
      for (int begin = 0; begin < item.slots; begin += kBatch) {
        float4 o[kSums][kBatch];
        float2 ml[kSums][kBatch];
#pragma unroll
        for (int j = 0; j < kSums; ++j) {
          const int at = min(i + j * threads, sums - 1);
#pragma unroll
          for (int k = 0; k < kBatch; ++k) {
            ml[j][k] = {kEmptyReference, 0.0f};
            o[j][k] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (begin + k >= item.slots) continue;
            const int64_t state = first + int64_t{begin + k} * T::kHeads + at / kColumns;
            ml[j][k] = __ldcg(p.partial_ml + state);
            o[j][k] = __ldcg(reinterpret_cast<const float4*>(p.partial_o + state * T::kDim) +
                             at % kColumns);
          }
        }
#pragma unroll
        for (int j = 0; j < kSums; ++j) {
#pragma unroll
          for (int k = 0; k < kBatch; ++k) {
            const float f = Exp2(ml[j][k].x - reference[j]);
            Accumulate(sum[j], o[j][k], f);
            l[j] = fmaf(ml[j][k].y, f, l[j]);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kSums; ++j) {
        const int at = i + j * threads;
        if (at < sums) Store(p, item, at / kColumns, at % kColumns, sum[j], reference[j], l[j]);
      }
    }
  }

 private:
  static constexpr int kColumns = T::kDim / 4;  // of float4

  __device__ const DecodeItem& Item(int slot) const { return *at_.Item(shared_, slot); }
  __device__ static int64_t HeadIndex(const typename T::Params& p, const DecodeItem& item) {
    return (int64_t{item.row} * p.num_kv_heads + item.kv_head) * p.head_blocks + item.head_block;
  }
  __device__ static __forceinline__ void Accumulate(float4& sum, const float4& o, float f) {
    sum.x = fmaf(o.x, f, sum.x);
    sum.y = fmaf(o.y, f, sum.y);
    sum.z = fmaf(o.z, f, sum.z);
    sum.w = fmaf(o.w, f, sum.w);
  }

  __device__ void Combine(const DecodeItem& item) const {
    const float* states = reinterpret_cast<const float*>(shared_ + at_.state);
    const float2* ml = reinterpret_cast<const float2*>(shared_ + at_.ml);
    const int64_t partial = (HeadIndex(p_, item) * p_.slots + item.slot) * T::kHeads;
#pragma unroll 4
    for (int i = lane_; i < item.heads * kColumns; i += 32) {
      const int head = i / kColumns, column = i % kColumns;
      float2 of_warp[T::kWarps];
      float reference = kEmptyReference, l = 0.0f;
#pragma unroll
      for (int w = 0; w < T::kWarps; ++w) {
        of_warp[w] = ml[w * item.heads + head];
        reference = fmaxf(reference, of_warp[w].x);
      }
      float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int w = 0; w < T::kWarps; ++w) {
        const float f = Exp2(of_warp[w].x - reference);
        Accumulate(sum,
                   *reinterpret_cast<const float4*>(
                       states + (w * item.heads + head) * T::kStateStride + column * 4),
                   f);
        l = fmaf(of_warp[w].y, f, l);
      }
      if (item.slots == 1) {
        Store(p_, item, head, column, sum, reference, l);
      } else {
        __stcg(reinterpret_cast<float4*>(p_.partial_o + (partial + head) * T::kDim) + column, sum);
        if (column == 0) __stcg(p_.partial_ml + partial + head, float2{reference, l});
      }
    }
  }

  // Counts this block's slot in; 1 for the last one. Releases the warp's partial state (ordered by
  // the __syncwarp before it) and acquires everybody else's.
  __device__ uint32_t Arrive(int64_t head_index, int slots) const {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(p_.arrived + head_index)
                 : "memory");
    if (before != static_cast<uint32_t>(slots - 1)) return 0;
    p_.arrived[head_index] = 0;
    return 1;
  }

  __device__ static __forceinline__ void Store(const typename T::Params& p, const DecodeItem& item,
                                               int head, int column, float4 sum,
                                               [[maybe_unused]] float reference, float l) {
    float f = l > 0.0f ? 1.0f / l : 0.0f;
    if constexpr (T::kHasSinks) {
      // Once per sequence and head, whatever its splits.
      const int q_head = item.kv_head * p.group_size + item.head_block * T::kHeads + head;
      f = InverseWithSink(reference, l, __ldg(p.sinks + q_head));
    }
    const int64_t row = (int64_t{item.row} * p.num_kv_heads + item.kv_head) * p.group_size +
                        item.head_block * T::kHeads + head;
    const int64_t at = row * T::kDim + column * 4;
    if (p.out_fp32) {
      *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = {sum.x * f, sum.y * f,
                                                                     sum.z * f, sum.w * f};
    } else {
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + at) = {
          PackBf16(sum.x * f, sum.y * f), PackBf16(sum.z * f, sum.w * f)};
    }
  }

  const typename T::Params& p_;
  uint8_t* shared_;
  const DecodeShared<T>& at_;
  const int lane_;
  const uint32_t base_;
};

}  // namespace oscar::cuda
