// The decode kernel's consumer warps for keys that are not rows, D 128, up to 4 query heads a KV
// head. Windows and values are DecodeConsumerPacked's. Device only; decode_attention.cuh describes
// the whole.
//
//   channels   logit = n_t (sum_d (q_d s_d) code + sum_d q_d m_d)
//              q is fp16, exactly (DecodeQueryPacked::WriteForChannels). A product of it and the
//              scales of two dims is one HMUL2, and what that rounds away one HFMA2: the two
//              columns of a head. Codes are masked out of the words as fp16 subnormals, high ones
//              (ChannelPlaces). The mins are the A operand of a product with q: a lane has them in
//              that order already.
//   mixed      the same; the upper two bits of the boosted dims are one more k-step for each 16 of
//              them. Which dims those are is gathered by place.
//   codebook   logit = factor_t sum_d q_d B[code]. B is a byte, and a byte permute looks up four of
//              them by nibbles; q is 16-bit integers, as against rows.
#pragma once

#include "cuda/attention/decode_consumer_packed.cuh"
#include "quant/turboquant.h"

namespace oscar::cuda {

// m16n8k32, signed bytes, 32-bit sums.
__device__ __forceinline__ void MmaS8(int32_t (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                      uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// __byte_perm() that takes the selector as it is: bit 3 of a nibble fills the byte with the sign.
__device__ __forceinline__ uint32_t Permute(uint32_t low, uint32_t high, uint32_t select) {
  uint32_t y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(low), "r"(high), "r"(select));
  return y;
}

// The levels of four codes from `first` on, a byte each.
constexpr uint32_t LevelsOf(int bits, int first) {
  uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) {
    bytes |= (static_cast<uint32_t>(ByteLevel(bits, first + i)) & 0xffu) << (8 * i);
  }
  return bytes;
}

template <typename T>
class DecodeConsumerPackedForms : DecodeConsumerPacked<T> {
 public:
  __device__ DecodeConsumerPackedForms(const typename T::Params& p, uint8_t* shared,
                                       const DecodeShared<T>& at, int warp, int lane)
      : Base(p, shared, at, warp, lane) {}

  __device__ __forceinline__ void Run() {
    // A call would put the ring's state into local memory.
    this->ForEachItem([&](const DecodeItem& item, const uint8_t* q, int rank)
                          __attribute__((always_inline)) {
                            if (item.kind == kItemPages) {
                              Pages(item, q, rank);
                            } else {
                              this->Units(item, q, rank);
                            }
                          });
  }

 private:
  using Base = DecodeConsumerPacked<T>;
  using PageState = typename Base::PageState;
  using Query = DecodeQueryPacked<T>;
  using Base::lane_, Base::quad_, Base::row_, Base::shared_, Base::Plane;

  __device__ __forceinline__ const auto& At() const { return this->p_.at; }

  __device__ __forceinline__ void Pages(const DecodeItem& item, const uint8_t* q, int rank) {
    PageState state;
    state.q = reinterpret_cast<const uint4*>(q) + lane_;
    state.factor = Query::Factors(q)[lane_].y;
    static_assert(T::kWarps % 2 == 0);
    const int half = (item.first + rank) & 1;  // which of two all pages of this warp are
    const BlockKind v_kind = At().v;
    int left = (item.count - rank + T::kWarps - 1) / T::kWarps;
    while (true) {
      for (int pages = min(left, Base::kPagesPerSum); pages > 0; --pages) Page(q, half, state);
      left -= Base::kPagesPerSum;
      if (left <= 0) break;
      ForKind(
          v_kind, [&]<BlockKind kV>()
                      __attribute__((always_inline)) { this->template Scale<kV>(state, 1); });
    }
    this->WaitForState();
    ForKind(
        v_kind, [&]<BlockKind kV>() __attribute__((always_inline)) {
          this->template WriteState<kV>(item, rank, state);
        });
  }

  __device__ __forceinline__ void Page(const uint8_t* q, int half, PageState& state) {
    this->WaitStage();
    this->LoadId();
    uint8_t* block = shared_ + this->StageOffset();
    float logit[8];  // of tokens row_ + 8 j
    if (At().form == SideForm::kCodebook) {
      ForKind(
          At().k, [&]<BlockKind kK>()
                      __attribute__((always_inline)) { LevelKeys<kK>(block, q, state, logit); });
    } else {
      ForKind(
          At().k, [&]<BlockKind kK>() __attribute__((always_inline)) {
            ChannelKeys<kK>(block, half, state, logit);
          });
      if (At().form == SideForm::kMixed) BoostedKeys(block, q, half, logit);
      if (At().norms != 0) {
        const uint8_t* norms = block + At().norms + row_ * 4;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          logit[j] *= *reinterpret_cast<const float*>(norms + j * 32);
        }
      }
    }
    ForKind(
        At().v, [&]<BlockKind kV>() __attribute__((always_inline)) {
          this->template Attend<kV>(block + At().v_codes, block + At().v_meta, logit, state);
        });
  }

  // ---- channels ----

  // Queries times the scales of a token group, as operands; and times its mins, of this lane's
  // head.
  struct Folded {
    uint32_t product[T::kSteps][2];
    float base;
  };
  // q s in even columns, what that rounds away in odd ones, negative. `rest`: 0, or -q.
  __device__ static __forceinline__ uint32_t Product(uint32_t q, uint32_t rest, uint32_t scale) {
    const __half2 s = AsHalf2(scale);
    const __half2 x = __hfma2(AsHalf2(rest), s, __hmul2(AsHalf2(q), s));
    return *reinterpret_cast<const uint32_t*>(&x);
  }
  __device__ static __forceinline__ __half2 AsHalf2(uint32_t x) {
    return *reinterpret_cast<const __half2*>(&x);
  }

  template <BlockKind kK>
  __device__ __forceinline__ void Fold(Folded& f, const uint8_t* block, int half, int group,
                                       const PageState& state) const {
    using Places = ChannelPlaces<kK>;
    // Of this lane's first dim, in either half of the dims.
    const uint8_t* const lane = block + (group * T::kDim + quad_ * 2) * 4;
    const uint8_t* const metas[2] = {lane + At().metas[half][0], lane + At().metas[half][1]};
    float c[3][4] = {};  // of queries times 1, 4 and 16; negative, in odd columns
#pragma unroll
    for (int step = 0; step < T::kSteps; ++step) {
      const uint4 q4 = state.q[step / 2 * 32], rest4 = state.q[(T::kSteps + step) / 2 * 32];
      const uint32_t q[2] = {step % 2 == 0 ? q4.x : q4.z, step % 2 == 0 ? q4.y : q4.w};
      const uint32_t rest[2] = {step % 2 == 0 ? rest4.x : rest4.z,
                                step % 2 == 0 ? rest4.y : rest4.w};
      const uint8_t* meta = metas[step / (T::kSteps / 2)] + step % (T::kSteps / 2) * 64;
      uint32_t minimum[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint2 pairs = *reinterpret_cast<const uint2*>(meta + j * 32);
        f.product[step][j] = Product(q[j], rest[j], __byte_perm(pairs.x, pairs.y, 0x5410));
        minimum[j] = __byte_perm(pairs.x, pairs.y, 0x7632);
      }
      MmaFp16(c[(Places::kTop - Places::At(step)) / 2], minimum[0], minimum[0], minimum[1],
              minimum[1], rest[0], rest[1]);
    }
    f.base = -fmaf(c[2][1], 1.0f / 16, fmaf(c[1][1], 1.0f / 4, c[0][1]));
  }

  template <BlockKind kK>
  __device__ __forceinline__ void ChannelKeys(const uint8_t* block, int half,
                                              const PageState& state, float (&logit)[8]) const {
    Folded f;
    Fold<kK>(f, block, half, 0, state);
    ChannelTile<kK, 0>(block, f, logit);
    ChannelTile<kK, 1>(block, f, logit);
    if (At().two_groups) Fold<kK>(f, block, half, 1, state);
    ChannelTile<kK, 2>(block, f, logit);
    ChannelTile<kK, 3>(block, f, logit);
  }
  // Logits of tokens row_ + 16 kTile + {0, 8}.
  template <BlockKind kK, int kTile>
  __device__ __forceinline__ void ChannelTile(const uint8_t* codes, const Folded& f,
                                              float (&logit)[8]) const {
    using S = SideWords<kK>;
    using Places = ChannelPlaces<kK>;
    constexpr int kPlanes = kK == BlockKind::kInt4 ? 2 : 1, kSteps = T::kSteps / kPlanes;
    float c[4] = {};
    uint4 high{};
    if constexpr (S::kSplit) high = Plane(codes, 4 + kTile / 2);
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      const uint4 w = Plane(codes, kPlanes * kTile + plane);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const int step = plane * kSteps + s;
        const auto code = [&](uint32_t word, uint32_t bits) {
          return Subnormal<kK>(word, bits, step, kTile % 2 * 8 + step);
        };
        MmaFp16(c, code(w.x, high.x), code(w.z, high.z), code(w.y, high.y), code(w.w, high.w),
                f.product[step][0], f.product[step][1]);
      }
    }
    constexpr float kUnit = static_cast<float>(1 << (24 - Places::kTop));
    logit[2 * kTile] = fmaf(c[0] - c[1], kUnit, f.base);
    logit[2 * kTile + 1] = fmaf(c[2] - c[3], kUnit, f.base);
  }
  // The codes of a step, which are fp16; `from`: of 3 bits, where the high ones are.
  template <BlockKind kK>
  __device__ static __forceinline__ uint32_t Subnormal(uint32_t word, uint32_t bits, int step,
                                                       int from) {
    using S = SideWords<kK>;
    const int at = ChannelPlaces<kK>::At(step), down = ChannelPlaces<kK>::Shift(step);
    const uint32_t low = (down < 0 ? word << -down : word >> down) &
                         (((1u << S::kLowBits) - 1u) * 0x00010001u << at);
    if constexpr (!S::kSplit) return low;
    const int up = at + 2 - from;
    return low | ((up < 0 ? bits >> -up : bits << up) & (0x00010001u << (at + 2)));
  }

  // Adds the upper two bits of boosted dims. Plane p has those of token t at bits 2 (t mod 16) of
  // word t / 16: of a fragment's rows row_ and row_ + 8 they are 16 bits apart.
  __device__ __forceinline__ void BoostedKeys(uint8_t* block, const uint8_t* q, int half,
                                              float (&logit)[8]) const {
    const int boosted = At().boosted;
    // The dim of each plane. Pages are not trusted: what a place without a dim holds is some dim.
    uint8_t* const dims = block + At().copied_bytes;
    const uint32_t places =
        *reinterpret_cast<const uint32_t*>(block + At().indices[half][lane_ / 16] + lane_ % 16 * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int place = static_cast<int>(places >> (8 * i) & 0xffu);
      if (place < boosted) dims[place] = static_cast<uint8_t>(lane_ * 4 + i);
    }
    __syncwarp();
    const uint8_t* const metas[2] = {block + At().metas[half][0], block + At().metas[half][1]};
    const auto* row = reinterpret_cast<const uint16_t*>(q + Query::kRowsAt) + row_ / 2 * T::kDim;
    const uint32_t rest_mask = row_ % 2 != 0 ? ~0u : 0u;
    const uint8_t* const planes = block + At().boosts;
    float c[4][4] = {};
#pragma unroll 1
    for (int first = quad_ * 2; first < boosted; first += 16) {
      uint32_t product[2];
      uint4 even[2], odd[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        product[j] = 0u;
        even[j] = odd[j] = {0, 0, 0, 0};
        const int plane = first + j * 8;
        if (plane >= boosted) continue;  // planes are whole eights
        const uint32_t pair = *reinterpret_cast<const uint16_t*>(dims + plane);
        const int d[2] = {static_cast<int>(pair % T::kDim), static_cast<int>(pair / 256 % T::kDim)};
        uint32_t query[2], scale[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          query[i] = row[d[i]];
          scale[i] = *reinterpret_cast<const uint16_t*>(metas[d[i] / (T::kDim / 2)] +
                                                        d[i] % (T::kDim / 2) * 4);
        }
        const uint32_t q2 = query[0] | query[1] << 16;
        product[j] = Product(q2, (q2 ^ 0x80008000u) & rest_mask, scale[0] | scale[1] << 16);
        const auto* bits =
            reinterpret_cast<const uint4*>(planes + plane * BlockLayout::kBoostBytes);
        even[j] = bits[0];
        odd[j] = bits[1];
      }
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        uint32_t a[4];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint32_t x = (&even[j].x)[t], y = (&odd[j].x)[t];
          a[2 * j] = Boost(__byte_perm(x, y, 0x5410));
          a[2 * j + 1] = Boost(__byte_perm(x, y, 0x7632));
        }
        MmaFp16(c[t], a[0], a[1], a[2], a[3], product[0], product[1]);
      }
    }
    constexpr float kUnit = 4.0f * (1 << (24 - ChannelPlaces<BlockKind::kInt2>::kTop));
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      logit[2 * t] = fmaf(c[t][0] - c[t][1], kUnit, logit[2 * t]);
      logit[2 * t + 1] = fmaf(c[t][2] - c[t][3], kUnit, logit[2 * t + 1]);
    }
  }
  // Bits 2 row_ of both halves, where the highest codes of two bits lie.
  __device__ __forceinline__ uint32_t Boost(uint32_t x) const {
    constexpr int kTop = ChannelPlaces<BlockKind::kInt2>::kTop;
    return __funnelshift_r(x, x, 2 * row_ - kTop) & (0x00030003u << kTop);
  }

  // ---- codebook ----

  template <BlockKind kK>
  __device__ __forceinline__ void LevelKeys(const uint8_t* block, const uint8_t* q,
                                            const PageState& state, float (&logit)[8]) const {
    LevelSums<kK>(block, state.q, logit);
    if (Query::HasRest(q)) {
      float rest[8];
      LevelSums<kK>(block, state.q + Query::kRestAt / 16, rest);
#pragma unroll
      for (int j = 0; j < 8; ++j) logit[j] = fmaf(rest[j], Query::kRestUnit, logit[j]);
    }
    const uint8_t* norms = block + At().k_meta + row_ * 2;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      logit[j] *= __half2float(*reinterpret_cast<const __half*>(norms + j * 16));
    }
  }
  template <BlockKind kK>
  __device__ __forceinline__ void LevelSums(const uint8_t* codes, const uint4* query,
                                            float (&sum)[8]) const {
    int32_t c[4][4] = {};
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      uint4 w{}, high{};
      if constexpr (kK != BlockKind::kInt4) w = Plane(codes, t);
      if constexpr (kK == BlockKind::kInt3) {
        const uint4 both = Plane(codes, 4 + t / 2);
        high = {Spread(both.x, t % 2), Spread(both.y, t % 2), Spread(both.z, t % 2),
                Spread(both.w, t % 2)};
      }
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        if constexpr (kK == BlockKind::kInt4) w = Plane(codes, 2 * t + u);
        const uint4 q = query[u * 32];
        const auto levels = [&](uint32_t word, uint32_t bits, int odd) {
          return Levels<kK>(word, bits, u, odd);
        };
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          MmaS8(c[t], levels(w.x, high.x, odd), levels(w.z, high.z, odd), levels(w.y, high.y, odd),
                levels(w.w, high.w, odd), odd == 0 ? q.x : q.z, odd == 0 ? q.y : q.w);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      sum[2 * t] = static_cast<float>(c[t][0] * 256 + c[t][1]);
      sum[2 * t + 1] = static_cast<float>(c[t][2] * 256 + c[t][3]);
    }
  }
  // Bits 8 tile + {0 .. 7} of both halves: bit i goes to bit i % 2 of nibble i / 2.
  __device__ static __forceinline__ uint32_t Spread(uint32_t x, int tile) {
    x = x >> (8 * tile) & 0x00ff00ffu;
    x = (x | x << 4) & 0x0f0f0f0fu;
    return (x | x << 2) & 0x33333333u;
  }
  // The levels of four codes of the even or odd dims: of steps 2 i + u, or of 4 bits of the word's
  // four (DecodeQueryPacked::Order).
  template <BlockKind kK>
  __device__ static __forceinline__ uint32_t Levels(uint32_t word, uint32_t bits, int u, int odd) {
    constexpr int kBits = SideWords<kK>::kBits;
    if constexpr (kK == BlockKind::kInt4) {
      const uint32_t select = (word & 0x77777777u) >> (16 * odd);
      const uint32_t low = Permute(LevelsOf(kBits, 0), LevelsOf(kBits, 4), select);
      const uint32_t top = Permute(LevelsOf(kBits, 8), LevelsOf(kBits, 12), select);
      // Bytes of 0 or 255: the sign of one of 0 or 128.
      const uint32_t mask =
          Permute(0x8000u, 0u, ((word >> 3 & 0x11111111u) | 0x88888888u) >> (16 * odd));
      return (top & mask) | (low & ~mask);
    }
    uint32_t select = (u == 0 ? word : word >> 2) & 0x33333333u;
    if constexpr (kK == BlockKind::kInt3) {
      select |= (u == 0 ? bits << 2 : bits << 1) & 0x44444444u;
    }
    return Permute(LevelsOf(kBits, 0), kBits == 3 ? LevelsOf(kBits, 4) : 0u, select >> (16 * odd));
  }
};

}  // namespace oscar::cuda
