// Decode attention over a paged cache: one query token a sequence against its BF16 windows and its
// INT2, INT4 or BF16 history, in one launch.
//
// Grid       persistent: one block an SM of 12 consumer warps (two of 6 for BF16), a producer and a
//            merger. Work items are (sequence, KV head, split); their number follows from lengths
//            alone, so each producer lays the plan out itself (a scan over the batch, nothing over
//            the context) and takes items off one counter, one ahead. Splits depend on a sequence's
//            own length and the device. Items of window units come first, then history.
// Shared     a ring of `stages` blocks a consumer (one page of codes, or 16 BF16 rows of K or V, a
//            stage), two partial states [heads, D] fp32 a consumer, two item slots with their Q,
//            the plan (24 B a row). INT2, D 128, 4 heads: 217 KiB.
// Bytes      the cache once (4608 B a page and head at INT2, D 128, group 128), and 2 x heads x D x
//            4 B of partial state a split, which stay in L2.
// Bound      memory. H200, INT2, 32 / 8 heads, D 128: see docs/benchmarks.md.
//
// Quantised pages: a pair of codes masked out of a word is a pair of fp16 subnormals,
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

#include "cuda/kernels/decode_merger.cuh"
#include "cuda/kernels/decode_producer.cuh"
#include "cuda/kernels/decode_traits.cuh"

namespace oscar::cuda {

// ---- consumer warps ----

template <typename T>
class DecodeConsumer {
 public:
  __device__ DecodeConsumer(const DecodeKernelParams& p, uint8_t* shared, const DecodeShared<T>& at,
                            int warp, int lane)
      : p_(p),
        shared_(shared),
        at_(at),
        warp_(warp),
        lane_(lane),
        row_(lane >> 2),
        quad_(lane & 3),
        base_(SharedAddress(shared)) {}

  __device__ void Run() {
    int slot = 0;
    uint32_t parity = 0, state_parity = 0;
    while (true) {
      BarrierWait(at_.Bar(base_, p_.stages, at_.kItemFull + slot), parity);
      const DecodeItem& item = *reinterpret_cast<const DecodeItem*>(shared_ + at_.item + slot * 64);
      if (item.kind == kItemEnd) break;
      const bool pages = T::kQuantised && item.kind == kItemPages;
      LoadQ(item, slot, pages);
      Reset();
      if (pages) {
        if constexpr (T::kQuantised) {
          for (int i = warp_; i < item.count; i += T::kWarps) Page();
        }
      } else {
        for (int i = warp_; i < item.count; i += T::kWarps) Unit(ValidRows(item, item.first + i));
      }
      BarrierWait(at_.Bar(base_, p_.stages, at_.kStateEmpty), state_parity ^ 1u);
      state_parity ^= 1;
      WriteState(item, pages);
      BarrierArrive(at_.Bar(base_, p_.stages, at_.kStateFull));
      BarrierArrive(at_.Bar(base_, p_.stages, at_.kItemEmpty + slot));
      if (++slot == 2) slot = 0, parity ^= 1;
    }
  }

 private:
  static constexpr float kSlack = 4.0f;      // log2; how far the reference may lag
  static constexpr int kScaleExponent = 10;  // V scales are lifted to just below 2^11

  __device__ __forceinline__ uint32_t StageBar(int empty) const {
    return base_ + at_.bars + ((warp_ * p_.stages + stage_) * 2 + empty) * 8;
  }
  __device__ __forceinline__ int StageOffset() const {
    return at_.ring + (warp_ * p_.stages + stage_) * T::kStageBytes;
  }
  __device__ __forceinline__ void WaitStage() const { BarrierWait(StageBar(0), parity_); }
  __device__ __forceinline__ void ReleaseStage() {
    __syncwarp();
    if (lane_ == 0) BarrierArrive(StageBar(1));
    if (++stage_ == p_.stages) stage_ = 0, parity_ ^= 1;
  }

  __device__ static int ValidRows(const DecodeItem& item, int unit) {
    const int left = unit < item.sink_units
                         ? item.sink_tokens - unit * kUnitTokens
                         : item.recent_tokens - (unit - item.sink_units) * kUnitTokens;
    return min(left, kUnitTokens);
  }

  // B operand: column = head row_ of a block of 8, k = dims. For quantised pages fp16, times
  // 2^(4 - exponent of the k-step) and a power of two a head; for BF16 pages as it is.
  __device__ void LoadQ(const DecodeItem& item, int slot, bool pages) {
    const uint8_t* q = shared_ + at_.q + slot * min(p_.group_size, T::kHeads) * T::kDim * 2;
#pragma unroll
    for (int nb = 0; nb < T::kNB; ++nb) {
      const int head = nb * 8 + row_;
      const bool valid = head < item.heads;
      float largest = 0.0f;
      float sum[T::kGroups];
#pragma unroll
      for (int g = 0; g < T::kGroups; ++g) sum[g] = 0.0f;
#pragma unroll
      for (int s = 0; s < T::kSteps; ++s) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          uint32_t pair = 0;
          if (valid) {
            pair = *reinterpret_cast<const uint32_t*>(
                q + (head * T::kDim + s * 16 + quad_ * 2 + j * 8) * 2);
          }
          q_[nb][s][j] = pair;
          largest = fmaxf(largest, fmaxf(fabsf(Bf16Low(pair)), fabsf(Bf16High(pair))));
          sum[s / T::kStepsPerGroup] += Bf16Low(pair) + Bf16High(pair);
        }
      }
      float factor = p_.scale_log2;  // of column row_
      if (pages) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        const int exponent = largest > 0.0f ? ExponentOf(largest) - kScaleExponent : 0;
        const float down = Power2(-exponent);
#pragma unroll
        for (int s = 0; s < T::kSteps; ++s) {
          const float f = down * Power2(4 - T::Exponent(s));
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            q_[nb][s][j] = PackHalf(Bf16Low(q_[nb][s][j]) * f, Bf16High(q_[nb][s][j]) * f);
          }
        }
        factor *= Power2(20) * Power2(exponent);
#pragma unroll
        for (int g = 0; g < T::kGroups; ++g) {
          sum[g] += __shfl_xor_sync(~0u, sum[g], 1);
          sum[g] += __shfl_xor_sync(~0u, sum[g], 2);
          sum[g] *= Power2(-20) * down;
          q_sum_[nb][g][0] = __shfl_sync(~0u, sum[g], quad_ * 8);
          q_sum_[nb][g][1] = __shfl_sync(~0u, sum[g], quad_ * 8 + 4);
        }
      }
      factor_[nb][0] = __shfl_sync(~0u, factor, quad_ * 8);
      factor_[nb][1] = __shfl_sync(~0u, factor, quad_ * 8 + 4);
    }
  }

  __device__ static float Power2(int exponent) {
    return __uint_as_float(static_cast<uint32_t>(min(max(exponent + 127, 1), 254)) << 23);
  }
  __device__ static int ExponentOf(float positive) {
    return static_cast<int>(__float_as_uint(positive) >> 23) - 127;
  }

  __device__ void Reset() {
#pragma unroll
    for (int nb = 0; nb < T::kNB; ++nb) {
#pragma unroll
      for (int i = 0; i < T::kSteps; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) o_[nb][i][j] = 0.0f;
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        max_[nb][c] = kEmptyReference;
        reference_[nb][c] = kEmptyReference;
        l_[nb][c] = 0.0f;
#pragma unroll
        for (int g = 0; g < T::kGroups; ++g) z_[nb][g][c] = 0.0f;
      }
    }
    lift_ = 0;
    largest_scale_ = 0.0f;
  }

  __device__ static __forceinline__ float LaneMax(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
  }
  // Moves the reference to the new maximum. n: this lane's largest raw logits.
  __device__ __forceinline__ void Rescale(const float (&n)[T::kNB][2]) {
#pragma unroll
    for (int nb = 0; nb < T::kNB; ++nb) {
      float f[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        max_[nb][c] = fmaxf(max_[nb][c], LaneMax(n[nb][c]) * factor_[nb][c]);
        const float reference = max_[nb][c] - static_cast<float>(lift_);
        f[c] = Exp2(reference_[nb][c] - reference);
        reference_[nb][c] = reference;
        l_[nb][c] *= f[c];
#pragma unroll
        for (int g = 0; g < T::kGroups; ++g) z_[nb][g][c] *= f[c];
      }
#pragma unroll
      for (int i = 0; i < T::kSteps; ++i) {
        o_[nb][i][0] *= f[0];
        o_[nb][i][1] *= f[1];
        o_[nb][i][2] *= f[0];
        o_[nb][i][3] *= f[1];
      }
    }
  }

  // Code pairs at position `step` of a fragment word, as fp16 subnormals.
  template <int kStep>
  __device__ static __forceinline__ uint32_t Pick(uint32_t word, uint32_t shifted) {
    constexpr int kPos = kStep % T::kPerWord, kHalf = T::kPerWord / 2;
    constexpr uint32_t kMask = ((1u << T::kBits) - 1u) * 0x00010001u;
    return (kPos < kHalf ? word : shifted) & (kMask << (T::kBits * (kPos % kHalf)));
  }

  template <int kStep>
  __device__ static __forceinline__ void LoadWords(uint4& w, uint4& shifted, const uint8_t* codes,
                                                   int lane) {
    if constexpr (kStep % T::kPerWord == 0) {
      w = *reinterpret_cast<const uint4*>(codes + kStep / T::kPerWord * 512 + lane * 16);
      shifted = {w.x >> 8, w.y >> 8, w.z >> 8, w.w >> 8};
    }
  }

  // k-steps [kStep, kEnd) of tile kTile, all of one group.
  template <int kTile, int kStep, int kEnd>
  __device__ __forceinline__ void KeySteps(float (&c)[T::kNB][4], uint4& w, uint4& shifted,
                                           const uint8_t* codes) {
    if constexpr (kStep < kEnd) {
      constexpr int kSub = kStep / T::kSubSteps;
      constexpr int kWordStep = kTile * T::kSubSteps + kStep % T::kSubSteps;
      LoadWords<kWordStep>(w, shifted, codes + kSub * kSubBytes, lane_);
      const uint32_t a0 = Pick<kWordStep>(w.x, shifted.x), a1 = Pick<kWordStep>(w.z, shifted.z),
                     a2 = Pick<kWordStep>(w.y, shifted.y), a3 = Pick<kWordStep>(w.w, shifted.w);
#pragma unroll
      for (int nb = 0; nb < T::kNB; ++nb) {
        MmaFp16(c[nb], a0, a1, a2, a3, q_[nb][kStep][0], q_[nb][kStep][1]);
      }
      KeySteps<kTile, kStep + 1, kEnd>(c, w, shifted, codes);
    }
  }
  template <int kTile, int kGroup>
  __device__ __forceinline__ void KeyGroups(float (&s)[T::kNB][4], uint4& w, uint4& shifted,
                                            const uint8_t* block) {
    if constexpr (kGroup < T::kGroups) {
      float c[T::kNB][4] = {};
      KeySteps<kTile, kGroup * T::kStepsPerGroup, (kGroup + 1) * T::kStepsPerGroup>(
          c, w, shifted, block + T::kLayout.k_codes_offset());
      const uint2 meta = *reinterpret_cast<const uint2*>(block + T::kLayout.k_meta_offset() +
                                                         kGroup * PageLayout::kMetaPlaneBytes +
                                                         row_ * 32 + kTile * 8);
      const float2 a = HalfPair(meta.x), b = HalfPair(meta.y);
#pragma unroll
      for (int nb = 0; nb < T::kNB; ++nb) {
        const float q0 = q_sum_[nb][kGroup][0], q1 = q_sum_[nb][kGroup][1];
        if constexpr (kGroup == 0) {
          s[nb][0] = fmaf(c[nb][0], a.x, a.y * q0);
          s[nb][1] = fmaf(c[nb][1], a.x, a.y * q1);
          s[nb][2] = fmaf(c[nb][2], b.x, b.y * q0);
          s[nb][3] = fmaf(c[nb][3], b.x, b.y * q1);
        } else {
          s[nb][0] = fmaf(c[nb][0], a.x, fmaf(a.y, q0, s[nb][0]));
          s[nb][1] = fmaf(c[nb][1], a.x, fmaf(a.y, q1, s[nb][1]));
          s[nb][2] = fmaf(c[nb][2], b.x, fmaf(b.y, q0, s[nb][2]));
          s[nb][3] = fmaf(c[nb][3], b.x, fmaf(b.y, q1, s[nb][3]));
        }
      }
      KeyGroups<kTile, kGroup + 1>(s, w, shifted, block);
    }
  }
  template <int kTile>
  __device__ __forceinline__ void KeyTiles(float (&s)[4][T::kNB][4], uint4& w, uint4& shifted,
                                           const uint8_t* block) {
    if constexpr (kTile < 4) {
      KeyGroups<kTile, 0>(s[kTile], w, shifted, block);
      KeyTiles<kTile + 1>(s, w, shifted, block);
    }
  }

  template <int kTile, int kStep, int kEnd>
  __device__ __forceinline__ void ValueSteps(const uint32_t (&b)[T::kNB][2], uint4& w,
                                             uint4& shifted, const uint8_t* codes) {
    if constexpr (kStep < kEnd) {
      constexpr int kSub = kStep / T::kSubSteps;
      constexpr int kWordStep = kTile * T::kSubSteps + kStep % T::kSubSteps;
      LoadWords<kWordStep>(w, shifted, codes + kSub * kSubBytes, lane_);
      const uint32_t a0 = Pick<kWordStep>(w.x, shifted.x), a1 = Pick<kWordStep>(w.y, shifted.y),
                     a2 = Pick<kWordStep>(w.z, shifted.z), a3 = Pick<kWordStep>(w.w, shifted.w);
#pragma unroll
      for (int nb = 0; nb < T::kNB; ++nb) {
        MmaFp16(o_[nb][kStep], a0, a1, a2, a3, b[nb][0], b[nb][1]);
      }
      ValueSteps<kTile, kStep + 1, kEnd>(b, w, shifted, codes);
    }
  }
  template <int kTile, int kGroup>
  __device__ __forceinline__ void ValueGroups(const float (&p)[T::kNB][4], uint4& w, uint4& shifted,
                                              const uint8_t* block) {
    if constexpr (kGroup < T::kGroups) {
      const uint2 meta = *reinterpret_cast<const uint2*>(block + T::kLayout.v_meta_offset() +
                                                         kGroup * PageLayout::kMetaPlaneBytes +
                                                         row_ * 32 + kTile * 8);
      const float2 a = HalfPair(meta.x), d = HalfPair(meta.y);
      uint32_t b[T::kNB][2];
#pragma unroll
      for (int nb = 0; nb < T::kNB; ++nb) {
        z_[nb][kGroup][0] = fmaf(p[nb][0], a.y, fmaf(p[nb][2], d.y, z_[nb][kGroup][0]));
        z_[nb][kGroup][1] = fmaf(p[nb][1], a.y, fmaf(p[nb][3], d.y, z_[nb][kGroup][1]));
        b[nb][0] = Transpose8x8(PackHalf(p[nb][0] * a.x, p[nb][1] * a.x));
        b[nb][1] = Transpose8x8(PackHalf(p[nb][2] * d.x, p[nb][3] * d.x));
      }
      ValueSteps<kTile, kGroup * T::kStepsPerGroup, (kGroup + 1) * T::kStepsPerGroup>(
          b, w, shifted, block + T::kLayout.v_codes_offset());
      ValueGroups<kTile, kGroup + 1>(p, w, shifted, block);
    }
  }
  template <int kTile>
  __device__ __forceinline__ void ValueTiles(const float (&s)[4][T::kNB][4], uint4& w,
                                             uint4& shifted, const uint8_t* block) {
    if constexpr (kTile < 4) {
      float p[T::kNB][4];
#pragma unroll
      for (int nb = 0; nb < T::kNB; ++nb) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          p[nb][j] = Exp2(fmaf(s[kTile][nb][j], factor_[nb][j & 1], -reference_[nb][j & 1]));
        }
        l_[nb][0] += p[nb][0] + p[nb][2];
        l_[nb][1] += p[nb][1] + p[nb][3];
      }
      ValueGroups<kTile, 0>(p, w, shifted, block);
      ValueTiles<kTile + 1>(s, w, shifted, block);
    }
  }

  // The largest V scale of this lane's rows.
  __device__ __forceinline__ float LargestScale(const uint8_t* block) const {
    __half2 largest;
#pragma unroll
    for (int g = 0; g < T::kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 m =
            *reinterpret_cast<const uint4*>(block + T::kLayout.v_meta_offset() +
                                            g * PageLayout::kMetaPlaneBytes + row_ * 32 + i * 16);
        const __half2 x =
            __hmax2(__hmax2(AsHalf2(m.x), AsHalf2(m.y)), __hmax2(AsHalf2(m.z), AsHalf2(m.w)));
        largest = g == 0 && i == 0 ? x : __hmax2(largest, x);
      }
    }
    return __low2float(largest);
  }
  __device__ static __forceinline__ __half2 AsHalf2(uint32_t x) {
    return *reinterpret_cast<const __half2*>(&x);
  }

  // One page of 64 quantised tokens.
  __device__ __forceinline__ void Page() {
    WaitStage();
    const uint8_t* block = shared_ + StageOffset();
    float s[4][T::kNB][4];
    uint4 w, shifted;
    KeyTiles<0>(s, w, shifted, block);
    const float scale = LargestScale(block);
    bool moves = scale > largest_scale_;
    float n[T::kNB][2];
#pragma unroll
    for (int nb = 0; nb < T::kNB; ++nb) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        n[nb][c] =
            fmaxf(fmaxf(fmaxf(s[0][nb][c], s[0][nb][c + 2]), fmaxf(s[1][nb][c], s[1][nb][c + 2])),
                  fmaxf(fmaxf(s[2][nb][c], s[2][nb][c + 2]), fmaxf(s[3][nb][c], s[3][nb][c + 2])));
        moves = moves || n[nb][c] * factor_[nb][c] > max_[nb][c] + kSlack;
      }
    }
    if (__any_sync(~0u, moves)) {
      const float page_scale = LaneMax(scale);
      if (page_scale > largest_scale_) {
        const int exponent = max(ExponentOf(page_scale), -30);
        lift_ = kScaleExponent - exponent;
        largest_scale_ = Power2(exponent + 1);
      }
      Rescale(n);
    }
    ValueTiles<0>(s, w, shifted, block);
    ReleaseStage();
  }

  // 16 BF16 tokens, of which the first `valid` count.
  __device__ __forceinline__ void Unit(int valid) {
    WaitStage();
    const uint32_t keys = base_ + StageOffset();
    float s[T::kNB][4] = {};
#pragma unroll
    for (int step = 0; step < T::kSteps; ++step) {
      const int row = lane_ & 15, chunk = step % 4 * 2 + (lane_ >> 4);
      uint32_t a[4];
      LoadMatrix4(a,
                  keys + step / 4 * (kUnitTokens * 128) + row * 128 + ((chunk ^ (row & 7)) << 4));
#pragma unroll
      for (int nb = 0; nb < T::kNB; ++nb) {
        MmaBf16(s[nb], a[0], a[1], a[2], a[3], q_[nb][step][0], q_[nb][step][1]);
      }
    }
    ReleaseStage();
    float n[T::kNB][2];
    bool moves = false;
#pragma unroll
    for (int nb = 0; nb < T::kNB; ++nb) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (row_ >= valid) s[nb][c] = -INFINITY;
        if (row_ + 8 >= valid) s[nb][c + 2] = -INFINITY;
        n[nb][c] = fmaxf(s[nb][c], s[nb][c + 2]);
        moves = moves || n[nb][c] * factor_[nb][c] > max_[nb][c] + kSlack;
      }
    }
    if (__any_sync(~0u, moves)) Rescale(n);
    uint32_t high[T::kNB][2], low[T::kNB][2];  // P as a sum of two BF16
#pragma unroll
    for (int nb = 0; nb < T::kNB; ++nb) {
      float p[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        p[j] = Exp2(fmaf(s[nb][j], factor_[nb][j & 1], -reference_[nb][j & 1]));
      }
      l_[nb][0] += p[0] + p[2];
      l_[nb][1] += p[1] + p[3];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t h = PackBf16(p[2 * i], p[2 * i + 1]);
        high[nb][i] = Transpose8x8(h);
        low[nb][i] = Transpose8x8(PackBf16(p[2 * i] - Bf16Low(h), p[2 * i + 1] - Bf16High(h)));
      }
    }
    WaitStage();
    const uint32_t values = base_ + StageOffset();
    if (valid < kUnitTokens) ClearRows(valid);
#pragma unroll
    for (int step = 0; step < T::kSteps; ++step) {
      const int matrix = lane_ >> 3;
      const int row = (lane_ & 7) + (matrix >> 1) * 8, chunk = step % 4 * 2 + (matrix & 1);
      uint32_t a[4];
      LoadMatrix4Transposed(
          a, values + step / 4 * (kUnitTokens * 128) + row * 128 + ((chunk ^ (row & 7)) << 4));
#pragma unroll
      for (int nb = 0; nb < T::kNB; ++nb) {
        MmaBf16(o_[nb][step], a[0], a[1], a[2], a[3], high[nb][0], high[nb][1]);
        MmaBf16(o_[nb][step], a[0], a[1], a[2], a[3], low[nb][0], low[nb][1]);
      }
    }
    ReleaseStage();
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

  // Hands this warp's state to the merger.
  __device__ void WriteState(const DecodeItem& item, bool pages) {
    float* states = reinterpret_cast<float*>(shared_ + at_.state);
    float2* ml = reinterpret_cast<float2*>(shared_ + at_.ml);
#pragma unroll
    for (int nb = 0; nb < T::kNB; ++nb) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        l_[nb][c] = TokenSum(l_[nb][c]);
        if (pages) {
#pragma unroll
          for (int g = 0; g < T::kGroups; ++g) z_[nb][g][c] = TokenSum(z_[nb][g][c]);
        }
        const int head = nb * 8 + quad_ * 2 + c;
        if (head >= item.heads) continue;
        float* state = states + (warp_ * item.heads + head) * T::kStateStride;
#pragma unroll
        for (int i = 0; i < T::kSteps; ++i) {
          const float up = pages ? Power2(24 - T::Exponent(i)) : 1.0f;
          const float add = pages ? z_[nb][i / T::kStepsPerGroup][c] : 0.0f;
          state[i * 16 + row_] = fmaf(o_[nb][i][c], up, add);
          state[i * 16 + row_ + 8] = fmaf(o_[nb][i][c + 2], up, add);
        }
        if (row_ == 0) ml[warp_ * item.heads + head] = {reference_[nb][c], l_[nb][c]};
      }
    }
  }
  __device__ static __forceinline__ float TokenSum(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
  }

  static constexpr int kSubBytes = kPageTokens * (T::kSubSteps * 16) * T::kBits / 8;

  const DecodeKernelParams& p_;
  uint8_t* shared_;
  const DecodeShared<T>& at_;
  const int warp_, lane_, row_, quad_;  // row_: token or dim row of a fragment; quad_: its columns
  const uint32_t base_;
  int stage_ = 0;
  uint32_t parity_ = 0;

  uint32_t q_[T::kNB][T::kSteps][2];
  float q_sum_[T::kNB][T::kGroups][2];
  float factor_[T::kNB][2];  // raw logit -> log2 units, columns 2 quad_ + {0, 1}
  float o_[T::kNB][T::kSteps][4];
  float z_[T::kNB][T::kGroups][2];
  float l_[T::kNB][2], max_[T::kNB][2], reference_[T::kNB][2];
  int lift_;
  float largest_scale_;
};

template <typename T>
__global__ void __maxnreg__(T::kRegisters)
    DecodeAttentionKernel(const __grid_constant__ DecodeKernelParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  const DecodeShared<T> at(p.stages, min(p.group_size, T::kHeads), p.batch);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    const uint32_t bars = SharedAddress(shared + at.bars);
    for (int i = 0; i < T::kWarps * p.stages; ++i) {
      BarrierInit(bars + i * 16, FullArrivals());
      BarrierInit(bars + i * 16 + 8, 1);
    }
    const uint32_t items = bars + 2 * T::kWarps * p.stages * 8;
    for (int i = 0; i < 2; ++i) {
      BarrierInit(items + (at.kItemFull + i) * 8, FullArrivals() + 1);
      BarrierInit(items + (at.kItemEmpty + i) * 8, (T::kWarps + 1) * 32);
    }
    BarrierInit(items + at.kStateFull * 8, T::kWarps * 32);
    BarrierInit(items + at.kStateEmpty * 8, 32);
    BarrierInit(items + at.kEnd * 8, 1);
    BarrierInitFence();
  }
  LetSuccessorStart();
  __syncthreads();
  if (warp == T::kWarps) {
    DecodeProducer<T>(p, shared, at, lane).Run();
    return;
  }
  if (warp == T::kWarps + 1) {
    DecodeMerger<T>(p, shared, at, lane).Run();
  } else {
    DecodeConsumer<T>(p, shared, at, warp, lane).Run();
  }
  // Everybody but the producer merges what only this block is left to merge.
  BarrierWait(at.Bar(SharedAddress(shared), p.stages, at.kEnd), 0);
  const int64_t slot = *at.LastSlot(shared, p.stages);
  if (slot >= 0) {
    const DecodeItem item = *reinterpret_cast<const DecodeItem*>(shared + at.item + slot * 64);
    const int helper = warp < T::kWarps ? warp : T::kWarps;
    DecodeMerger<T>::Merge(p, item, helper * 32 + lane, (T::kWarps + 1) * 32);
  }
}

}  // namespace oscar::cuda
