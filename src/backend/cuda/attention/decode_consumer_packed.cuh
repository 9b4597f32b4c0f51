// The decode kernel's consumer warps for quantised pages of D 128, one group a row, up to 4 query
// heads a KV head. Device only; decode_attention.cuh describes the whole.
//
// Four heads fill half of a fragment's eight columns. Head h has columns 2h and 2h + 1, so a lane
// has the tokens of one head only, and half as many logits as in the layout of DecodeConsumer. P
// against the windows is a sum of two BF16 numbers, one a column; their keys leave the second zero.
//
// Against pages the query (decode_query_packed.cuh) and P * (V scale) are 16-bit integers, a byte a
// column, and codes are bytes: four of them come out of a word with one AND (two as fp16), none of
// V for one slice in four (its sum is that of whole bytes less the other three), and sums are
// exact. What rounding takes from P is made good by the mean code, c = 1.5: with y = round(P s),
//   out = sum P (min + c s) + sum y (code - c)
// so that rounding meets numbers of mean zero. Over thousands of equally likely tokens the output
// is what is left of codes and minima that cancel, and rounding P alone would be most of it.
//
// Codes of 4 bits are two to a byte, and likewise one mask makes four of them. Those of 3 bits are
// the low two with the high one brought beside them: a shift and a mask, and an OR that is part of
// the AND. The byte's last pair would not fit, so it is moved down by two bits.
//
// R, the reference of the softmax, is a whole number for pages: the largest P * (V scale) begins
// between 2^14 and 2^15 and R rises when one exceeds 16 bits.
#pragma once

#include "cuda/attention/decode_query_packed.cuh"
#include "cuda/attention/decode_ring.cuh"

namespace oscar::cuda {

template <typename T>
class DecodeConsumerPacked : protected DecodeRing<T> {
 public:
  // Groups of V. Other rows than those of one group are read beside keys of other forms alone.
  static constexpr int kGroups = T::kGroups;
  static_assert(T::kDim == 128 && (kGroups == 1 || kGroups == 4) && T::kHeads == 4);

  __device__ DecodeConsumerPacked(const typename T::Params& p, uint8_t* shared,
                                  const DecodeShared<T>& at, int warp, int lane)
      : DecodeRing<T>(p, shared, at, warp, lane) {}

  __device__ __forceinline__ void Run() {
    // A call would put the ring's state into local memory.
    this->ForEachItem([&](const DecodeItem& item, const uint8_t* q, int rank)
                          __attribute__((always_inline)) {
                            if (item.kind == kItemPages) {
                              if constexpr (T::kMixed) {
                                MixedPages(item, q, rank);
                              } else {
                                Pages<T::kKind, T::kKind>(item, q, rank);
                              }
                            } else {
                              Units(item, q, rank);
                            }
                          });
  }

 protected:
  using Ring = DecodeRing<T>;
  using Ring::ExponentOf, Ring::TokenMax, Ring::TokenSum;
  using Ring::lane_, Ring::quad_, Ring::row_, Ring::shared_;

  static constexpr float kProductBits = 15.0f;  // of the largest P * (V scale) where R is set
  static constexpr float kToInteger = 0x1p23f;  // a float beyond it has its integer in its low bits
  static constexpr uint32_t kToIntegerBits = 0x4b000000u;  // its own
  static constexpr float kLargestProduct = kToInteger + 65535.0f;
  // 32-bit sums have room for 516 pages of the largest products.
  static constexpr int kPagesPerSum = 128;

  template <BlockKind kK, BlockKind kV>
  static constexpr BlockLayout kLayout{kK, kV, CodeOrder::kTensorCore, T::kDim, T::kDim};
  // Power of two that slice s of V's sums carries.
  template <BlockKind kV>
  __device__ static constexpr int SliceExponent(int s) {
    if (kV == BlockKind::kInt3 && s % 4 == 3) return 4;
    return kV == BlockKind::kInt4 ? s % 2 * 4 : s % 4 * 2;
  }

  struct PageState {
    const uint4* q;       // DecodeQueryPacked's, this lane's
    float q_sum, factor;  // raw logits of all codes 1; raw logit -> log2 units
    float reference = kEmptyReference, l = 0.0f, z[kGroups] = {};
    int32_t sum[kGroups] = {};     // of y
    int32_t o[T::kSteps][4] = {};  // of y * code: {low, high byte} of dims row_ and row_ + 8
  };

  template <BlockKind kK, BlockKind kV>
  __device__ __forceinline__ void Pages(const DecodeItem& item, const uint8_t* q, int rank) {
    PageState state;
    state.q = reinterpret_cast<const uint4*>(q) + lane_;
    const float2 factors = DecodeQueryPacked<T>::Factors(q)[lane_];
    state.q_sum = factors.x;
    state.factor = factors.y;
    int left = (item.count - rank + T::kWarps - 1) / T::kWarps;
    while (true) {
      int pages = min(left, kPagesPerSum);
      if (!DecodeQueryPacked<T>::HasRest(q)) {
        for (; pages > 0; --pages) Page<kK, kV, false>(state);
      } else {
        for (; pages > 0; --pages) Page<kK, kV, true>(state);
      }
      left -= kPagesPerSum;
      if (left <= 0) break;
      Scale<kV>(state, 1);
    }
    this->WaitForState();
    WriteState<kV>(item, rank, state);
  }
  template <BlockKind kV>
  __device__ __forceinline__ void WriteState(const DecodeItem& item, int rank, PageState& state) {
    MoveBytes<kV>(state, -1);
    const float l = TokenSum(state.l);
    float z[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      z[g] =
          TokenSum(fmaf(static_cast<float>(state.sum[g]), -SideWords<kV>::kMeanCode, state.z[g]));
    }
    if (quad_ >= item.heads) return;
    float* out = StateOf(rank * item.heads + quad_);
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      const float up = Power2(-SliceExponent<kV>(s)), add = z[s / T::kStepsPerGroup];
      out[s * 16 + row_] = fmaf(Total(state.o[s][0], state.o[s][1]), up, add);
      out[s * 16 + 8 + row_] = fmaf(Total(state.o[s][2], state.o[s][3]), up, add);
    }
    WriteReference(rank * item.heads + quad_, state.reference, l);
  }
  // All of it inlined, as calls would put the ring's state into local memory.
  __device__ __forceinline__ void MixedPages(const DecodeItem& item, const uint8_t* q, int rank) {
    const HeadBlock head = this->p_.heads[item.kv_head];
    if (head.k == BlockKind::kInt2) {
      PagesOf<BlockKind::kInt2>(head.v, item, q, rank);
    } else if (head.k == BlockKind::kInt3) {
      PagesOf<BlockKind::kInt3>(head.v, item, q, rank);
    } else {
      PagesOf<BlockKind::kInt4>(head.v, item, q, rank);
    }
  }
  template <BlockKind kK>
  __device__ __forceinline__ void PagesOf(BlockKind v, const DecodeItem& item, const uint8_t* q,
                                          int rank) {
    if (v == BlockKind::kInt2) {
      Pages<kK, BlockKind::kInt2>(item, q, rank);
    } else if (v == BlockKind::kInt3) {
      Pages<kK, BlockKind::kInt3>(item, q, rank);
    } else {
      Pages<kK, BlockKind::kInt4>(item, q, rank);
    }
  }
  __device__ static float Total(int32_t low, int32_t high) {
    return fmaf(static_cast<float>(high), 256.0f, static_cast<float>(low));
  }

  // kRest: the query has a rest. Rare, and a separate loop keeps it out of the others' registers.
  template <BlockKind kK, BlockKind kV, bool kRest>
  __device__ __forceinline__ void Page(PageState& state) {
    this->WaitStage();
    this->LoadId();
    const uint8_t* block = shared_ + this->StageOffset();
    float logit[8];  // of tokens row_ + 8 j
    Keys<kK, kRest>(block, block + kLayout<kK, kV>.k_meta_offset(), state, logit);
    Attend<kV>(block + kLayout<kK, kV>.v_codes_offset(), block + kLayout<kK, kV>.v_meta_offset(),
               logit, state);
  }
  // Adds a page's values. Releases the stage. codes, metas: of V.
  template <BlockKind kV>
  __device__ __forceinline__ void Attend(const uint8_t* codes, const uint8_t* metas,
                                         const float (&logit)[8], PageState& state) {
    if constexpr (kGroups > 1) {
      AttendGroups<kV>(codes, metas, logit, state);
    } else {
      AttendRows<kV>(codes, metas, logit, state);
    }
  }
  template <BlockKind kV>
  __device__ __forceinline__ void AttendRows(const uint8_t* codes, const uint8_t* metas,
                                             const float (&logit)[8], PageState& state) {
    constexpr float kMeanCode = SideWords<kV>::kMeanCode;
    float scale[8], minimum[8];
    LoadMeta(metas, scale, minimum);
    float p[8], y[8];
    const float largest = Softmax(state, logit, scale, p, y);
    if (__any_sync(~0u, largest > kLargestProduct)) {
      RaiseReference<kV>(state, LargestProduct(state, logit, scale));
      Softmax(state, logit, scale, p, y);
    }
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      state.l += p[j] + p[j + 1];
      state.z[0] = fmaf(p[j], fmaf(kMeanCode, scale[j], minimum[j]),
                        fmaf(p[j + 1], fmaf(kMeanCode, scale[j + 1], minimum[j + 1]), state.z[0]));
      state.sum[0] += __float_as_int(y[j]) + __float_as_int(y[j + 1]);
    }
    state.sum[0] -= static_cast<int32_t>(8u * kToIntegerBits);
    Values<kV>(codes, y, state);
  }
  // The same of V in groups of dims: P times the scale is another integer in each. Two groups at a
  // time, whose codes lie in the same bytes.
  template <BlockKind kV>
  __device__ __forceinline__ void AttendGroups(const uint8_t* codes, const uint8_t* metas,
                                               const float (&logit)[8], PageState& state) {
    static_assert(kGroups == 4);
    float p[8];
    Weights(state, logit, p);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t operand[2][4];
      float z[2];
      int32_t sum[2];
#pragma unroll 1
      for (bool again = false;; again = true) {
        uint32_t any = 0;  // of the bits of y: integers of 16 bits leave the upper ones alone
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          any |= GroupOperands<kV>(metas + (2 * half + i) * BlockLayout::kMetaPlaneBytes, p,
                                   operand[i], z[i], sum[i]);
        }
        if (!__any_sync(~0u, any >= kToIntegerBits + 0x10000u) || again) break;
        float largest = -INFINITY;
#pragma unroll 1
        for (int g = 0; g < kGroups; ++g) {
          float scale[8], minimum[8];
          LoadMeta(metas + g * BlockLayout::kMetaPlaneBytes, scale, minimum);
          largest = fmaxf(largest, LargestProduct(state, logit, scale));
        }
        RaiseReference<kV>(state, largest);
        Weights(state, logit, p);
      }
      if (half == 0) {
#pragma unroll
        for (int j = 0; j < 8; ++j) state.l += p[j];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        state.z[2 * half + i] += z[i];
        state.sum[2 * half + i] += sum[i];
      }
      HalfValues<kV>(codes, half, operand, state);
    }
  }
  __device__ static __forceinline__ void Weights(const PageState& state, const float (&logit)[8],
                                                 float (&p)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) p[j] = Exp2(fmaf(logit[j], state.factor, -state.reference));
  }
  // y = P * scale of a group as operands, and its sums; returns all bits of y.
  template <BlockKind kV>
  __device__ __forceinline__ uint32_t GroupOperands(const uint8_t* meta, const float (&p)[8],
                                                    uint32_t (&operand)[4], float& z,
                                                    int32_t& sum) const {
    constexpr float kMeanCode = SideWords<kV>::kMeanCode;
    float scale[8], minimum[8], y[8];
    LoadMeta(meta, scale, minimum);
    uint32_t any = 0;
    z = 0.0f;
    sum = -static_cast<int32_t>(8u * kToIntegerBits);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      y[j] = fmaf(p[j], scale[j], kToInteger);
      z = fmaf(p[j], fmaf(kMeanCode, scale[j], minimum[j]), z);
      sum += __float_as_int(y[j]);
      any |= __float_as_uint(y[j]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) operand[i] = Column(y, i / 2 * 4 + i % 2);
    return any;
  }
  // Slices 4 half to 4 half + 3 of Values().
  template <BlockKind kV>
  __device__ __forceinline__ void HalfValues(const uint8_t* codes, int half,
                                             const uint32_t (&operand)[2][4], PageState& state) {
    constexpr int kPlanes = kV == BlockKind::kInt4 ? 2 : 1;
#pragma unroll
    for (int t = 0; t < 4; t += 2) {
      const int plane = kPlanes == 2 ? half : 0;
      const uint4 w = Plane(codes, kPlanes * t + plane),
                  u = Plane(codes, kPlanes * (t + 1) + plane);
      uint4 high{};
      if constexpr (kV == BlockKind::kInt3) high = Plane(codes, kHighPlane + t / 2);
      if (half == 1 && t == 2) this->ReleaseStage();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t b[2] = {operand[i][t], operand[i][t + 1]};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int slice = 4 * half + 2 * i + j, s = 2 * i + j;
          if constexpr (kV == BlockKind::kInt4) {
            // Whole bytes: MoveBytes()
            Multiply(state.o[slice], Bytes(w, u, i), j == 0 ? 0x0f0f0f0fu : ~0u, b);
          } else if constexpr (kV == BlockKind::kInt3) {
            const uint4 a = Bytes(w, u, half);
            MmaU8(state.o[slice], WithHighBit(a.x, high.x, s, slice),
                  WithHighBit(a.y, high.y, s, slice), WithHighBit(a.z, high.z, s, slice),
                  WithHighBit(a.w, high.w, s, slice), b[0], b[1]);
          } else {
            Multiply(state.o[slice], Bytes(w, u, half), 0x03030303u << (2 * s), b);
          }
        }
      }
    }
  }
  // Tokens row_ + 8 j and 16 more of y, as an operand: low bytes of both, then high ones.
  __device__ static __forceinline__ uint32_t Column(const float (&y)[8], int j) {
    return Transpose8x8(__byte_perm(__float_as_uint(y[j]), __float_as_uint(y[j + 2]), 0x5140));
  }

  // p, and y = p * (V scale) as integers beyond kToInteger; returns this lane's largest.
  __device__ static __forceinline__ float Softmax(const PageState& state, const float (&logit)[8],
                                                  const float (&scale)[8], float (&p)[8],
                                                  float (&y)[8]) {
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      p[j] = Exp2(fmaf(logit[j], state.factor, -state.reference));
      y[j] = fmaf(p[j], scale[j], kToInteger);
      largest = fmaxf(largest, y[j]);
    }
    return largest;
  }

  __device__ __forceinline__ void LoadMeta(const uint8_t* meta, float (&scale)[8],
                                           float (&minimum)[8]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 m =
          *reinterpret_cast<const uint4*>(meta + row_ * BlockLayout::kMetaRowBytes + i * 16);
      const uint32_t pair[4] = {m.x, m.y, m.z, m.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = HalfPair(pair[j]);
        scale[i * 4 + j] = x.x;
        minimum[i * 4 + j] = x.y;
      }
    }
  }

  __device__ __forceinline__ uint4 Plane(const uint8_t* codes, int plane) const {
    return *reinterpret_cast<const uint4*>(codes + plane * BlockLayout::kFragmentPlaneBytes +
                                           lane_ * 16);
  }

  // 64 times the sums of code * q, or 16 times (DecodeQueryPacked). Bit pair p of the code words
  // weighs code * 4^p: sums are multiplied by 4 before the next pair is added. Tiles alternate, so
  // that products that wait for each other are four apart.
  template <BlockKind kK>
  __device__ __forceinline__ void CodeSums(const uint8_t* codes, const uint4* query,
                                           float (&sum)[8]) const {
    int32_t c[4][4] = {};
    if constexpr (kK == BlockKind::kInt2) {
      CodeSums2(codes, query, c);
    } else if constexpr (kK == BlockKind::kInt3) {
      CodeSums3(codes, query, c);
    } else {
      CodeSums4(codes, query, c);
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      sum[2 * t] = static_cast<float>(c[t][0] * 256 + c[t][1]);
      sum[2 * t + 1] = static_cast<float>(c[t][2] * 256 + c[t][3]);
    }
  }
  __device__ __forceinline__ void CodeSums2(const uint8_t* codes, const uint4* query,
                                            int32_t (&c)[4][4]) const {
    uint4 w[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) w[t] = Plane(codes, t);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const uint32_t mask = 0x03030303u << (2 * p);
      const uint4 q = query[p / 2 * 32];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) c[t][i] *= 4;
        MmaU8S8(c[t], w[t].x & mask, w[t].z & mask, w[t].y & mask, w[t].w & mask,
                p % 2 == 0 ? q.x : q.z, p % 2 == 0 ? q.y : q.w);
      }
    }
  }
  // Two tiles share a plane of high bits; four would take registers that are not there. The bits of
  // steps 0 to 3 go to the low nibbles of bytes 0 and 2, those of steps 4 to 7 to bytes 1 and 3,
  // and from there beside their low ones.
  __device__ __forceinline__ void CodeSums3(const uint8_t* codes, const uint4* query,
                                            int32_t (&c)[4][4]) const {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const uint4 low[2] = {Plane(codes, 2 * pair), Plane(codes, 2 * pair + 1)};
      const uint4 both = Plane(codes, kHighPlane + pair);
      const auto nibbles = [](uint32_t bits, int tile) {
        return tile == 0 ? (bits & 0x000f000fu) | (bits << 4 & 0x0f000f00u)
                         : (bits >> 8 & 0x000f000fu) | (bits >> 4 & 0x0f000f00u);
      };
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const uint4 q = query[p / 2 * 32];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          int32_t(&sum)[4] = c[2 * pair + t];
          if (p == 1 || p == 2) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i] *= 4;
          }
          const auto codes3 = [&](uint32_t word, uint32_t bits) {
            return WithHighBit(word, nibbles(bits, t), p, p);
          };
          MmaU8S8(sum, codes3(low[t].x, both.x), codes3(low[t].z, both.z), codes3(low[t].y, both.y),
                  codes3(low[t].w, both.w), p % 2 == 0 ? q.x : q.z, p % 2 == 0 ? q.y : q.w);
        }
      }
    }
  }
  // Pair p of the bytes of `word`, with bit `from` of the bytes of `bits` above it: code * 4^p, and
  // of the last pair code * 4^2.
  __device__ static __forceinline__ uint32_t WithHighBit(uint32_t word, uint32_t bits, int p,
                                                         int from) {
    const int at = p == 3 ? 6 : 2 * p + 2, shift = at - from;
    const uint32_t high = (shift >= 0 ? bits << shift : bits >> -shift) & (0x01010101u << at);
    return ((p == 3 ? word >> 2 : word) & (0x03030303u << (at - 2))) | high;
  }
  static constexpr int kHighPlane = 4;  // the first of 3-bit codes' high bits

  __device__ __forceinline__ void CodeSums4(const uint8_t* codes, const uint4* query,
                                            int32_t (&c)[4][4]) const {
#pragma unroll
    for (int p = 0; p < 2; ++p) {  // low nibbles, then high ones, which weigh 16
      const uint32_t mask = 0x0f0f0f0fu << (4 * p);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 q = query[half * 32];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          if (p == 1 && half == 0) {
#pragma unroll
            for (int i = 0; i < 4; ++i) c[t][i] *= 16;
          }
          const uint4 w = Plane(codes, 2 * t + half);
          MmaU8S8(c[t], w.x & mask, w.z & mask, w.y & mask, w.w & mask, p == 0 ? q.x : q.z,
                  p == 0 ? q.y : q.w);
        }
      }
    }
  }
  template <BlockKind kK, bool kRest>
  __device__ __forceinline__ void Keys(const uint8_t* codes, const uint8_t* meta,
                                       const PageState& state, float (&logit)[8]) const {
    float sum[8];
    CodeSums<kK>(codes, state.q, sum);
    if constexpr (kRest) {
      float rest[8];
      CodeSums<kK>(codes, state.q + 64, rest);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] = fmaf(rest[j], DecodeQueryPacked<T>::kRestUnit, sum[j]);
    }
    float scale[8], minimum[8];
    LoadMeta(meta, scale, minimum);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      logit[j] = fmaf(sum[j], scale[j], minimum[j] * state.q_sum);
    }
  }

  // Releases the stage. Tokens of two tiles alternate along k, in A as in B.
  template <BlockKind kV>
  __device__ __forceinline__ void Values(const uint8_t* codes, const float (&y)[8],
                                         PageState& state) {
#pragma unroll
    for (int t = 0; t < 4; t += 2) {
      const uint32_t b[2] = {Column(y, 2 * t), Column(y, 2 * t + 1)};
      if constexpr (kV == BlockKind::kInt4) {
        uint4 w[2], u[2];  // slices 0-3, 4-7
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          w[i] = Plane(codes, 2 * t + i);
          u[i] = Plane(codes, 2 * t + 2 + i);
        }
        if (t == 2) this->ReleaseStage();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint4 a = Bytes(w[i / 2], u[i / 2], i % 2);
          Multiply(state.o[2 * i], a, 0x0f0f0f0fu, b);
          Multiply(state.o[2 * i + 1], a, ~0u, b);  // whole bytes: MoveBytes()
        }
        continue;
      }
      const uint4 w = Plane(codes, t), u = Plane(codes, t + 1);
      uint4 high;
      if constexpr (kV == BlockKind::kInt3) high = Plane(codes, kHighPlane + t / 2);
      if (t == 2) this->ReleaseStage();
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // slices 0-3 are the even bytes, 4-7 the odd ones
        const uint4 a = Bytes(w, u, half);
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          if constexpr (kV == BlockKind::kInt3) {
            // The bytes of `high` are in the order that Bytes() makes.
            const int from = half * 4 + s;
            MmaU8(state.o[from], WithHighBit(a.x, high.x, s, from),
                  WithHighBit(a.y, high.y, s, from), WithHighBit(a.z, high.z, s, from),
                  WithHighBit(a.w, high.w, s, from), b[0], b[1]);
          } else {
            // Whole bytes for the last slice: MoveBytes() takes the others out of its sum.
            const uint32_t mask = s == 3 ? ~0u : 0x03030303u << (2 * s);
            MmaU8(state.o[half * 4 + s], a.x & mask, a.y & mask, a.z & mask, a.w & mask, b[0],
                  b[1]);
          }
        }
      }
    }
  }
  // The even or odd bytes of both tiles' words.
  __device__ static __forceinline__ uint4 Bytes(const uint4& w, const uint4& u, int odd) {
    const uint32_t select = odd == 0 ? 0x6240 : 0x7351;
    return {__byte_perm(w.x, u.x, select), __byte_perm(w.y, u.y, select),
            __byte_perm(w.z, u.z, select), __byte_perm(w.w, u.w, select)};
  }
  __device__ static __forceinline__ void Multiply(int32_t (&o)[4], const uint4& a, uint32_t mask,
                                                  const uint32_t (&b)[2]) {
    MmaU8(o, a.x & mask, a.y & mask, a.z & mask, a.w & mask, b[0], b[1]);
  }

  // log2 of this lane's largest P * scale but for the reference.
  __device__ static __forceinline__ float LargestProduct(const PageState& state,
                                                         const float (&logit)[8],
                                                         const float (&scale)[8]) {
    float largest = -INFINITY;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      largest = fmaxf(largest, fmaf(logit[j], state.factor, __log2f(scale[j])));
    }
    return largest;
  }
  template <BlockKind kV>
  __device__ __forceinline__ void RaiseReference(PageState& state, float largest) const {
    const float reference = fmaxf(ceilf(TokenMax(largest)) - kProductBits, state.reference);
    // All heads of a warp have their first page at once, and nothing to scale.
    if (__any_sync(~0u, state.reference > kEmptyReference)) {
      Scale<kV>(state, static_cast<int>(fminf(reference - state.reference, 62.0f)));
    }
    state.reference = reference;
  }
  // Raises R by `bits`.
  template <BlockKind kV>
  __device__ __forceinline__ void Scale(PageState& state, int bits) const {
    const float f = Exp2(-static_cast<float>(bits));
    state.reference += static_cast<float>(bits);
    state.l *= f;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) state.z[g] *= f;
    MoveBytes<kV>(state, -1);
    const int64_t half = (int64_t{1} << bits) >> 1;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      state.sum[g] = static_cast<int32_t>((state.sum[g] + half) >> bits);
    }
#pragma unroll
    for (int i = 0; i < 2 * T::kSteps; ++i) {
      int32_t &low = state.o[i / 2][i % 2 * 2], &high = state.o[i / 2][i % 2 * 2 + 1];
      const int64_t total = (int64_t{high} * 256 + low + half) >> bits;
      low = static_cast<int32_t>(total & 255);
      high = static_cast<int32_t>(total >> 8);
    }
    MoveBytes<kV>(state, 1);
  }
  // Sums of whole bytes are those of a byte's last slice and of the slices below it.
  template <BlockKind kV>
  __device__ static __forceinline__ void MoveBytes(PageState& state, int sign) {
    if constexpr (kV == BlockKind::kInt2 && kGroups == 1) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int first = i / 4 * 4;
        state.o[first + 3][i % 4] +=
            sign * (state.o[first][i % 4] + state.o[first + 1][i % 4] + state.o[first + 2][i % 4]);
      }
    } else if constexpr (kV == BlockKind::kInt4) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        state.o[i / 4 * 2 + 1][i % 4] += sign * state.o[i / 4 * 2][i % 4];
      }
    }
  }

  // ---- BF16 windows, in units of 16 tokens ----

  struct UnitState {
    uint4 q[T::kSteps / 2];
    float reference = kEmptyReference, l = 0.0f;
    float o[T::kSteps][4] = {};
  };

  __device__ __forceinline__ void Units(const DecodeItem& item, const uint8_t* q, int rank) {
    UnitState state;
#pragma unroll
    for (int i = 0; i < T::kSteps / 2; ++i) {
      state.q[i] = reinterpret_cast<const uint4*>(q)[i * 32 + lane_];
    }
    for (int i = rank; i < item.count; i += T::kWarps) {
      Unit(this->ValidRows(item, item.first + i), state);
    }
    this->WaitForState();
    const float l = TokenSum(state.l);
    if (quad_ >= item.heads) return;
    float* out = StateOf(rank * item.heads + quad_);
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      out[s * 16 + row_] = state.o[s][0] + state.o[s][1];
      out[s * 16 + 8 + row_] = state.o[s][2] + state.o[s][3];
    }
    WriteReference(rank * item.heads + quad_, state.reference, l);
  }

  // The first `valid` of 16 tokens count.
  __device__ __forceinline__ void Unit(int valid, UnitState& state) {
    const float factor = this->p_.scale_log2;
    this->WaitStage();
    if constexpr (T::kMixed) this->LoadId();  // pages may follow
    float c[4] = {};
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      uint32_t a[4];
      LoadMatrix4(a, this->KeyRow(s));
      const uint4& q = state.q[s / 2];
      MmaBf16(c, a[0], a[1], a[2], a[3], s % 2 == 0 ? q.x : q.z, s % 2 == 0 ? q.y : q.w);
    }
    this->ReleaseStage();
    const float logit[2] = {row_ < valid ? c[0] * factor : -INFINITY,
                            row_ + 8 < valid ? c[2] * factor : -INFINITY};
    const float largest = fmaxf(logit[0], logit[1]);
    if (__any_sync(~0u, largest > state.reference)) {
      const float reference = fmaxf(TokenMax(largest), state.reference);
      const float f = Exp2(state.reference - reference);
      state.reference = reference;
      state.l *= f;
#pragma unroll
      for (int i = 0; i < 4 * T::kSteps; ++i) state.o[i / 4][i % 4] *= f;
    }
    uint32_t b[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float p = Exp2(logit[i] - state.reference);
      state.l += p;
      const float rounded = Bf16Low(PackBf16(p, 0.0f));
      b[i] = Transpose8x8(PackBf16(p, p - rounded));
    }
    this->WaitStage();
    if constexpr (T::kMixed) this->LoadId();  // pages may follow
    if (valid < kUnitTokens) this->ClearRows(valid);
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      uint32_t a[4];
      LoadMatrix4Transposed(a, this->ValueRow(s));
      MmaBf16(state.o[s], a[0], a[1], a[2], a[3], b[0], b[1]);
    }
    this->ReleaseStage();
  }

  __device__ __forceinline__ float* StateOf(int index) const {
    return reinterpret_cast<float*>(shared_ + this->at_.state) + index * T::kStateStride;
  }
  __device__ __forceinline__ void WriteReference(int index, float reference, float l) const {
    if (row_ == 0) reinterpret_cast<float2*>(shared_ + this->at_.ml)[index] = {reference, l};
  }
};

}  // namespace oscar::cuda
