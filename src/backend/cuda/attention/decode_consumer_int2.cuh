// The decode kernel's consumer warps for INT2 pages of D 128, one group a row, up to 4 query heads
// a KV head. Device only; decode_attention.cuh describes the whole.
//
// Four heads fill half of a fragment's eight columns. Head h has columns 2h and 2h + 1, so a lane
// has the tokens of one head only, and half as many logits as in the layout of DecodeConsumer. P
// against the windows is a sum of two BF16 numbers, one a column; their keys leave the second zero.
//
// Against pages the query (decode_query_int2.cuh) and P * (V scale) are 16-bit integers, a byte a
// column, and codes are bytes: four of them come out of a word with one AND (two as fp16), none of
// V for one slice in four (its sum is that of whole bytes less the other three), and sums are
// exact. What rounding takes from P is made good by the mean code, 1.5: with y = round(P s),
//   out = sum P (min + 1.5 s) + sum y (code - 1.5)
// so that rounding meets numbers of mean zero. Over thousands of equally likely tokens the output
// is what is left of codes and minima that cancel, and rounding P alone would be most of it.
//
// R, the reference of the softmax, is a whole number for pages: the largest P * (V scale) begins
// between 2^14 and 2^15 and R rises when one exceeds 16 bits.
#pragma once

#include "cuda/attention/decode_query_int2.cuh"
#include "cuda/attention/decode_ring.cuh"

namespace oscar::cuda {

template <typename T>
class DecodeConsumerInt2 : DecodeRing<T> {
 public:
  static_assert(T::kKind == BlockKind::kInt2 && T::kDim == 128 && T::kGroups == 1 &&
                T::kHeads == 4);

  __device__ DecodeConsumerInt2(const DecodeKernelParams& p, uint8_t* shared,
                                const DecodeShared<T>& at, int warp, int lane)
      : DecodeRing<T>(p, shared, at, warp, lane) {}

  __device__ void Run() {
    this->ForEachItem([&](const DecodeItem& item, const uint8_t* q, int rank) {
      if (item.kind == kItemPages) {
        Pages(item, q, rank);
      } else {
        Units(item, q, rank);
      }
    });
  }

 private:
  using Ring = DecodeRing<T>;
  using Ring::ExponentOf, Ring::TokenMax, Ring::TokenSum;
  using Ring::lane_, Ring::quad_, Ring::row_, Ring::shared_;

  static constexpr float kProductBits = 15.0f;  // of the largest P * (V scale) where R is set
  static constexpr float kToInteger = 0x1p23f;  // a float beyond it has its integer in its low bits
  static constexpr float kLargestProduct = kToInteger + 65535.0f;
  static constexpr float kMeanCode = 1.5f;
  // 32-bit sums have room for 516 pages of the largest products.
  static constexpr int kPagesPerSum = 128;

  struct PageState {
    const uint4* q;       // DecodeQueryInt2's, this lane's
    float q_sum, factor;  // raw logits of all codes 1; raw logit -> log2 units
    float reference = kEmptyReference, l = 0.0f, z = 0.0f;
    int32_t sum = 0;               // of y
    int32_t o[T::kSteps][4] = {};  // of y * code: {low, high byte} of dims row_ and row_ + 8
  };

  __device__ __forceinline__ void Pages(const DecodeItem& item, const uint8_t* q, int rank) {
    PageState state;
    state.q = reinterpret_cast<const uint4*>(q) + lane_;
    const float2 factors = DecodeQueryInt2<T>::Factors(q)[lane_];
    state.q_sum = factors.x;
    state.factor = factors.y;
    int left = (item.count - rank + T::kWarps - 1) / T::kWarps;
    while (true) {
      int pages = min(left, kPagesPerSum);
      if (!DecodeQueryInt2<T>::HasRest(q)) {
        for (; pages > 0; --pages) Page<false>(state);
      } else {
        for (; pages > 0; --pages) Page<true>(state);
      }
      left -= kPagesPerSum;
      if (left <= 0) break;
      Scale(state, 1);
    }
    this->WaitForState();
    MoveBytes(state, -1);
    const float l = TokenSum(state.l);
    const float z = TokenSum(fmaf(static_cast<float>(state.sum), -kMeanCode, state.z));
    if (quad_ >= item.heads) return;
    float* out = StateOf(rank * item.heads + quad_);
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      const float up = Power2(-T::Exponent(s));
      out[s * 16 + row_] = fmaf(Total(state.o[s][0], state.o[s][1]), up, z);
      out[s * 16 + 8 + row_] = fmaf(Total(state.o[s][2], state.o[s][3]), up, z);
    }
    WriteReference(rank * item.heads + quad_, state.reference, l);
  }
  __device__ static float Total(int32_t low, int32_t high) {
    return fmaf(static_cast<float>(high), 256.0f, static_cast<float>(low));
  }

  // kRest: the query has a rest. Rare, and a separate loop keeps it out of the others' registers.
  template <bool kRest>
  __device__ __forceinline__ void Page(PageState& state) {
    this->WaitStage();
    this->LoadId();
    const uint8_t* block = shared_ + this->StageOffset();
    float logit[8];  // of tokens row_ + 8 j
    Keys<kRest>(block, state, logit);
    float scale[8], minimum[8];
    LoadMeta(block + T::kLayout.v_meta_offset(), scale, minimum);
    float p[8], y[8];
    const float largest = Softmax(state, logit, scale, p, y);
    if (__any_sync(~0u, largest > kLargestProduct)) {
      RaiseReference(state, logit, scale);
      Softmax(state, logit, scale, p, y);
    }
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      state.l += p[j] + p[j + 1];
      state.z = fmaf(p[j], fmaf(kMeanCode, scale[j], minimum[j]),
                     fmaf(p[j + 1], fmaf(kMeanCode, scale[j + 1], minimum[j + 1]), state.z));
      state.sum += __float_as_int(y[j]) + __float_as_int(y[j + 1]);
    }
    state.sum -= static_cast<int32_t>(8u * 0x4b000000u);  // kToInteger's own bits
    Values(block + T::kLayout.v_codes_offset(), y, state);
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

  // 64 times the sums of code * q. Bit pair p of the code words weighs code * 4^p: sums are
  // multiplied by 4 before the next pair is added. Tiles alternate, so that products that wait for
  // each other are four apart.
  __device__ __forceinline__ void CodeSums(const uint8_t* block, const uint4* query,
                                           float (&sum)[8]) const {
    uint4 w[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      w[t] = *reinterpret_cast<const uint4*>(block + T::kLayout.k_codes_offset() +
                                             t * BlockLayout::kFragmentPlaneBytes + lane_ * 16);
    }
    int32_t c[4][4] = {};
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
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      sum[2 * t] = static_cast<float>(c[t][0] * 256 + c[t][1]);
      sum[2 * t + 1] = static_cast<float>(c[t][2] * 256 + c[t][3]);
    }
  }
  template <bool kRest>
  __device__ __forceinline__ void Keys(const uint8_t* block, const PageState& state,
                                       float (&logit)[8]) const {
    float sum[8];
    CodeSums(block, state.q, sum);
    if constexpr (kRest) {
      float rest[8];
      CodeSums(block, state.q + 64, rest);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] = fmaf(rest[j], DecodeQueryInt2<T>::kRestUnit, sum[j]);
    }
    float scale[8], minimum[8];
    LoadMeta(block + T::kLayout.k_meta_offset(), scale, minimum);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      logit[j] = fmaf(sum[j], scale[j], minimum[j] * state.q_sum);
    }
  }

  // Releases the stage. Tokens of two tiles alternate along k, in A as in B.
  __device__ __forceinline__ void Values(const uint8_t* codes, const float (&y)[8],
                                         PageState& state) {
#pragma unroll
    for (int t = 0; t < 4; t += 2) {
      uint32_t b[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // low bytes of both tiles, then high ones
        b[i] = Transpose8x8(
            __byte_perm(__float_as_uint(y[2 * t + i]), __float_as_uint(y[2 * t + 2 + i]), 0x5140));
      }
      const uint4 w = *reinterpret_cast<const uint4*>(codes + t * BlockLayout::kFragmentPlaneBytes +
                                                      lane_ * 16);
      const uint4 u = *reinterpret_cast<const uint4*>(
          codes + (t + 1) * BlockLayout::kFragmentPlaneBytes + lane_ * 16);
      if (t == 2) this->ReleaseStage();
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // slices 0-3 are the even bytes, 4-7 the odd ones
        const uint32_t select = half == 0 ? 0x6240 : 0x7351;
        const uint4 a = {__byte_perm(w.x, u.x, select), __byte_perm(w.y, u.y, select),
                         __byte_perm(w.z, u.z, select), __byte_perm(w.w, u.w, select)};
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          // Whole bytes for the last slice: MoveBytes() takes the others out of its sum.
          const uint32_t mask = s == 3 ? ~0u : 0x03030303u << (2 * s);
          MmaU8(state.o[half * 4 + s], a.x & mask, a.y & mask, a.z & mask, a.w & mask, b[0], b[1]);
        }
      }
    }
  }

  __device__ __forceinline__ void RaiseReference(PageState& state, const float (&logit)[8],
                                                 const float (&scale)[8]) const {
    float largest = -INFINITY;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      largest = fmaxf(largest, fmaf(logit[j], state.factor, __log2f(scale[j])));
    }
    const float reference = fmaxf(ceilf(TokenMax(largest)) - kProductBits, state.reference);
    // All heads of a warp have their first page at once, and nothing to scale.
    if (__any_sync(~0u, state.reference > kEmptyReference)) {
      Scale(state, static_cast<int>(fminf(reference - state.reference, 62.0f)));
    }
    state.reference = reference;
  }
  // Raises R by `bits`.
  __device__ __forceinline__ void Scale(PageState& state, int bits) const {
    const float f = Exp2(-static_cast<float>(bits));
    state.reference += static_cast<float>(bits);
    state.l *= f;
    state.z *= f;
    MoveBytes(state, -1);
    const int64_t half = (int64_t{1} << bits) >> 1;
    state.sum = static_cast<int32_t>((state.sum + half) >> bits);
#pragma unroll
    for (int i = 0; i < 2 * T::kSteps; ++i) {
      int32_t &low = state.o[i / 2][i % 2 * 2], &high = state.o[i / 2][i % 2 * 2 + 1];
      const int64_t total = (int64_t{high} * 256 + low + half) >> bits;
      low = static_cast<int32_t>(total & 255);
      high = static_cast<int32_t>(total >> 8);
    }
    MoveBytes(state, 1);
  }
  // Sums of whole bytes are those of slices 3 and 7 and of the three slices below them.
  __device__ static __forceinline__ void MoveBytes(PageState& state, int sign) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int first = i / 4 * 4;
      state.o[first + 3][i % 4] +=
          sign * (state.o[first][i % 4] + state.o[first + 1][i % 4] + state.o[first + 2][i % 4]);
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
