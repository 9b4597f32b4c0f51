// The decode kernel's consumer warps for any page kind, head dim and group, 8 or 16 query heads a
// block. Device only; decode_attention.cuh describes the whole.
#pragma once

#include "cuda/attention/decode_ring.cuh"

namespace oscar::cuda {

template <typename T>
class DecodeConsumer : protected DecodeRing<T> {
 public:
  __device__ DecodeConsumer(const typename T::Params& p, uint8_t* shared, const DecodeShared<T>& at,
                            int warp, int lane)
      : DecodeRing<T>(p, shared, at, warp, lane) {}

  __device__ __forceinline__ void Run() {
    // A call would put the ring's state into local memory.
    this->ForEachItem([&](const DecodeItem& item, const uint8_t* q,
                          int rank) __attribute__((always_inline)) {
      const bool pages = T::kQuantised && item.kind == kItemPages;
      if constexpr (T::kMixed) head_ = this->p_.heads[item.kv_head];
      LoadQ(item, q, pages);
      Reset();
      if (pages) {
        if constexpr (T::kMixed) {
          for (int i = rank; i < item.count; i += T::kWarps) MixedPage();
        } else if constexpr (T::kQuantised) {
          for (int i = rank; i < item.count; i += T::kWarps) Page();
        }
      } else {
        for (int i = rank; i < item.count; i += T::kWarps) {
          int skipped = 0;
          if constexpr (T::kHasWindow) skipped = this->SkippedRows(item, item.first + i);
          Unit(this->ValidRows(item, item.first + i), skipped);
        }
      }
      this->WaitForState();
      if constexpr (T::kMixed) {
        ForKind(head_.v, [&]<BlockKind kV>() { WriteState<SideWords<kV>>(item, rank, pages); });
      } else {
        WriteState<SideWords<T::kKind>>(item, rank, pages);
      }
    });
  }

 protected:
  using Ring = DecodeRing<T>;
  using Ring::ExponentOf, Ring::TokenMax, Ring::TokenSum;
  using Ring::lane_, Ring::quad_, Ring::row_, Ring::shared_;

  static constexpr float kSlack = 4.0f;      // log2; how far the reference may lag
  static constexpr int kScaleExponent = 10;  // V scales are lifted to just below 2^11

  // B operand: column = head row_ of a block of 8, k = dims. For quantised pages fp16, times
  // 2^(4 - exponent of the k-step) and a power of two per head; for BF16 pages as it is.
  __device__ void LoadQ(const DecodeItem& item, const uint8_t* q, bool pages) {
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
      float factor = this->p_.scale_log2;  // of column row_
      if (pages) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        const int exponent = largest > 0.0f ? ExponentOf(largest) - kScaleExponent : 0;
        const float down = Power2(-exponent);
#pragma unroll
        for (int s = 0; s < T::kSteps; ++s) {
          const float f = down * Power2(4 - KeyExponent(s));
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

  __device__ __forceinline__ int KeyExponent(int step) const {
    if constexpr (T::kMixed) {
      // 3 bits have the places of 2.
      return head_.k == BlockKind::kInt4 ? SideWords<BlockKind::kInt4>::Exponent(step)
                                         : SideWords<BlockKind::kInt2>::Exponent(step);
    } else {
      return SideWords<T::kKind>::Exponent(step);
    }
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

  // Moves the reference to the new maximum. n: this lane's largest raw logits.
  __device__ __forceinline__ void Rescale(const float (&n)[T::kNB][2]) {
#pragma unroll
    for (int nb = 0; nb < T::kNB; ++nb) {
      float f[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        max_[nb][c] = fmaxf(max_[nb][c], TokenMax(n[nb][c]) * factor_[nb][c]);
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

  // Words of a fragment plane; `high`: of 3-bit codes' high bits.
  struct Words {
    uint4 w, shifted, high;
  };
  // Code pairs at position `step` of a fragment word, as fp16 subnormals.
  template <typename S, int kStep>
  __device__ static __forceinline__ uint32_t Pick(uint32_t word, uint32_t shifted, uint32_t high) {
    constexpr int kPos = kStep % S::kPerWord, kHalf = S::kPerWord / 2;
    constexpr int kAt = S::kLowBits * (kPos % kHalf);
    constexpr uint32_t kMask = ((1u << S::kLowBits) - 1u) * 0x00010001u;
    const uint32_t low = (kPos < kHalf ? word : shifted) & (kMask << kAt);
    if constexpr (!S::kSplit) return low;
    constexpr int kUp = kAt + 2 - kStep % 16;  // the high bit goes above the low ones
    return low | ((kUp >= 0 ? high << (kUp & 31) : high >> (-kUp & 31)) & (0x00040004u << kAt));
  }

  // `codes`: of one side and sub-block; `high`: its high bits, of 3-bit codes.
  template <typename S, int kStep>
  __device__ static __forceinline__ void LoadWords(Words& x, const uint8_t* codes,
                                                   const uint8_t* high, int lane) {
    if constexpr (kStep % S::kPerWord == 0) {
      x.w = *reinterpret_cast<const uint4*>(
          codes + kStep / S::kPerWord * BlockLayout::kFragmentPlaneBytes + lane * 16);
      x.shifted = {x.w.x >> 8, x.w.y >> 8, x.w.z >> 8, x.w.w >> 8};
      if constexpr (S::kSplit) {
        x.high = *reinterpret_cast<const uint4*>(
            high + kStep / 16 * BlockLayout::kFragmentPlaneBytes + lane * 16);
      }
    }
  }
  // Bytes of a side's sub-block, of codes or of 3-bit codes' low two bits; where high bits begin.
  template <typename S>
  static constexpr int kSubBytes = kPageTokens* T::kLayout.sub_dims() * S::kLowBits / 8;
  template <typename S>
  static constexpr int kHighAt = T::kDim / T::kLayout.sub_dims() * kSubBytes<S>;

  // k-steps [kStep, kEnd) of tile kTile, all of one group. S: SideWords of K.
  template <typename S, int kTile, int kStep, int kEnd>
  __device__ __forceinline__ void KeySteps(float (&c)[T::kNB][4], Words& x, const uint8_t* codes) {
    if constexpr (kStep < kEnd) {
      constexpr int kSub = kStep / T::kSubSteps;
      constexpr int kWordStep = kTile * T::kSubSteps + kStep % T::kSubSteps;
      LoadWords<S, kWordStep>(x, codes + kSub * kSubBytes<S>,
                              codes + kHighAt<S> + kSub * (kSubBytes<S> / 2), lane_);
      const uint32_t a0 = Pick<S, kWordStep>(x.w.x, x.shifted.x, x.high.x),
                     a1 = Pick<S, kWordStep>(x.w.z, x.shifted.z, x.high.z),
                     a2 = Pick<S, kWordStep>(x.w.y, x.shifted.y, x.high.y),
                     a3 = Pick<S, kWordStep>(x.w.w, x.shifted.w, x.high.w);
#pragma unroll
      for (int nb = 0; nb < T::kNB; ++nb) {
        MmaFp16(c[nb], a0, a1, a2, a3, q_[nb][kStep][0], q_[nb][kStep][1]);
      }
      KeySteps<S, kTile, kStep + 1, kEnd>(c, x, codes);
    }
  }
  template <typename S, int kTile, int kGroup>
  __device__ __forceinline__ void KeyGroups(float (&s)[T::kNB][4], Words& x, const uint8_t* codes,
                                            const uint8_t* metas) {
    if constexpr (kGroup < T::kGroups) {
      float c[T::kNB][4] = {};
      KeySteps<S, kTile, kGroup * T::kStepsPerGroup, (kGroup + 1) * T::kStepsPerGroup>(c, x, codes);
      const uint2 meta = *reinterpret_cast<const uint2*>(
          metas + kGroup * BlockLayout::kMetaPlaneBytes + row_ * BlockLayout::kMetaRowBytes +
          kTile * (2 * BlockLayout::kMetaPairBytes));
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
      KeyGroups<S, kTile, kGroup + 1>(s, x, codes, metas);
    }
  }
  template <typename S, int kTile>
  __device__ __forceinline__ void KeyTiles(float (&s)[4][T::kNB][4], Words& x, const uint8_t* codes,
                                           const uint8_t* metas) {
    if constexpr (kTile < 4) {
      KeyGroups<S, kTile, 0>(s[kTile], x, codes, metas);
      KeyTiles<S, kTile + 1>(s, x, codes, metas);
    }
  }

  // S: SideWords of V.
  template <typename S, int kTile, int kStep, int kEnd>
  __device__ __forceinline__ void ValueSteps(const uint32_t (&b)[T::kNB][2], Words& x,
                                             const uint8_t* codes) {
    if constexpr (kStep < kEnd) {
      constexpr int kSub = kStep / T::kSubSteps;
      constexpr int kWordStep = kTile * T::kSubSteps + kStep % T::kSubSteps;
      LoadWords<S, kWordStep>(x, codes + kSub * kSubBytes<S>,
                              codes + kHighAt<S> + kSub * (kSubBytes<S> / 2), lane_);
      const uint32_t a0 = Pick<S, kWordStep>(x.w.x, x.shifted.x, x.high.x),
                     a1 = Pick<S, kWordStep>(x.w.y, x.shifted.y, x.high.y),
                     a2 = Pick<S, kWordStep>(x.w.z, x.shifted.z, x.high.z),
                     a3 = Pick<S, kWordStep>(x.w.w, x.shifted.w, x.high.w);
#pragma unroll
      for (int nb = 0; nb < T::kNB; ++nb) {
        MmaFp16(o_[nb][kStep], a0, a1, a2, a3, b[nb][0], b[nb][1]);
      }
      ValueSteps<S, kTile, kStep + 1, kEnd>(b, x, codes);
    }
  }
  template <typename S, int kTile, int kGroup>
  __device__ __forceinline__ void ValueGroups(const float (&p)[T::kNB][4], Words& words,
                                              const uint8_t* codes, const uint8_t* metas) {
    if constexpr (kGroup < T::kGroups) {
      const uint2 meta = *reinterpret_cast<const uint2*>(
          metas + kGroup * BlockLayout::kMetaPlaneBytes + row_ * BlockLayout::kMetaRowBytes +
          kTile * (2 * BlockLayout::kMetaPairBytes));
      const float2 a = HalfPair(meta.x), d = HalfPair(meta.y);
      uint32_t b[T::kNB][2];
#pragma unroll
      for (int nb = 0; nb < T::kNB; ++nb) {
        z_[nb][kGroup][0] = fmaf(p[nb][0], a.y, fmaf(p[nb][2], d.y, z_[nb][kGroup][0]));
        z_[nb][kGroup][1] = fmaf(p[nb][1], a.y, fmaf(p[nb][3], d.y, z_[nb][kGroup][1]));
        const float x[4] = {p[nb][0] * a.x, p[nb][1] * a.x, p[nb][2] * d.x, p[nb][3] * d.x};
        const uint32_t low = PackHalf(x[0], x[1]), high = PackHalf(x[2], x[3]);
        // What rounding took from P * scale, times the mean code: over a flat softmax the output is
        // what is left of codes and minima that cancel, and there only this part adds up.
        const float2 low_rounded = HalfPair(low), high_rounded = HalfPair(high);
        z_[nb][kGroup][0] =
            fmaf((x[0] - low_rounded.x) + (x[2] - high_rounded.x), S::kMeanCode, z_[nb][kGroup][0]);
        z_[nb][kGroup][1] =
            fmaf((x[1] - low_rounded.y) + (x[3] - high_rounded.y), S::kMeanCode, z_[nb][kGroup][1]);
        b[nb][0] = Transpose8x8(low);
        b[nb][1] = Transpose8x8(high);
      }
      ValueSteps<S, kTile, kGroup * T::kStepsPerGroup, (kGroup + 1) * T::kStepsPerGroup>(b, words,
                                                                                         codes);
      ValueGroups<S, kTile, kGroup + 1>(p, words, codes, metas);
    }
  }
  template <typename S, int kTile>
  __device__ __forceinline__ void ValueTiles(const float (&s)[4][T::kNB][4], Words& x,
                                             const uint8_t* codes, const uint8_t* metas) {
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
      ValueGroups<S, kTile, 0>(p, x, codes, metas);
      ValueTiles<S, kTile + 1>(s, x, codes, metas);
    }
  }

  // The largest V scale of this lane's rows.
  __device__ __forceinline__ float LargestScale(const uint8_t* metas) const {
    __half2 largest;
#pragma unroll
    for (int g = 0; g < T::kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 m = *reinterpret_cast<const uint4*>(metas + g * BlockLayout::kMetaPlaneBytes +
                                                        row_ * BlockLayout::kMetaRowBytes + i * 16);
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
    using S = SideWords<T::kKind>;
    this->WaitStage();
    this->LoadId();
    const uint8_t* block = shared_ + this->StageOffset();
    float s[4][T::kNB][4];
    Words words;
    KeyTiles<S, 0>(s, words, block + T::kLayout.k_codes_offset(),
                   block + T::kLayout.k_meta_offset());
    const uint8_t* v_metas = block + T::kLayout.v_meta_offset();
    Reference(s, v_metas);
    ValueTiles<S, 0>(s, words, block + T::kLayout.v_codes_offset(), v_metas);
    this->ReleaseStage();
  }
  // The same of a head whose K and V have the bits that head_ says.
  __device__ __forceinline__ void MixedPage() {
    this->WaitStage();
    this->LoadId();
    const BlockLayout layout = head_.Layout(T::kDim, T::kGroup);
    const uint8_t* block = shared_ + this->StageOffset();
    float s[4][T::kNB][4];
    ForKind(head_.k, [&]<BlockKind kK>() {
      Words words;
      KeyTiles<SideWords<kK>, 0>(s, words, block, block + layout.k_meta_offset());
    });
    const uint8_t* v_metas = block + layout.v_meta_offset();
    Reference(s, v_metas);
    ForKind(head_.v, [&]<BlockKind kV>() {
      Words words;
      ValueTiles<SideWords<kV>, 0>(s, words, block + layout.v_codes_offset(), v_metas);
    });
    this->ReleaseStage();
  }
  // Moves the softmax's reference where a page's logits or V scales ask for it.
  __device__ __forceinline__ void Reference(const float (&s)[4][T::kNB][4],
                                            const uint8_t* v_metas) {
    const float scale = LargestScale(v_metas);
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
      const float page_scale = TokenMax(scale);
      if (page_scale > largest_scale_) {
        const int exponent = max(ExponentOf(page_scale), -30);
        lift_ = kScaleExponent - exponent;
        largest_scale_ = Power2(exponent + 1);
      }
      Rescale(n);
    }
  }

  // 16 BF16 tokens, of which the first `valid` count, less the first `skipped` of a sliding window.
  __device__ __forceinline__ void Unit(int valid, [[maybe_unused]] int skipped) {
    this->WaitStage();
    if constexpr (T::kMixed) this->LoadId();  // pages may follow
    float s[T::kNB][4] = {};
#pragma unroll
    for (int step = 0; step < T::kSteps; ++step) {
      uint32_t a[4];
      LoadMatrix4(a, this->KeyRow(step));
#pragma unroll
      for (int nb = 0; nb < T::kNB; ++nb) {
        MmaBf16(s[nb], a[0], a[1], a[2], a[3], q_[nb][step][0], q_[nb][step][1]);
      }
    }
    this->ReleaseStage();
    float n[T::kNB][2];
    bool moves = false;
#pragma unroll
    for (int nb = 0; nb < T::kNB; ++nb) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (row_ >= valid) s[nb][c] = -INFINITY;
        if (row_ + 8 >= valid) s[nb][c + 2] = -INFINITY;
        if constexpr (T::kHasWindow) {
          if (row_ < skipped) s[nb][c] = -INFINITY;
          if (row_ + 8 < skipped) s[nb][c + 2] = -INFINITY;
        }
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
    this->WaitStage();
    if constexpr (T::kMixed) this->LoadId();  // pages may follow
    if (valid < kUnitTokens) this->ClearRows(valid);
#pragma unroll
    for (int step = 0; step < T::kSteps; ++step) {
      uint32_t a[4];
      LoadMatrix4Transposed(a, this->ValueRow(step));
#pragma unroll
      for (int nb = 0; nb < T::kNB; ++nb) {
        MmaBf16(o_[nb][step], a[0], a[1], a[2], a[3], high[nb][0], high[nb][1]);
        MmaBf16(o_[nb][step], a[0], a[1], a[2], a[3], low[nb][0], low[nb][1]);
      }
    }
    this->ReleaseStage();
  }

  // Hands this warp's state to the merger. S: SideWords of V.
  template <typename S>
  __device__ void WriteState(const DecodeItem& item, int rank, bool pages) {
    float* states = reinterpret_cast<float*>(shared_ + this->at_.state);
    float2* ml = reinterpret_cast<float2*>(shared_ + this->at_.ml);
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
        float* state = states + (rank * item.heads + head) * T::kStateStride;
#pragma unroll
        for (int i = 0; i < T::kSteps; ++i) {
          const float up = pages ? Power2(24 - S::Exponent(i)) : 1.0f;
          const float add = pages ? z_[nb][i / T::kStepsPerGroup][c] : 0.0f;
          state[i * 16 + row_] = fmaf(o_[nb][i][c], up, add);
          state[i * 16 + row_ + 8] = fmaf(o_[nb][i][c + 2], up, add);
        }
        if (row_ == 0) ml[rank * item.heads + head] = {reference_[nb][c], l_[nb][c]};
      }
    }
  }

  HeadBlock head_;  // of the item, where heads differ in bits
  uint32_t q_[T::kNB][T::kSteps][2];
  float q_sum_[T::kNB][T::kGroups][2];
  float factor_[T::kNB][2];  // raw logit -> log2 units, columns 2 quad_ + {0, 1}
  float o_[T::kNB][T::kSteps][4];
  float z_[T::kNB][T::kGroups][2];
  float l_[T::kNB][2], max_[T::kNB][2], reference_[T::kNB][2];
  int lift_;
  float largest_scale_;
};

}  // namespace oscar::cuda
