// Decode attention over a paged cache: one query token a sequence against its BF16 windows and its
// history of 2, 3, 4 or 16 bits, in one launch.
//
// Grid       persistent: one block an SM of 12 consumer warps (two of 6 for BF16), a scheduler and
// a
//            merger. Work items are (sequence, KV head, split); their number follows from lengths
//            alone, so each scheduler lays the plan out itself (a scan over the batch, nothing over
//            the context) and takes items off one counter, one ahead. Splits depend on a sequence's
//            own length and the device (and, where heads differ in bits, on their map: a head's
//            share of the splits is its share of the bytes). History comes first, then the windows,
//            whose shorter items fill the last wave; where heads differ in bits windows come first,
//            and the splits that end a head's history, which may be short, last.
// Shared     a ring of `stages` blocks a consumer (one page of codes, or 16 BF16 rows of K or V, a
//            stage), a partial state [heads, D] fp32 a consumer, two item slots with their Q, the
//            plan (24 B a row). INT2, D 128, 4 heads: 196 KiB.
// Bytes      the cache once (4608 B a page and head at INT2, D 128, group 128), and 2 x heads x D x
//            4 B of partial state a split, which stay in L2.
// Bound      memory: H200, INT2, 32 / 8 heads, D 128, 32 x 100K runs at 92 % of the read bandwidth,
// 32 x
//            30K at 85 % (docs/lab/2026-11-16-benchmarks.md).
//
// Quantised pages (DecodeConsumer; DecodeConsumerPacked has integers): a pair of codes masked out
// of a word is a pair of fp16 subnormals,
//     bit  15..8         7 6     5 4     3 2     1 0        (and the same 16 bits above)
//          other half    pos 3   pos 2   pos 1   pos 0      value = code * 2^(2 pos - 24)
// which tensor cores take at full speed. 2^(2 pos) is folded into Q for K, into the epilogue for V;
// scale and min never touch an element: logit = s_t (q . code) + min_t sum(q),
// out = sum (p_t s_t) code + sum p_t min_t.
//
// Softmax state: o, l and a reference R in log2 units, p = 2^(logit - R). R is the largest logit
// seen, lagging by up to 2^kSlack so that most pages skip the cross-lane maximum, minus an exponent
// E that lifts p * (V scale) into fp16's normal range: tiny scales cost nothing and lose nothing.
// Q is scaled by a power of two per head for the same reason. Both are undone in fp32.
#pragma once

#include <type_traits>

#include "cuda/attention/decode_consumer.cuh"
#include "cuda/attention/decode_consumer_packed.cuh"
#include "cuda/attention/decode_merger.cuh"
#include "cuda/attention/decode_scheduler.cuh"
#include "cuda/attention/decode_traits.cuh"

namespace oscar::cuda {

template <typename T>
class DecodeConsumerForms;  // decode_consumer_forms.cuh, which the kernels that need it include
template <typename T>
class DecodeConsumerPackedForms;  // decode_consumer_packed_forms.cuh, likewise

template <typename T>
__global__ void __maxnreg__(T::kRegisters)
    DecodeAttentionKernel(const __grid_constant__ typename T::Params p) {
  extern __shared__ __align__(128) uint8_t shared[];
  const DecodeShared<T> at(p.stages, T::StageBytes(p), min(p.group_size, T::kHeads), p.batch);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) {
    const uint32_t bars = SharedAddress(shared + at.bars);
    if (warp < T::kWarps) {
      for (int i = 0; i < p.stages; ++i) {
        BarrierInit(bars + (warp * p.stages + i) * 8, FullArrivals());
      }
    } else if (warp == T::kWarps) {
      const uint32_t items = bars + T::kWarps * p.stages * 8;
      for (int i = 0; i < 2; ++i) {
        BarrierInit(items + (at.kItemFull + i) * 8, DecodeScheduler<T>::ItemArrivals());
        BarrierInit(items + (at.kItemEmpty + i) * 8, (T::kWarps + 1) * 32);
        BarrierInit(items + (at.kQueryFull + i) * 8, 32);
      }
      BarrierInit(items + at.kStateFull * 8, T::kWarps * 32);
      BarrierInit(items + at.kStateEmpty * 8, 32);
      BarrierInit(items + at.kEnd * 8, 1);
    }
    BarrierInitFence();
  }
  LetSuccessorStart();
  __syncthreads();
  if (warp == T::kWarps) {
    DecodeScheduler<T>(p, shared, at, lane).Run();
    return;
  }
  if (warp == T::kWarps + 1) {
    DecodeMerger<T>(p, shared, at, lane).Run();
  } else {
    using Rows = std::conditional_t<T::kPacked, DecodeConsumerPacked<T>, DecodeConsumer<T>>;
    using Forms =
        std::conditional_t<T::kPacked, DecodeConsumerPackedForms<T>, DecodeConsumerForms<T>>;
    using Consumer = std::conditional_t<T::kForms, Forms, Rows>;
    Consumer(p, shared, at, warp, lane).Run();
  }
  // Everybody but the scheduler merges what only this block is left to merge.
  BarrierWait(at.Bar(SharedAddress(shared), p.stages, at.kEnd), 0);
  const int64_t slot = *at.LastSlot(shared, p.stages);
  if (slot >= 0) {
    const DecodeItem item = *at.Item(shared, static_cast<int>(slot));
    const int helper = warp < T::kWarps ? warp : T::kWarps;
    DecodeMerger<T>::template Merge<1>(p, item, helper * 32 + lane, (T::kWarps + 1) * 32);
  }
}

}  // namespace oscar::cuda
